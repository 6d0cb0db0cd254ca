"""Linear maps over nodes of a parameter tree. T tokens, D input features, O output features."""

import mindspore as ms
from mindspore import Tensor, ops

_matmul_nt = ops.MatMul(transpose_b=True)


def product(node: dict[str, Tensor], x: Tensor) -> Tensor:
    """x W^T: [T, D] -> [T, O], without the bias. `node` holds `weight` [O, D]."""
    return _matmul_nt(x, node["weight"])


def linear(node: dict[str, Tensor], x: Tensor) -> Tensor:
    """x W^T (+ b): [T, D] -> [T, O]. `node` holds `weight` [O, D] and, where the model has one, `bias` [O]."""
    y = product(node, x)
    if "bias" in node:
        y = y + node["bias"]
    return y


def linear_float32(weight: Tensor, x: Tensor) -> Tensor:
    """x W^T in float32 whatever the dtypes: [T, D], [O, D] -> [T, O]. For gates, whose ranks bf16 would change."""
    return _matmul_nt(x.astype(ms.float32), weight.astype(ms.float32))


def swiglu_mlp(node: dict[str, dict[str, Tensor]], x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)): [T, D] -> [T, D] (Shazeer 2020, SwiGLU)."""
    return linear(node["down_proj"], swiglu(node, x))


def swiglu(node: dict[str, dict[str, Tensor]], x: Tensor) -> Tensor:
    """silu(gate(x)) * up(x): [T, D] -> [T, I]."""
    return ops.silu(linear(node["gate_proj"], x)) * linear(node["up_proj"], x)
