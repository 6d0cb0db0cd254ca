"""Parameter trees before any array exists: their size, their leaves, what is derived from them, what steps return."""

from __future__ import annotations

import numpy as np
import pytest

from msds import presets
from msds.config import count_parameters, read_config
from msds.models import model_functions
from msds_graphs.specs import init_tree
from msds_graphs.trees import tree_flatten, tree_items
from tests.reference.variants import VARIANTS

PRESETS = [
    presets.deepseek_v3,
    presets.deepseek_v2,
    presets.deepseek_v2_lite,
    presets.r1_distill_qwen_7b,
    presets.r1_distill_llama_8b,
]


def size(tree):
    return sum(int(np.prod(leaf.shape)) for leaf in tree_flatten(tree)[0])


def check_count(config):
    spec, count = model_functions(config).spec(config), count_parameters(config)
    assert size({key: part for key, part in spec.items() if key != "mtp"}) == count.total
    assert size(spec.get("mtp", ())) == count.mtp


@pytest.mark.parametrize("preset", PRESETS)
def test_published_models_have_the_counted_parameters(preset):
    check_count(preset())


@pytest.mark.parametrize("name", VARIANTS)
def test_odd_configs_have_the_counted_parameters(tiny, name):
    check_count(read_config(tiny(name)))


def test_only_gates_keep_float32():
    config = presets.deepseek_v3()
    spec = model_functions(config).spec(config, "bfloat16")
    kept = {path.rsplit(".", 2)[-2] for path, leaf in tree_items(spec) if leaf.dtype != "bfloat16"}
    assert kept == {"gate"}


@pytest.mark.parametrize("name", ["v3_two_mtp", "v3_v_dim", "v3_fp8"])
def test_absorbed_halves_are_cut_from_kv_b_proj(tiny, name):
    """Keys of head h are W_UK[h] latent, values W_UV[h] latent: the rows of the published matrix, head by head."""
    config = read_config(tiny(name))
    functions = model_functions(config)
    derived = functions.derive(init_tree(functions.spec(config), seed=2), config=config)
    assert len(derived["layers"]) == config.num_hidden_layers
    assert len(derived["mtp"]) == config.num_nextn_predict_layers
    for layer in (*derived["layers"], *derived["mtp"]):
        attention = layer["self_attn"]
        w_uk, w_uv = attention["absorbed"]["w_uk"], attention["absorbed"]["w_uv"]
        assert w_uk.shape == (config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank)
        assert w_uv.shape == (config.num_attention_heads, config.v_head_dim, config.kv_lora_rank)
        rows = np.concatenate([np.concatenate(pair) for pair in zip(w_uk, w_uv, strict=True)])
        np.testing.assert_array_equal(rows, attention["kv_b_proj"]["weight"])


@pytest.mark.parametrize(
    ("preset", "per_token"), [(presets.deepseek_v3, 61 * 576), (presets.r1_distill_llama_8b, 32 * 2 * 8 * 128)]
)
def test_cache_of_a_token(preset, per_token):
    """DeepSeek caches 512 + 64 values per layer, Llama keys and values of its 8 heads of 128."""
    config = preset()
    functions = model_functions(config)
    cache = functions.cache_spec(config, 7, 16)
    assert size(cache["layers"]) == 7 * 16 * per_token
