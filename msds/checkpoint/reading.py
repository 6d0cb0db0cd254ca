"""Bytes of a tensor, or of a slice of it, from an open file: exactly those asked for, in pieces.

Files are read with `pread` and not mapped: a shard that shrinks or a failing disk is then an error with a
name, where a mapped page would end the process.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from msds.checkpoint.dtypes import CHUNK_BYTES, Array, stored_type
from msds.checkpoint.header import TensorInfo
from msds.errors import CheckpointError

Index = Sequence[slice]
"""A slice per leading axis, with step 1; axes without one are read whole."""


class ShardFiles:
    """The open shards of a checkpoint: opened on first use, closed by `close` or with this object."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._descriptors)
        self.bytes_read = 0

    def close(self) -> None:
        """Closes all files; a later read opens its file again."""
        _close_all(self._descriptors)

    def read_into(self, path: Path, offset: int, buffer: NDArray[np.uint8]) -> None:
        """Fills `buffer` with the bytes of `path` from `offset` on, or raises CheckpointError."""
        try:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            view, done = buffer.data, 0
            while done < len(view):
                count = os.preadv(self._descriptors[path], [view[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(f"{path} ends at byte {offset + done} now: it was changed")
                done += count
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        self.bytes_read += len(view)


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def bounds(name: str, shape: tuple[int, ...], index: Index | None) -> list[tuple[int, int]]:
    """Start and stop on every axis; raises for a step, and for what lies outside the shape."""
    slices = list(index or ())
    if len(slices) > len(shape):
        raise CheckpointError(f"{name} {list(shape)} cannot take {len(slices)} slices")
    ranges = []
    for axis, size in enumerate(shape):
        part = slices[axis] if axis < len(slices) else slice(None)
        start, stop = part.start or 0, size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise CheckpointError(f"{name} {list(shape)}: {part} is not a part of axis {axis}")
        ranges.append((start, stop))
    return ranges


def slice_shape(info: TensorInfo, index: Index | None) -> tuple[int, ...]:
    """The shape of the part of a tensor that `index` selects."""
    return tuple(stop - start for start, stop in bounds(info.name, info.shape, index))


def _runs(info: TensorInfo, ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(file offset, bytes) of each contiguous stretch of the selected part, in the order of the result."""
    if any(start == stop for start, stop in ranges):
        return
    whole = len(ranges)  # axes from here on are read whole
    while whole and ranges[whole - 1] == (0, info.shape[whole - 1]):
        whole -= 1
    strides = [prod(info.shape[axis + 1 :]) * stored_type(info.dtype).nbytes for axis in range(len(ranges))]
    if whole == 0:
        yield info.offsets[0], info.nbytes
        return
    start, stop = ranges[whole - 1]
    length = (stop - start) * strides[whole - 1]
    base = info.offsets[0] + start * strides[whole - 1]
    outer = [range(first, last) for first, last in ranges[: whole - 1]]
    for position in np.ndindex(*(len(axis) for axis in outer)):
        steps = zip(outer, position, strides, strict=False)
        yield base + sum(axis[i] * stride for axis, i, stride in steps), length


def read_pieces(
    files: ShardFiles, info: TensorInfo, index: Index | None, into: Array | None = None
) -> Iterator[tuple[int, Array]]:
    """The selected part in C order, as (first element, flat raw array) pieces of whole rows of its last axis.

    With `into` (a C-contiguous array of the part's shape and raw type) pieces are read right into it;
    otherwise they share one buffer, so each must be used before the next is asked for.
    """
    ranges = bounds(info.name, info.shape, index)
    raw, item = stored_type(info.dtype).raw, stored_type(info.dtype).nbytes
    shape = [stop - start for start, stop in ranges]
    total = prod(shape) * item
    row = item * (shape[-1] if len(shape) > 1 else 1)
    size = min(total, max(row, CHUNK_BYTES // max(row, 1) * row))
    target = None if into is None else into.reshape(-1).view(np.uint8)
    buffer = np.empty(size if target is None else 0, np.uint8)
    begin = filled = 0
    for offset, length in _runs(info, ranges):
        done = 0
        while done < length:
            count = min(length - done, size - filled)
            piece = buffer[:size] if target is None else target[begin : begin + size]
            files.read_into(info.file, offset + done, piece[filled : filled + count])
            done += count
            filled += count
            if filled == size or begin + filled == total:
                yield begin // item, piece[:filled].view(raw)
                begin, filled = begin + filled, 0
