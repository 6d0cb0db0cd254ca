"""Filling parameters from a checkpoint: straight into their final arrays, every value seen to be finite."""

import warnings
from collections.abc import Iterable, Sequence

import numpy as np

from msds.checkpoint.checks import check_checkpoint
from msds.checkpoint.dtypes import Array, stored_type
from msds.checkpoint.header import TensorInfo
from msds.checkpoint.ledger import Entry, Skip
from msds.checkpoint.progress import byte_progress
from msds.checkpoint.reading import bounds
from msds.checkpoint.shards import Checkpoint, name_some
from msds.errors import CheckpointError


class CheckpointWarning(UserWarning):
    """Something in a checkpoint that is odd but does not keep the model from running."""


def load(
    checkpoint: Checkpoint,
    entries: Iterable[Entry],
    skipped: Sequence[Skip] = (),
    *,
    progress: bool | None = None,
) -> dict[str, Array]:
    """Path -> array for every entry, in their order.

    Memory is that of the result and a buffer of a few megabytes. Shards are read front to back. Tensors that
    are neither used nor skipped are named in one CheckpointWarning. `progress` None shows a bar only on a
    terminal.

    Raises CheckpointError: before allocating, with every fault of `check_checkpoint`; while reading, for the
    first value that is not finite, with its tensor and position.
    """
    ledger = check_checkpoint(checkpoint, entries, skipped)
    if ledger.strays:
        warnings.warn(
            f"{checkpoint.folder} has tensors that this model does not use: {name_some(ledger.strays)}",
            CheckpointWarning,
            stacklevel=2,
        )
    # np.empty reserves addresses; memory is taken as values arrive.
    arrays = {path: np.empty(entry.held_shape, stored_type(entry.dtype).raw) for path, entry in ledger.entries.items()}
    bar = byte_progress("load", sum(array.nbytes for array in arrays.values()), progress)
    try:
        for entry, name, place, index in _in_file_order(checkpoint, ledger.entries.values()):
            out = arrays[entry.path] if place is None else arrays[entry.path][place]
            if entry.padding:
                out, spare = np.split(out, [entry.loaded_shape[0]])
                spare[...] = 0
            for start, part in checkpoint.pieces_into(name, out, entry.dtype, index):
                _refuse_non_finite(part, start, entry, checkpoint.info(name), index)
                bar.update(part.nbytes)
            ledger.fill(name)
    finally:
        bar.close()
    ledger.close()
    return arrays


_Part = tuple[Entry, str, int | None, tuple[slice, ...] | None]
"""A parameter, the tensor to read, its place along axis 0 (None: all of it), and the part of the tensor."""


def _in_file_order(checkpoint: Checkpoint, entries: Iterable[Entry]) -> list[_Part]:
    parts = [(entry, *part) for entry in entries for part in entry.parts()]

    def position(part: _Part) -> tuple[str, int]:
        info = checkpoint.info(part[1])
        return str(info.file), info.offsets[0]

    return sorted(parts, key=position)


def _is_finite(values: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return np.asarray((values & 0x7F80) != 0x7F80)  # an exponent of all ones is infinity or NaN
    return np.isfinite(values)


def _refuse_non_finite(
    values: Array, start: int, entry: Entry, info: TensorInfo, index: tuple[slice, ...] | None
) -> None:
    """Raises if `values`, elements `start` on of the part of a tensor at `index`, are not all finite."""
    is_finite = _is_finite(values, entry.dtype)
    if is_finite.all():
        return
    ranges = bounds(info.name, info.shape, index)
    flat = start + int(is_finite.argmin())
    inside = np.unravel_index(flat, [stop - first for first, stop in ranges])
    position = [first + int(i) for (first, _), i in zip(ranges, inside, strict=True)]
    raise CheckpointError(f"tensor {info.name} ({info.dtype}) is not finite at {position} when loaded as {entry.dtype}")
