"""Tensors as training stored them: whole or in slices of several ranks, each one or more stretches of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from msds.checkpoint.dtypes import Array, stored_type
from msds.checkpoint.reading import ShardFiles
from msds.errors import CheckpointError

Extent = tuple[int, int]
"""First byte in the file, number of bytes."""
Ranges = tuple[tuple[int, int], ...]
"""Start and stop on every axis."""


@dataclass(frozen=True)
class FileTensor:
    """One tensor of one file; its bytes are those of `extents` one after the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that its shape needs."""
        return prod(self.shape) * stored_type(self.dtype).nbytes


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that one file holds."""

    ranges: Ranges
    tensor: FileTensor


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, and the pieces that tile it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read_rows(self, files: ShardFiles, start: int, stop: int) -> Array:
        """Rows [start, stop) of axis 0 as raw numbers; a scalar is read with (0, 1)."""
        raw = stored_type(self.dtype).raw
        if not self.shape:
            return _read(files, self.pieces[0].tensor, 0, 1).reshape(())
        out = np.empty((stop - start, *self.shape[1:]), raw)
        for piece in self.pieces:
            (first, last), rest = piece.ranges[0], piece.ranges[1:]
            low, high = max(first, start), min(last, stop)
            if low < high:
                rows = _read(files, piece.tensor, low - first, high - first)
                place = (slice(low - start, high - start), *(slice(*axis) for axis in rest))
                out[place] = rows
        return out


def whole(tensor: FileTensor) -> StoredTensor:
    """A tensor that one file holds all of."""
    ranges = tuple((0, size) for size in tensor.shape)
    return StoredTensor(tensor.name, tensor.dtype, tensor.shape, (Piece(ranges, tensor),))


def check_tiling(tensor: StoredTensor) -> None:
    """CheckpointError unless the pieces cover every element once."""
    have = sum(prod(stop - start for start, stop in piece.ranges) for piece in tensor.pieces)
    if have != prod(tensor.shape):
        raise CheckpointError(
            f"tensor {tensor.name} {list(tensor.shape)}: its slices in {len(tensor.pieces)} files hold {have} of "
            f"{prod(tensor.shape)} numbers: a rank's file is missing, or the strategy is another run's"
        )


def _read(files: ShardFiles, tensor: FileTensor, start: int, stop: int) -> Array:
    """Rows [start, stop) of a file's tensor (a scalar has one row)."""
    row = prod(tensor.shape[1:]) * stored_type(tensor.dtype).nbytes
    out = np.empty((stop - start, *tensor.shape[1:]), stored_type(tensor.dtype).raw)
    buffer = out.reshape(-1).view(np.uint8)
    filled = 0
    for offset, count in _stretches(tensor.extents, start * row, stop * row):
        files.read_into(tensor.file, offset, buffer[filled : filled + count])
        filled += count
    return out


def _stretches(extents: tuple[Extent, ...], start: int, stop: int) -> Iterator[Extent]:
    """Where bytes [start, stop) of the concatenated extents lie."""
    position = 0
    for offset, count in extents:
        low, high = max(start, position), min(stop, position + count)
        if low < high:
            yield offset + low - position, high - low
        position += count
