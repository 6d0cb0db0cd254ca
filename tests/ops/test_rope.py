"""Rotary frequencies against published numbers, rotations against complex arithmetic."""

import math

import numpy as np
import pytest

from msds_ops.rope import (
    default_frequencies,
    linear_frequencies,
    llama3_frequencies,
    rope_cos_sin,
    rotate,
    rotate_numpy,
    yarn_frequencies,
)
from tests.reference import numpy_rope

YARN_V3 = {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class TestFrequencies:
    @pytest.mark.parametrize(("dim", "theta"), [(8, 1e4), (64, 1e4), (128, 5e5), (96, 1e6)])
    def test_plain(self, dim, theta):
        want = numpy_rope.inverse_frequencies(dim, theta, None)
        np.testing.assert_allclose(default_frequencies(dim, theta), want, rtol=5e-7)
        np.testing.assert_allclose(linear_frequencies(dim, theta, 4.0), want / 4, rtol=5e-7)

    def test_yarn_of_deepseek_v3(self):
        ratio = yarn_frequencies(64, 1e4, **YARN_V3) / default_frequencies(64, 1e4)
        np.testing.assert_allclose(ratio[:11], 1.0, rtol=1e-6)
        np.testing.assert_allclose(ratio[[11, 16, 22]], [0.925, 0.55, 0.10], rtol=1e-5)
        np.testing.assert_allclose(ratio[23:], 0.025, rtol=1e-6)

    def test_llama3_of_the_distilled_model(self):
        ratio = llama3_frequencies(128, 5e5, **LLAMA3) / default_frequencies(128, 5e5)
        np.testing.assert_allclose(ratio[:29], 1.0, rtol=1e-6)
        np.testing.assert_allclose(ratio[[29, 32]], [0.8282, 0.3711], atol=5e-5)
        np.testing.assert_allclose(ratio[35:], 0.125, rtol=1e-6)

    @pytest.mark.parametrize(("dim", "theta"), [(8, 1e4), (64, 1e4), (128, 1e6), (32, 5e5)])
    @pytest.mark.parametrize("original", [64, 4096])
    def test_schemes_agree_with_the_independent_reference(self, dim, theta, original):
        yarn = YARN_V3 | {"original_max_position_embeddings": original}
        llama3 = LLAMA3 | {"original_max_position_embeddings": original}
        want = numpy_rope.inverse_frequencies(dim, theta, yarn | {"rope_type": "yarn"})
        np.testing.assert_allclose(yarn_frequencies(dim, theta, **yarn), want, rtol=5e-7)
        want = numpy_rope.inverse_frequencies(dim, theta, llama3 | {"rope_type": "llama3"})
        np.testing.assert_allclose(llama3_frequencies(dim, theta, **llama3), want, rtol=5e-7)

    def test_yarn_ramp_without_width_or_rounding(self):
        flat = yarn_frequencies(64, 1e4, **(YARN_V3 | {"original_max_position_embeddings": 6}))
        assert np.isfinite(flat).all()  # both ends of the ramp fall on the first feature
        exact = yarn_frequencies(64, 1e4, **YARN_V3, truncate=False)
        stretched = (1 - exact / default_frequencies(64, 1e4)) / (1 - 1 / 40)
        ends = [64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1)]
        want = np.clip((np.arange(32) - ends[0]) / (ends[1] - ends[0]), 0, 1)
        np.testing.assert_allclose(stretched, want, atol=1e-5)


class TestRotation:
    @pytest.mark.parametrize("heads", [1, 4])
    @pytest.mark.parametrize("interleaved", [True, False])
    def test_equals_complex_multiplication(self, run, rng, heads, interleaved):
        inv_freq = tuple(float(f) for f in default_frequencies(8, 1e4))

        def rotated(batch):
            cos, sin = rope_cos_sin(batch["positions"], inv_freq, 1.0, interleaved)
            return rotate(batch["x"], cos, sin, interleaved)

        x = rng.normal(size=(6, heads, 8)).astype(np.float32)
        positions = np.array([0, 1, 2, 31, 1000, 4095], np.int32)
        got = run(rotated, {"x": x, "positions": positions})
        want = rotate_numpy(x, positions, np.array(inv_freq), interleaved)
        assert got.shape == x.shape
        np.testing.assert_allclose(got, want, atol=5e-4)  # the angle 4095 has 2^-12 of float32 left
        np.testing.assert_allclose(got[:4], want[:4], atol=1e-5)
        np.testing.assert_array_equal(got[0], x[0])

    def test_where_the_components_of_a_pair_lie(self, run):
        inv_freq = tuple(float(f) for f in default_frequencies(8, 1e4))

        def rotated(batch):
            positions, x = batch["positions"], batch["x"]
            pair_cos, pair_sin = rope_cos_sin(positions, inv_freq, 1.0, True)
            half_cos, half_sin = rope_cos_sin(positions, inv_freq, 1.0, False)
            return rotate(x, pair_cos, pair_sin, True), rotate(x, half_cos, half_sin, False)

        unit = np.zeros((1, 1, 8), np.float32)
        unit[0, 0, 0] = 1
        interleaved, half = run(rotated, {"x": unit, "positions": np.array([3], np.int32)})
        c, s = math.cos(3), math.sin(3)
        np.testing.assert_allclose(interleaved[0, 0], [c, s, 0, 0, 0, 0, 0, 0], atol=1e-6)
        np.testing.assert_allclose(half[0, 0], [c, 0, 0, 0, s, 0, 0, 0], atol=1e-6)

    def test_amplitude_and_far_angles(self, run):
        inv_freq = tuple(float(f) for f in yarn_frequencies(8, 1e4, **YARN_V3))
        positions = np.array([0, 5, 4096, 163839], np.int32)

        def cos_sin(batch):
            positions = batch["positions"]
            return rope_cos_sin(positions, inv_freq, 1.0, False), rope_cos_sin(positions, inv_freq, 1.25, False)

        plain, louder = run(cos_sin, {"positions": positions})
        # The angle is one float32 product, as in the published code, and only then taken apart.
        want = numpy_rope.rotation(positions, np.array(inv_freq, np.float32), 1.0)
        for got, more, expected in zip(plain, louder, want, strict=True):
            assert got.shape == (4, 1, 8)
            np.testing.assert_allclose(got[:, 0, :4], expected, atol=1e-6)
            np.testing.assert_array_equal(got[:, 0, 4:], got[:, 0, :4])
            np.testing.assert_allclose(more, 1.25 * got, rtol=1e-6)
        assert np.abs(plain[0]).max() == 1.0
