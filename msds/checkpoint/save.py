"""Writing safetensors: one tensor in memory at a time, and never a half-written file under its final name.

The header is written here and not by the safetensors library, whose functions take all bytes of a file at
once (a shard of 5 GB would be 5 GB of memory) and whose NumPy side knows neither bfloat16 nor float8. The
format is eight bytes of length, a JSON header, and the bytes of the tensors:
https://github.com/huggingface/safetensors#format.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from msds.checkpoint.dtypes import Array, encode, stored_type
from msds.checkpoint.progress import Progress, byte_progress
from msds.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAX_SHARD_BYTES = 5_000_000_000
"""Default size limit of a shard, the usual one on model hubs."""


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: known by name, type and shape now, its bytes made when their turn comes.

    `make()` gives an array of `shape` holding the raw numbers as `dtypes.encode` returns them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * stored_type(self.dtype).nbytes


def tensor_source(name: str, values: Array, dtype: str | None = None) -> TensorSource:
    """A source for an array in memory, written as `dtype` (default: its own type)."""
    dtype = str(values.dtype) if dtype is None else dtype
    stored_type(dtype)
    return TensorSource(name, dtype, values.shape, lambda: encode(values, dtype))


def raw_source(name: str, raw: Array, dtype: str) -> TensorSource:
    """A source for bits that are already `dtype`: `uint16` for bfloat16, `uint8` codes for float8."""
    if raw.dtype != stored_type(dtype).raw:
        expected = stored_type(dtype).raw
        raise CheckpointError(f"tensor {name}: raw {dtype} must be held as {expected}, got {raw.dtype}")
    return TensorSource(name, dtype, raw.shape, lambda: raw)


def write_file(
    path: Path | str,
    sources: Iterable[TensorSource],
    *,
    metadata: Mapping[str, str] | None = None,
    progress: bool | None = False,
) -> None:
    """Writes one safetensors file, replacing `path` in one step when every byte is on disk."""
    tensors = list(sources)
    bar = byte_progress("write", sum(source.nbytes for source in tensors), progress)
    with ExitStack() as stack:
        stack.callback(bar.close)
        write = partial(_write_tensors, sources=tensors, metadata=metadata or {}, bar=bar)
        _replace_all([(Path(path), write)])


def write_checkpoint(
    folder: Path | str,
    sources: Iterable[TensorSource],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    progress: bool | None = False,
) -> list[Path]:
    """Writes `model.safetensors`, or numbered shards with an index when the tensors need more than one.

    The files appear together at the end: an interrupt leaves the folder as it was. A folder that already
    holds safetensors files is refused, since old and new shards could not be told apart.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if present := sorted(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} already holds {present[0].name}; write to an empty folder")
    tensors = list(sources)
    total = sum(source.nbytes for source in tensors)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise CheckpointError(f"{folder} needs {total} bytes for its tensors, {free} are free on that disk")
    shards = _split(tensors, max_shard_bytes)
    # "format" is what transformers asks for; the bytes have no framework.
    notes = {"format": "pt", **(metadata or {})}
    bar = byte_progress("write", total, progress)
    writes: list[tuple[Path, Callable[[IO[bytes]], None]]] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {source.name: name for source in shard}
        writes.append((folder / name, partial(_write_tensors, sources=shard, metadata=notes, bar=bar)))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2, ensure_ascii=False).encode()
        writes.append((folder / INDEX_NAME, partial(_write_bytes, content=text)))
    with ExitStack() as stack:
        stack.callback(bar.close)
        _replace_all(writes)
    return [path for path, _ in writes]


def _split(tensors: Sequence[TensorSource], limit: int) -> list[list[TensorSource]]:
    """Cuts the sequence, in order, into shards of at most `limit` bytes (a larger tensor stands alone)."""
    shards: list[list[TensorSource]] = [[]]
    size = 0
    for source in tensors:
        if shards[-1] and size + source.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(source)
        size += source.nbytes
    return shards


def _write_tensors(
    file: IO[bytes], sources: Sequence[TensorSource], metadata: Mapping[str, str], bar: Progress
) -> None:
    """Header, then each tensor's bytes. Wider types come first, which keeps all tensors aligned."""
    ordered = sorted(sources, key=lambda source: -stored_type(source.dtype).nbytes)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for source in ordered:
        if source.name in header or source.name == "__metadata__":
            raise CheckpointError(f"tensor {source.name} is given twice, or has the format's reserved name")
        header[source.name] = {
            "dtype": stored_type(source.dtype).name,
            "shape": list(source.shape),
            "data_offsets": [offset, offset + source.nbytes],
        }
        offset += source.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for source in ordered:
        _write_tensor(file, source)
        bar.update(source.nbytes)


def _write_tensor(file: IO[bytes], source: TensorSource) -> None:
    # A function of its own, so that this tensor's memory is free before the next one is made.
    raw = np.asarray(source.make(), order="C")
    if raw.shape != source.shape or raw.dtype != stored_type(source.dtype).raw:
        raise CheckpointError(
            f"tensor {source.name}: announced {source.dtype} {list(source.shape)}, made {raw.dtype} {list(raw.shape)}"
        )
    file.write(raw.reshape(-1).view(np.uint8).data)


def _write_bytes(file: IO[bytes], content: bytes) -> None:
    file.write(content)


def _replace_all(writes: Sequence[tuple[Path, Callable[[IO[bytes]], None]]]) -> None:
    """Writes each file under a temporary name beside its own, and renames all once all are on disk."""
    partials = [path.with_name(f".{path.name}.{os.getpid()}.partial") for path, _ in writes]
    try:
        for unfinished, (_, write) in zip(partials, writes, strict=True):
            with unfinished.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for unfinished, (path, _) in zip(partials, writes, strict=True):
            unfinished.replace(path)
    finally:
        for unfinished in partials:
            unfinished.unlink(missing_ok=True)
