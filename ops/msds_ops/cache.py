"""The paged cache: fixed blocks of token slots, found through block tables.

N rows of storage, S sequences, Q new tokens each, T = S * Q, B blocks of context,
C = B x block_size context slots, F features (any shape).

Block 0 belongs to nobody: padding tokens write there and masks never let it be read. Host code validates every
slot and block id before a graph runs, because an index error inside a graph leaves the cache half written.

Slot s is place s % block_size of block s // block_size. A cache is flat over rows because of what MindSpore does on a
CPU: of its scattering ops only ScatterUpdate on the first axis writes in place; the others, and a reshape of a bound
array, copy the whole cache. One row per slot, or, where several heads are cached, one per head and slot, head first:
attention then reads the context of each head in order, without transposing it.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops

from msds_ops.iota import iota

Array: TypeAlias = npt.NDArray[Any]

_scatter_update = ops.ScatterUpdate()


def cache_write(cache: Tensor, values: Tensor, rows: Tensor, impl: str) -> Tensor:
    """Write rows: cache [N, F], values [..., F], rows [...] int32 -> the written cache.

    `reference` makes a new array; `portable` writes the bound cache in place, after which the old name shows the
    new data too, so read only what this returns. A non-finite value is written as 0: a token that overflowed
    must not reach other sequences through a block that is freed and reused (0 x NaN is NaN under any mask); the
    step reports the sequence itself by `is_finite`.
    """
    rows = rows.reshape(-1)
    values = values.reshape(-1, values.shape[-1])
    values = ops.where(ops.isfinite(values), values, ops.zeros_like(values)).astype(cache.dtype)
    if impl == "reference":
        return ops.tensor_scatter_update(cache, rows.expand_dims(-1), values)
    return _scatter_update(cache, rows, values)


def cache_add(cache: Tensor, values: Tensor, first: int, impl: str) -> Tensor:
    """Add to rows that no padding touches: cache [N, F], values [n, F] -> the cache, rows from `first` on increased.

    Implementations as of `cache_write`. What is read of the old value is read before the write, which needs the sum.
    """
    rows = iota(values.shape[0]) + first
    values = ops.gather(cache, rows, 0) + values
    if impl == "reference":
        return ops.tensor_scatter_update(cache, rows.expand_dims(-1), values)
    return _scatter_update(cache, rows, values)


def cache_read(cache: Tensor, rows: Tensor) -> Tensor:
    """Rows in the order asked for: cache [N, F], rows [...] int32 -> [..., F]."""
    return ops.gather(cache, rows.reshape(-1), 0).reshape(*rows.shape, cache.shape[-1])


def head_rows(slots: Tensor, num_heads: int, num_slots: int) -> Tensor:
    """Rows of every cached head: slots [S, C] int32 -> [S, G, C] int32, head g of slot s in row g * num_slots + s."""
    first = iota(num_heads).reshape(1, -1, 1) * num_slots
    return slots.expand_dims(1) + first


def context_slots(block_tables: Tensor, block_size: int) -> Tensor:
    """The slot of each context position: block_tables [S, B] int32 -> [S, C] int32. Once per step, for all layers."""
    offsets = iota(block_size).reshape(1, 1, -1)
    return (block_tables.expand_dims(-1) * block_size + offsets).reshape(block_tables.shape[0], -1)


def context_mask(positions: Tensor, context: int, first: int = 0) -> Tensor:
    """Which context slots each query may see: positions [S, Q] int32 -> [S, Q, context] bool.

    Slot j holds the token at position j of its sequence, so causality and length are one comparison. Slots before
    `first` hold nothing, but a query there (padding has position 0) sees itself, which keeps its softmax finite.
    """
    index = iota(context).reshape(1, 1, -1)
    positions = positions.expand_dims(-1)
    seen = index <= positions
    if first == 0:
        return seen
    return ops.logical_and(seen, index >= ops.clamp(positions, max=first))


def cache_write_numpy(cache: Array, values: Array, rows: Array) -> Array:
    """The written cache as a new array."""
    written = cache.copy()
    for value, row in zip(values, rows, strict=True):
        written[row] = np.where(np.isfinite(value), value, 0)
    return written
