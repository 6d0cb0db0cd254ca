"""Softmax attention in the shapes that the models need.

S sequences, Q queries per sequence, C context slots, H query heads, G key/value heads, K head features,
V value features.
"""

from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops

from msds_ops.iota import iota

Array: TypeAlias = npt.NDArray[Any]

_bmm = ops.BatchMatMul()
_bmm_nt = ops.BatchMatMul(transpose_b=True)


def attention_bias(mask: Tensor, heads: int) -> Tensor:
    """What is added to scores so that softmax gives 0 outside the mask: [S, Q, C] bool -> [S, H, Q, C] float32.

    One -inf or 0 per score, made once per step for all layers: adding arrays of one shape is ten times as fast on a
    CPU as masking with a broadcast. Every row of the mask must have one True.
    """
    bias = ops.masked_fill(ops.zeros(mask.shape, ms.float32), ops.logical_not(mask), float("-inf"))
    return ops.tile(bias.expand_dims(1), (1, heads, 1, 1))


def causal_mask(positions: Tensor, query_lens: Tensor) -> Tensor:
    """Row q sees column k where k is a real token at no later position: [S, Q], [S] -> [S, Q, Q] bool."""
    index = iota(positions.shape[1])
    is_real = index.reshape(1, 1, -1) < query_lens.reshape(-1, 1, 1)
    is_self = index.expand_dims(1) == index.expand_dims(0)  # a padding row sees itself, so that softmax is finite
    earlier = positions.expand_dims(1) <= positions.expand_dims(2)
    return ops.logical_or(ops.logical_and(earlier, is_real), is_self.expand_dims(0))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Grouped-query attention: q [S, Q, H, K], k [S, G, C, K], v [S, G, C, V], bias [S, H, Q, C] -> [S, Q, H, V].

    Query head h reads key head h // (H / G). The softmax is taken in float32.
    """
    sequences, queries, heads, key_dim = q.shape
    groups, context, value_dim = v.shape[1:]
    rows = heads // groups * queries
    q = (q * scale).transpose(0, 2, 1, 3).reshape(sequences, groups, rows, key_dim)  # [S, G, H/G * Q, K]
    scores = _bmm_nt(q, k).reshape(sequences, heads, queries, context).astype(ms.float32)
    probabilities = ops.softmax(scores + bias, -1).astype(v.dtype)
    out = _bmm(probabilities.reshape(sequences, groups, rows, context), v)  # [S, G, H/G * Q, V]
    return out.reshape(sequences, heads, queries, value_dim).transpose(0, 2, 1, 3)


def attend_latent(q: Tensor, latent: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Multi-query attention whose values are its keys: q [S, H, Q, F], latent [S, C, F], bias [S, H, Q, C]
    -> [S, H, Q, F].

    The core of absorbed MLA (DeepSeek-V2, section 2.1.2): the latent is read as it lies in the cache, once for
    all heads, and never expanded. The softmax is taken in float32.
    """
    sequences, heads, queries, features = q.shape
    context = latent.shape[1]
    scores = _bmm_nt(q.reshape(sequences, heads * queries, features) * scale, latent)
    scores = scores.reshape(sequences, heads, queries, context).astype(ms.float32)
    probabilities = ops.softmax(scores + bias, -1).astype(latent.dtype)
    out = _bmm(probabilities.reshape(sequences, heads * queries, context), latent)
    return out.reshape(sequences, heads, queries, features)


def attend_numpy(q: Array, k: Array, v: Array, mask: Array, scale: float) -> Array:
    """`attend` in float64, one head at a time."""
    sequences, queries, heads, _ = q.shape
    groups = k.shape[1]
    out = np.zeros((sequences, queries, heads, v.shape[-1]))
    for s in range(sequences):
        for h in range(heads):
            g = h // (heads // groups)
            scores = q[s, :, h].astype(np.float64) @ k[s, g].T * scale
            scores = np.where(mask[s], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[s, :, h] = weights / weights.sum(-1, keepdims=True) @ v[s, g]
    return out
