"""What takes the place of an op when its cost is measured by leaving it out. Parsed by MindSpore.

Each returns the shape of what it replaces for next to nothing, and keeps its other inputs alive (`depend`), because
MindSpore would otherwise drop what computed them and the part would look more expensive than it is.
"""

import mindspore as ms
from mindspore import Tensor, ops

from msds.config import DeepseekConfig
from msds_graphs.ranks import Ranks

_depend = ops.Depend()


def linear(node: dict[str, Tensor], x: Tensor) -> Tensor:
    """[T, D] -> [T, O]."""
    return ops.broadcast_to(x[:, :1], (x.shape[0], node["weight"].shape[0]))


def swiglu_mlp(node: dict[str, dict[str, Tensor]], x: Tensor) -> Tensor:
    """[T, D] -> [T, D]."""
    return x


def cut_mlp(node: dict[str, dict[str, Tensor]], x: Tensor, ranks: Ranks) -> Tensor:
    """[T, D] -> [T, D]."""
    return x


def row_linear(node: dict[str, Tensor], x: Tensor, ranks: Ranks) -> Tensor:
    """[T, D] -> [T, O]."""
    return linear(node, x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., D] -> [..., D]."""
    return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """[T, H, R] -> [T, H, R]."""
    return _depend(x, cos)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """[S, Q, H, K] -> [S, Q, H, V], where V is K or less."""
    return _depend(_depend(_depend(q, k), v), bias)[:, :, :, : v.shape[-1]]


def attend_latent(q: Tensor, latent: Tensor, bias: Tensor, scale: float) -> Tensor:
    """[S, H, Q, F] -> [S, H, Q, F]."""
    return _depend(_depend(q, latent), bias)


def cache_read(cache: Tensor, rows: Tensor) -> Tensor:
    """The first row of the cache at every place: [N, F], rows [...] -> [..., F]."""
    return ops.broadcast_to(_depend(cache, rows)[0], (*rows.shape, cache.shape[-1]))


def cache_write(cache: Tensor, values: Tensor, rows: Tensor, impl: str) -> Tensor:
    """The cache as it was."""
    return _depend(_depend(cache, values), rows)


def moe_experts(
    x: Tensor, topk_idx: Tensor, weights: Tensor, node: dict[str, Tensor], impl: str, partial: bool = False
) -> Tensor:
    """[T, D] -> [T, D]."""
    return _depend(_depend(x, topk_idx), weights)


def route(gate: dict[str, Tensor], x: Tensor, config: DeepseekConfig) -> tuple[Tensor, Tensor]:
    """The first K experts, in equal parts: [T, D] -> [T, K] twice."""
    shape = (x.shape[0], config.num_experts_per_tok)
    index = ops.arange(0, config.num_experts_per_tok, dtype=ms.int32).reshape(1, -1)
    return ops.broadcast_to(index, shape), ops.broadcast_to(x[:, :1], shape)


def batch_product(x: Tensor, weight: Tensor) -> Tensor:
    """[H, T, A], [H, A, B] -> [H, T, B]."""
    return ops.broadcast_to(x[:, :, :1], (*x.shape[:2], weight.shape[2]))


def batch_product_nt(x: Tensor, weight: Tensor) -> Tensor:
    """[H, T, A], [H, B, A] -> [H, T, B]."""
    return ops.broadcast_to(x[:, :, :1], (*x.shape[:2], weight.shape[1]))
