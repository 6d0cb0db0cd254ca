"""Softmax scales and rotary constants of published configs, as graphs get them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from msds import presets
from msds.models.rotary import mla_softmax_scale, rotary_constants
from msds_graphs.compile import compile
from msds_ops.rope import rope_cos_sin


def constants(config, rope_dim):
    """(softmax scale, cos [3, R]) at positions 0, 1, 5000, out of a compiled graph."""

    def step(bound, donated, batch):
        inv_freq, amplitude = rotary_constants(config, rope_dim)
        cos, _ = rope_cos_sin(batch, inv_freq, amplitude, False)
        return (cos, cos * 0 + mla_softmax_scale(config)), donated

    cos, scale = compile(step, bound=(), batch=np.zeros(3, np.int32))(np.array([0, 1, 5000], np.int32))
    return scale.flat[0], cos[:, 0]


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (presets.deepseek_v3(), 0.135234),
        (presets.deepseek_v2_lite(), 0.114721),
        (replace(presets.deepseek_v3(), rope_scaling=None), 0.072169),
    ],
    ids=["v3", "v2_lite", "unstretched"],
)
def test_softmax_scale_has_mscale_squared_and_cosines_do_not_grow(config, scale):
    got, cos = constants(config, config.qk_rope_head_dim)
    assert got == pytest.approx(scale, abs=5e-7)
    assert np.abs(cos).max() == 1.0
    np.testing.assert_array_equal(cos[0], 1.0)


def test_amplitude_is_the_quotient_of_the_mscales():
    config = presets.deepseek_v3()
    scaling = replace(config.rope_scaling, mscale=0.5)
    scale, cos = constants(replace(config, rope_scaling=scaling), 64)
    want = (0.05 * np.log(40) + 1) / (0.1 * np.log(40) + 1)
    np.testing.assert_allclose(cos[0], want, rtol=1e-6)
    assert scale == pytest.approx(0.135234, abs=5e-7)  # mscale is the rotation's, mscale_all_dim the softmax's
