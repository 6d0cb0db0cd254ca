"""Linear maps and the gated MLP against NumPy."""

import numpy as np
import pytest

from msds_ops.linear import linear, linear_float32, swiglu_mlp


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(run, rng, tokens, bias):
    def mapped(batch):
        return linear(batch["node"], batch["x"])

    node = {"weight": rng.normal(size=(5, 8)).astype(np.float32)}
    if bias:
        node["bias"] = rng.normal(size=5).astype(np.float32)
    x = rng.normal(size=(tokens, 8)).astype(np.float32)
    want = x @ node["weight"].T + node.get("bias", 0)
    np.testing.assert_allclose(run(mapped, {"node": node, "x": x}), want, rtol=1e-5, atol=1e-5)


def test_gates_are_computed_in_float32(run):
    def mapped(batch):
        return linear_float32(batch["weight"], batch["x"])

    # 2049 has no float16: in half precision the product would be 2048, and ranks of experts would change
    got = run(mapped, {"weight": np.array([[2048, 1]], np.float32), "x": np.array([[1, 1]], np.float16)})
    assert got.dtype == np.float32
    assert got.item() == 2049


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu(run, rng, bias):
    def mapped(batch):
        return swiglu_mlp(batch["node"], batch["x"])

    shapes = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
    node = {name: {"weight": rng.normal(size=shape).astype(np.float32)} for name, shape in shapes.items()}
    if bias:
        for name, shape in shapes.items():
            node[name]["bias"] = rng.normal(size=shape[:1]).astype(np.float32)
    x = rng.normal(size=(3, 4)).astype(np.float32)

    def plain(name, value):
        return value @ node[name]["weight"].T.astype(np.float64) + node[name].get("bias", 0)

    gate = plain("gate_proj", x)
    want = plain("down_proj", gate / (1 + np.exp(-gate)) * plain("up_proj", x))
    np.testing.assert_allclose(run(mapped, {"node": node, "x": x}), want, rtol=1e-4, atol=1e-5)
