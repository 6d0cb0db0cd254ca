"""A checkpoint folder: which tensors it has, and reading any part of any of them.

Opening reads headers only. What is wrong with the files is collected, not raised, so that `check_checkpoint`
can name all of it at once; tensors of a damaged file are not offered for reading.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from msds.checkpoint.dtypes import Array, decode, encode, stored_type
from msds.checkpoint.header import TensorInfo, read_header
from msds.checkpoint.quantisation import SCALE_SUFFIX, Block, BlockScales, grid_index, scale_grid, wrong_grid
from msds.checkpoint.reading import Index, ShardFiles, bounds, read_pieces, slice_shape
from msds.checkpoint.save import INDEX_NAME, SINGLE_NAME
from msds.errors import CheckpointError

_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_MAX_NAMED = 8


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder. Build it with `open`; reading is lazy and exact to the byte.

    `faults`: what is wrong with the files, one sentence each. `unreadable`: tensors known to lie in a
    damaged or missing file.
    """

    folder: Path
    tensors: dict[str, TensorInfo]
    faults: tuple[str, ...]
    unreadable: frozenset[str]
    weight_block_size: Block | None
    files: ShardFiles = field(default_factory=ShardFiles, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path | str, *, weight_block_size: Sequence[int] | None = None) -> "Checkpoint":
        """Reads the headers in `folder`: of the files that its index names, or of all if there is no index.

        `weight_block_size`: rows and columns of the blocks that float8 weights are scaled in, from the
        model's config; without it they can only be read raw. Raises CheckpointError only if there is no
        checkpoint at all.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder")
        block = None
        if weight_block_size is not None:
            if len(weight_block_size) != 2 or min(weight_block_size) < 1:
                raise CheckpointError(f"weight_block_size must be two positive sizes, got {weight_block_size}")
            block = (int(weight_block_size[0]), int(weight_block_size[1]))
        if (folder / INDEX_NAME).exists():
            return cls(folder, *_scan_indexed(folder), block)
        return cls(folder, *_scan_all(folder), block)

    def names(self) -> list[str]:
        """The tensors that can be read."""
        return list(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Type, shape and place of a tensor; raises CheckpointError if it cannot be read."""
        try:
            return self.tensors[name]
        except KeyError:
            reason = "; ".join(self.faults[:3]) or "it is in none of its files"
            raise CheckpointError(f"{self.folder} has no readable tensor {name}: {reason}") from None

    def scale_name(self, name: str) -> str | None:
        """The tensor with the block scales of `name`, if `name` is stored as float8."""
        return name + SCALE_SUFFIX if self.info(name).dtype == "float8_e4m3fn" else None

    def read(self, name: str, index: Index | None = None, *, raw: bool = False) -> Array:
        """The tensor, or the part that `index` (a slice per leading axis) selects; only its bytes are read.

        bfloat16 and float8 come as float32, float8 multiplied with its block scales; `raw` gives their bits
        instead (`uint16`, `uint8`). Every other type comes as it is stored.
        """
        info = self.info(name)
        stored = stored_type(info.dtype)
        dtype = "float32" if stored.is_coded and not raw else info.dtype
        out = np.empty(slice_shape(info, index), stored_type(dtype).raw)
        self.read_into(name, out, dtype, index)
        return out

    def read_into(self, name: str, out: Array, dtype: str, index: Index | None = None) -> None:
        """Reads into `out`, C-contiguous and of the selected shape, as `dtype`: the stored type or a float
        type.

        A bfloat16 `out` is `uint16`. Beyond `out` this needs a buffer of a few megabytes.
        """
        for _ in self.pieces_into(name, out, dtype, index):
            pass

    def pieces_into(self, name: str, out: Array, dtype: str, index: Index | None = None) -> Iterator[tuple[int, Array]]:
        """`read_into` piece by piece: yields (first element, flat part of `out`) as parts are filled."""
        info = self.info(name)
        if out.shape != slice_shape(info, index) or not out.flags.c_contiguous:
            raise CheckpointError(f"tensor {name}: cannot fill an array of shape {list(out.shape)}")
        if out.dtype != stored_type(dtype).raw:
            raise CheckpointError(f"tensor {name}: {dtype} is held as {stored_type(dtype).raw}, got {out.dtype}")
        if dtype == info.dtype:
            yield from read_pieces(self.files, info, index, into=out)
            return
        stored = stored_type(info.dtype)
        scales = self._scales(info, index) if info.dtype == "float8_e4m3fn" else None
        flat, columns = out.reshape(-1), max(1, out.shape[-1]) if out.ndim else 1
        for start, piece in read_pieces(self.files, info, index):
            part = flat[start : start + piece.size]
            values = part if dtype == "float32" else np.empty(piece.size, np.float32)
            decode(piece, stored, values)
            if scales is not None:
                scales.apply(values.reshape(-1, columns), start // columns)
            if values is not part:
                part[...] = encode(values, dtype)
            yield start, part

    def _scales(self, info: TensorInfo, index: Index | None) -> BlockScales:
        if self.weight_block_size is None:
            raise CheckpointError(
                f"tensor {info.name} is float8, but the config has no quantization_config.weight_block_size"
            )
        if len(info.shape) != 2:
            raise CheckpointError(f"tensor {info.name} {list(info.shape)} is float8 but not a matrix")
        scale = self.info(info.name + SCALE_SUFFIX)
        if scale.shape != scale_grid(info.shape, self.weight_block_size):
            raise CheckpointError(wrong_grid(info.name, info.shape, scale.shape, self.weight_block_size))
        ranges = bounds(info.name, info.shape, index)
        part = self.read(scale.name, grid_index(ranges, self.weight_block_size)).astype(np.float32, copy=False)
        return BlockScales.of_part(part, ranges, self.weight_block_size, info.name)

    def stored_in(self) -> set[Path]:
        """The files that tensors are read from."""
        return {info.file for info in self.tensors.values()}

    def facts(self) -> Iterator[list[object]]:
        """Where each tensor lies and how it is read, as JSON types: equal for equal files."""
        yield [self.weight_block_size]
        for name, info in self.tensors.items():
            yield [name, info.dtype, info.shape, info.file.name, info.offsets]

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self.files.close()


_Scan = tuple[dict[str, TensorInfo], tuple[str, ...], frozenset[str]]
"""Readable tensors, faults, and the names of tensors in files that cannot be read."""


def _scan_all(folder: Path) -> _Scan:
    """A folder without an index: `model.safetensors` alone if there is one, else all safetensors files."""
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not paths:
        raise CheckpointError(f"{folder} has no safetensors files{_hint(folder)}")
    single = folder / SINGLE_NAME
    tensors: dict[str, TensorInfo] = {}
    faults: list[str] = _missing_numbers([path.name for path in paths])
    unreadable: set[str] = set()
    for path in [single] if single in paths else paths:
        header = read_header(path)
        faults += header.faults
        if header.faults:
            unreadable |= header.tensors.keys()
            continue
        for name, info in header.tensors.items():
            if name in tensors:
                faults.append(f"tensor {name} is in {tensors[name].file.name} and in {path.name}")
            tensors[name] = info
    return tensors, tuple(faults), frozenset(unreadable)


def _hint(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return ", but a GGUF file: import it with 'msds convert'"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return ", but files of pickled tensors: save the model as safetensors with transformers"
    return ""


def _missing_numbers(names: Collection[str]) -> list[str]:
    """Without an index, the names of numbered shards still say how many there are."""
    faults = []
    series = {(match[1], match[3]) for name in names if (match := _NUMBERED.fullmatch(name))}
    for stem, count in sorted(series):
        for number in range(1, min(int(count), 10_000) + 1):
            name = f"{stem}-{number:0{len(count)}d}-of-{count}.safetensors"
            if name not in names:
                faults.append(f"{name} is missing (there is no index that says which tensors it holds)")
    return faults


def _scan_indexed(folder: Path) -> _Scan:
    """The files that the index names. Files beside them belong to something else and are left alone."""
    weight_map = _read_index(folder / INDEX_NAME)
    if isinstance(weight_map, str):
        return {}, (weight_map,), frozenset()
    listed: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        listed.setdefault(file, []).append(name)
    tensors: dict[str, TensorInfo] = {}
    faults: list[str] = []
    unreadable: set[str] = set()
    for file, names in sorted(listed.items()):
        if not (folder / file).exists():
            faults.append(f"{file} is missing; it holds {name_some(names)}")
            unreadable.update(names)
            continue
        header = read_header(folder / file)
        if header.faults:
            faults += header.faults
            unreadable.update(names, header.tensors)
            continue
        absent = [name for name in names if name not in header.tensors]
        unlisted = [name for name in header.tensors if weight_map.get(name) != file]
        if absent:
            faults.append(f"{file} does not hold {name_some(absent)}, which {INDEX_NAME} says it does")
            unreadable.update(absent)
        if unlisted:
            faults.append(f"{file} holds {name_some(unlisted)}, which {INDEX_NAME} does not list there")
        tensors |= {name: header.tensors[name] for name in names if name in header.tensors}
    return tensors, tuple(faults), frozenset(unreadable - tensors.keys())


def _read_index(path: Path) -> Mapping[str, str] | str:
    """The index's map from tensor to file, or what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name} is not readable JSON: {error}"
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return f"{path.name} has no weight_map from tensor names to files"
    for name, file in weight_map.items():
        # The index is as untrusted as the files: it may not point outside the folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            return f"{path.name} places {name} in {file!r}, which is no safetensors file of this folder"
    return weight_map


def name_some(names: Sequence[str]) -> str:
    """The names, or the first few and how many more there are."""
    shown = ", ".join(names[:_MAX_NAMED])
    rest = len(names) - _MAX_NAMED
    count = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    return f"{count} {shown}" + (f" and {rest} more" if rest > 0 else "")
