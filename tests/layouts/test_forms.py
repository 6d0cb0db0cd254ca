"""Every form is a permutation, and its two directions undo each other, whatever the sizes."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.config import DeepseekConfig
from msds.layouts import forms
from msds.layouts.orders import CHOICES, Orders

FORMS = {name: form for name, form in vars(forms).items() if isinstance(form, forms.Form)}
SIZES = st.integers(1, 4)


class Latent(DeepseekConfig):
    """Sizes alone; not a legal config."""

    def __init__(self, **sizes):
        self.__dict__.update(sizes)


def hf_arrays(name, data):
    """Arrays of the shapes that Hugging Face has for a form, and the config; numbers all different."""
    h, g, d, n, r, v, lora, columns = (data.draw(SIZES) for _ in range(8))
    r *= 2
    plain = SimpleNamespace(num_attention_heads=h * g, num_key_value_heads=g, head_dim=d, model_type="llama")
    latent = Latent(num_attention_heads=h, qk_nope_head_dim=n, qk_rope_head_dim=r, v_head_dim=v, kv_lora_rank=lora)
    rows, config = {
        "QKV": ([h * g * d, g * d, g * d], plain),
        "GATE_UP": ([n, n], plain),
        "EXPERT_GATE_UP": ([n, n], latent),
        "Q_SPLIT": ([h * (n + r)], latent),
        "Q_ROPE": ([h * (n + r)], latent),
        "KV_SPLIT": ([lora + r], latent),
        "KV_ROPE": ([lora + r], latent),
        "KV_B": ([h * (n + v)], latent),
    }.get(name, ([n], plain))
    starts = np.cumsum([0, *rows]) * columns
    arrays = [np.arange(first, last).reshape(-1, columns) for first, last in pairwise(starts)]
    return arrays, config


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_there_and_back(name, data):
    arrays, config = hf_arrays(name, data)
    orders = Orders(**{key: data.draw(st.sampled_from(choices)) for key, choices in CHOICES.items()})
    stored = FORMS[name].to_stored(arrays, config, orders)
    numbers = np.sort(np.concatenate([array.reshape(-1) for array in stored]))
    np.testing.assert_array_equal(numbers, np.arange(sum(array.size for array in arrays)))
    back = FORMS[name].to_hf(stored, config, orders)
    assert len(back) == len(arrays)
    for array, again in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(array, again)


def test_rope_rows_by_hand():
    """Two heads of one plain row and four rope rows; halves are even rows, then odd ones, within each head."""
    config = Latent(num_attention_heads=2, qk_nope_head_dim=1, qk_rope_head_dim=4)
    rows = np.arange(10)[:, None]
    nope, rope = forms.Q_SPLIT.to_stored([rows], config, Orders())
    assert nope.ravel().tolist() == [0, 5]
    assert rope.ravel().tolist() == [1, 3, 2, 4, 6, 8, 7, 9]
    (fused,) = forms.Q_ROPE.to_stored([rows], config, Orders(rope="halves"))
    assert fused.ravel().tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]


@pytest.mark.parametrize("name", ["QKV", "GATE_UP", "Q_SPLIT", "KV_SPLIT", "KV_ROPE", "Q_ROPE", "KV_B"])
def test_rows_that_do_not_fit_are_refused(name):
    config = Latent(
        num_attention_heads=2, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=3, kv_lora_rank=5, model_type="x"
    )
    direction = "to_hf" if name in ("QKV", "GATE_UP", "KV_ROPE", "Q_ROPE") else "to_stored"
    with pytest.raises(ValueError, match=r"rows|attention"):
        getattr(FORMS[name], direction)([np.zeros((13, 2))], config, Orders(rope="halves"))
