"""RMSNorm against its NumPy reference."""

import numpy as np
import pytest

from msds_ops.norm import rms_norm, rms_norm_numpy


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (2, 3, 16)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_equals_the_reference(run, rng, shape, eps):
    def normed(batch):
        return rms_norm(batch["x"], batch["weight"], eps)

    x, weight = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[-1:]).astype(np.float32)
    got = run(normed, {"x": x, "weight": weight})
    assert got.shape == shape
    np.testing.assert_allclose(got, rms_norm_numpy(x, weight, eps), rtol=1e-5, atol=1e-6)


def test_a_vector_worked_out_by_hand(run):
    def normed(batch):
        return rms_norm(batch["x"], batch["weight"], 0.5)

    # mean of squares (9 + 16 + 0 + 0 + 5 x 0) / 4 = 6.25, and with epsilon 6.75; epsilon alone for zeros
    x = np.array([[3, 4, 0, 0], [0, 0, 0, 0]], np.float32)
    got = run(normed, {"x": x, "weight": np.array([1, 2, 1, 1], np.float32)})
    np.testing.assert_allclose(got[0], np.array([3, 8, 0, 0]) / np.sqrt(6.75), rtol=1e-6)
    np.testing.assert_array_equal(got[1], 0)


def test_mean_is_taken_in_float32(run):
    def normed(batch):
        return rms_norm(batch["x"], batch["weight"], 1e-6)

    x = np.array([[300, -400, 500, 600]], np.float16)  # the square of 300 is beyond float16
    got = run(normed, {"x": x, "weight": np.ones(4, np.float16)})
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, rms_norm_numpy(x, np.ones(4), 1e-6), rtol=2e-3)
