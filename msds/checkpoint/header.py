"""The header of one safetensors file, read as what it is: bytes from a stranger.

Nothing of the tensors themselves is read. Every fault is a sentence that names the file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from msds.checkpoint.dtypes import STORED_TYPES

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library sets, too."""

_POINTER_START = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `dtype`: our name of its stored type; `offsets`: bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.offsets[1] - self.offsets[0]


@dataclass(frozen=True)
class Header:
    """The tensors of one file, and what is wrong with it; with any fault no tensor of it may be read.

    metadata: what its writer noted, as far as it is text.
    """

    tensors: Mapping[str, TensorInfo]
    faults: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)


class _HeaderError(Exception):
    """The header cannot be understood at all; the message is the fault."""


def read_header(path: Path) -> Header:
    """Reads and checks the header of `path`. Never raises for what the file holds: faults are returned."""
    try:
        size = path.stat().st_size
        entries, data_start = _parse(path, size)
    except _HeaderError as error:
        return Header({}, (f"{path.name}: {error}",))
    except OSError as error:
        return Header({}, (f"{path.name}: cannot be read: {error.strerror or error}",))
    tensors: dict[str, TensorInfo] = {}
    faults: list[str] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        info = _tensor_info(name, entry, path, data_start)
        if isinstance(info, str):
            faults.append(f"{path.name}: tensor {name}: {info}")
        else:
            tensors[name] = info
    if not faults:
        faults = _layout_faults(path, list(tensors.values()), data_start, size)
    notes = entries.get("__metadata__")
    metadata = {k: v for k, v in notes.items() if isinstance(v, str)} if isinstance(notes, dict) else {}
    return Header(tensors, tuple(faults), metadata)


def _parse(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The JSON object of the header, and where the tensors' bytes begin."""
    with path.open("rb") as file:
        start = file.read(200)
        if start.startswith(_POINTER_START):
            lines = start.decode(errors="replace").splitlines()
            real = next((line[5:] for line in lines if line.startswith("size ")), "more")
            raise _HeaderError(
                f"is a git-lfs pointer of {size} bytes, the real file has {real}; run 'git lfs pull' there"
            )
        if size < 8:
            raise _HeaderError(f"has {size} bytes, too few for a safetensors file")
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER_BYTES or length < 2:
            raise _HeaderError(f"states a header of {length} bytes: it is damaged or no safetensors file")
        if 8 + length > size:
            raise _HeaderError(f"is truncated: its header alone needs {8 + length} bytes, it has {size}")
        file.seek(8)
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_unique_keys)
    except _HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise _HeaderError(f"its header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _HeaderError(f"its header must be a JSON object, got {type(entries).__name__}")
    return entries, 8 + length


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise _HeaderError(f"its header has {key!r} twice")
        keys[key] = value
    return keys


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor_info(name: str, entry: object, path: Path, data_start: int) -> TensorInfo | str:
    """The tensor that a header entry describes, or what is wrong with the entry."""
    if not isinstance(entry, dict):
        return f"its header entry is {str(entry)[:60]!r}, not an object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in STORED_TYPES:
        return f"number type {dtype!r} is not known; known are {', '.join(STORED_TYPES)}"
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        return f"shape {str(shape)[:60]} is not a list of sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        return f"data_offsets {str(offsets)[:60]} are not two positions"
    begin, end = offsets
    expected = prod(shape) * STORED_TYPES[dtype].nbytes
    if end - begin != expected:
        return f"{dtype} {shape} needs {expected} bytes, its data_offsets [{begin}, {end}] hold {end - begin}"
    offset = (data_start + begin, data_start + end)
    return TensorInfo(name, STORED_TYPES[dtype].dtype, tuple(shape), path, offset)


def _layout_faults(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> list[str]:
    """Tensors must fill the file from the header to its last byte, without gaps and without overlaps."""
    faults = []
    position, previous = data_start, "the header"
    for info in sorted(tensors, key=lambda info: info.offsets):
        begin, end = info.offsets
        if begin < position:
            faults.append(f"{path.name}: tensors {previous} and {info.name} overlap")
        elif begin > position:
            gap = begin - position
            faults.append(f"{path.name}: {gap} bytes between {previous} and {info.name} belong to no tensor")
        position, previous = max(position, end), info.name
    if position > size:
        faults.append(f"{path.name}: is truncated: expected {position} bytes, has {size}")
    elif position < size:
        faults.append(f"{path.name}: has {size - position} bytes too many: expected {position}, has {size}")
    return faults
