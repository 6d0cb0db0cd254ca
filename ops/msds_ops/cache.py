"""The paged cache: fixed blocks of token slots, found through block tables.

N blocks, P slots per block, S sequences, Q new tokens each, B blocks of context, F features (any shape).

Block 0 belongs to nobody: padding tokens write there and masks never let it be read. Host code validates every
slot and block id before a graph runs, because an index error inside a graph leaves the cache half written.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops


def cache_write(cache: Tensor, values: Tensor, slot_mapping: Tensor, *, impl: str) -> Tensor:
    """Write one row per token: cache [N, P, F...], values [T, F...], slot_mapping [T] int32 -> the written cache.

    `reference` makes a new array; `portable` writes the bound cache in place, after which the old name shows the
    new data too, so read only what this returns. A non-finite value is written as 0: a token that overflowed
    must not reach other sequences through a block that is freed and reused (0 x NaN is NaN under any mask); the
    step reports the sequence itself by `is_finite`.
    """
    block_size = cache.shape[1]
    values = ops.where(ops.isfinite(values), values, ops.zeros_like(values)).astype(cache.dtype)
    indices = ops.stack((slot_mapping // block_size, slot_mapping % block_size), -1)  # [T, 2]
    if impl == "reference":
        return ops.tensor_scatter_update(cache, indices, values)
    return ops.scatter_nd_update(cache, indices, values)


def cache_read(cache: Tensor, block_tables: Tensor) -> Tensor:
    """The context of each sequence in order: cache [N, P, F], block_tables [S, B] int32 -> [S, B * P, F]."""
    sequences, blocks = block_tables.shape
    rows = ops.gather(cache, block_tables.reshape(-1), 0)  # [S * B, P, F]
    return rows.reshape((sequences, blocks * cache.shape[1]) + cache.shape[2:])


def context_mask(positions: Tensor, context: int) -> Tensor:
    """Which context slots each query may see: positions [S, Q] int32 -> [S, Q, context] bool.

    Slot j holds the token at position j of its sequence, so causality and length are one comparison. A padding
    query has position 0 and sees slot 0, which keeps its softmax finite.
    """
    slots = ops.arange(0, context, dtype=ms.int32).reshape(1, 1, -1)
    return slots <= positions.expand_dims(-1)


def cache_write_numpy(cache: np.ndarray, values: np.ndarray, slot_mapping: np.ndarray) -> np.ndarray:
    """The written cache as a new array."""
    written = cache.copy()
    flat = written.reshape(-1, *cache.shape[2:])
    for row, slot in zip(values, slot_mapping, strict=True):
        flat[slot] = np.where(np.isfinite(row), row, 0)
    return written
