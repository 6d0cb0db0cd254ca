"""Finding a training checkpoint: which files it has, of which ranks, and every tensor in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from msds.checkpoint.header import read_header
from msds.checkpoint.shards import name_some
from msds.errors import CheckpointError
from msds.layouts.ckpt import read_ckpt
from msds.layouts.rules import SKIPPED, is_hf_name, match_stored
from msds.layouts.stored import FileTensor, Piece, StoredTensor, check_tiling, whole
from msds.layouts.strategy import Slicing, Strategy, read_strategy

SUFFIXES = (".safetensors", ".ckpt")
STRATEGY_FOLDERS = ("strategy", "merged_strategy", "src_strategy")

_RANK_FOLDER = re.compile(r"rank_(\d+)")
_RANK_FILE = re.compile(r"(?:.*_)?rank_(\d+)(?![\d]).*")


@dataclass(frozen=True)
class Contents:
    """The weights of a training checkpoint, and by name why anything else in it is left out."""

    tensors: Mapping[str, StoredTensor]
    skipped: Mapping[str, str]


def is_training_checkpoint(folder: Path) -> bool:
    """Whether a folder's weights are MindSpore's: rank folders, .ckpt files, or safetensors with names of a layout."""
    if not folder.is_dir():
        return False
    files = _files(folder)
    if not files:
        return bool(_rank_folders(folder)) or any(_files(folder, ".ckpt"))
    for path in files:
        for name in read_header(path).tensors:
            if is_hf_name(name):  # one name decides, without the other shards
                return False
            if match_stored(name) is not None and name != "lm_head.weight":
                return True
    return False


def read_contents(source: Path, *, strategy: Path | None = None, suffix: str | None = None) -> Contents:
    """Every tensor of a file, of a folder's files, or of `rank_N` folders (or files) joined by the run's strategy.

    strategy: MindSpore's strategy file or folder; default: what lies in `source` under a name with "strategy".
    suffix: how the names of the wanted files end, where each rank has several. CheckpointError with what is missing.
    """
    ranks = _ranks(source, suffix)
    skipped: dict[str, str] = {}
    by_name: dict[str, dict[int, FileTensor]] = {}
    for rank, paths in ranks.items():
        for path in paths:
            tensors, others = _read(path)
            skipped |= others
            for name, tensor in tensors.items():
                if reason := _reason(name):
                    skipped[name] = reason
                elif (known := by_name.setdefault(name, {}).setdefault(rank, tensor)) is not tensor:
                    raise CheckpointError(f"tensor {name} is in {known.file} and in {path}: name the files of one step")
    if len(ranks) == 1 and strategy is None and not _strategies(source):  # one device, or a merged checkpoint
        rank = next(iter(ranks))
        if rank > 0:
            raise CheckpointError(f"{source} has the files of rank {rank} alone: those of every rank are needed")
        return Contents({name: whole(found[rank]) for name, found in by_name.items()}, skipped)
    return Contents(_joined(by_name, _strategy(source, strategy), sorted(ranks)), skipped)


def _joined(
    by_name: Mapping[str, Mapping[int, FileTensor]], strategy: Strategy, ranks: Sequence[int]
) -> dict[str, StoredTensor]:
    stages = -(-(ranks[-1] + 1) // strategy.stage_ranks)
    if ranks[-1] + 1 != stages * strategy.stage_ranks:
        raise CheckpointError(
            f"ranks {ranks[0]} to {ranks[-1]} are stored, the strategy has {strategy.stage_ranks} per pipeline stage: "
            "ranks are missing, or it is another run's"
        )
    return {name: _join(name, found, strategy) for name, found in by_name.items()}


def _join(name: str, found: Mapping[int, FileTensor], strategy: Strategy) -> StoredTensor:
    first = next(iter(found.values()))
    for tensor in found.values():
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"tensor {name} is {first.dtype} {list(first.shape)} in {first.file} and {tensor.dtype} "
                f"{list(tensor.shape)} in {tensor.file}: name the files of one step of one run"
            )
    slicing = strategy.slicings.get(name, Slicing((1,), tuple(() for _ in first.shape)))
    counts = slicing.counts()
    if len(counts) != len(first.shape):
        raise CheckpointError(f"tensor {name} {list(first.shape)}: the strategy is for {len(counts)} axes")
    pieces: dict[object, Piece] = {}
    for rank, tensor in found.items():  # ranks that repeat a slice have the same numbers
        place = rank % strategy.stage_ranks if name in strategy.slicings else 0
        piece = Piece(slicing.ranges(place, tensor.shape), tensor)
        pieces.setdefault(piece.ranges, piece)
    shape = tuple(size * count for size, count in zip(first.shape, counts, strict=True))
    joined = StoredTensor(name, first.dtype, shape, tuple(pieces.values()))
    check_tiling(joined)
    return joined


def _read(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    if path.suffix == ".ckpt":
        return read_ckpt(path)
    header = read_header(path)
    if header.faults:
        raise CheckpointError("; ".join(header.faults))
    return {
        name: FileTensor(name, info.dtype, info.shape, path, ((info.offsets[0], info.nbytes),))
        for name, info in header.tensors.items()
    }, {}


def _reason(name: str) -> str | None:
    return next((skip.reason for skip in SKIPPED if fnmatchcase(name, skip.pattern)), None)


def _strategy(source: Path, given: Path | None) -> Strategy:
    if given is not None:
        return read_strategy(given)
    found = _strategies(source)
    if len(found) != 1:
        raise CheckpointError(
            f"{source} has the files of several ranks and {len(found)} strategies: name the one that says how they are "
            "cut (msds convert --strategy PATH; or put it there as strategy.ckpt or strategy.json)"
        )
    return read_strategy(found[0])


def _strategies(source: Path) -> list[Path]:
    """Strategy files and folders in a folder."""
    if not source.is_dir():
        return []
    files = [path for path in sorted(source.iterdir()) if path.is_file() and _is_strategy(path)]
    return files + [source / name for name in STRATEGY_FOLDERS if (source / name).is_dir()]


def _is_strategy(path: Path) -> bool:
    return "strategy" in path.name and path.suffix in (".ckpt", ".json")


def _files(folder: Path, *suffixes: str) -> list[Path]:
    """Weight files directly in a folder."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in (suffixes or (".safetensors",)) and not path.name.startswith(".") and not _is_strategy(path)
    )


def _rank_folders(folder: Path) -> dict[int, Path]:
    return {
        int(match[1]): path
        for path in sorted(folder.iterdir())
        if path.is_dir() and (match := _RANK_FOLDER.fullmatch(path.name))
    }


def _ranks(source: Path, suffix: str | None) -> dict[int, list[Path]]:
    """The files of each rank; a checkpoint that is not of ranks counts as rank 0."""
    if source.is_file():
        return {0: [source]}
    if not source.is_dir():
        raise CheckpointError(f"{source} is neither a file nor a folder")
    if folders := _rank_folders(source):
        return {rank: [_only(folder, suffix)] for rank, folder in sorted(folders.items())}
    files = [path for path in _files(source, *SUFFIXES) if path.stem.endswith(suffix or "")]
    if not files:
        wanted = f"whose names end with {suffix!r} " if suffix else ""
        raise CheckpointError(f"{source} has no .safetensors or .ckpt files {wanted}and no rank_N folders")
    matches = [_RANK_FILE.fullmatch(path.stem) for path in files]
    if not all(matches):
        if len({path.suffix for path in files}) > 1:
            raise CheckpointError(f"{source} has .ckpt and .safetensors files: name the one to read")
        return {0: files}
    ranks: dict[int, list[Path]] = {}
    for path, match in zip(files, matches, strict=True):
        if match is not None:
            ranks.setdefault(int(match[1]), []).append(path)
    for rank, paths in ranks.items():
        _one(paths, f"rank {rank} in {source}")
    return dict(sorted(ranks.items()))


def _only(folder: Path, suffix: str | None) -> Path:
    files = [path for path in _files(folder, *SUFFIXES) if path.stem.endswith(suffix or "")]
    if not files:
        raise CheckpointError(
            f"{folder} has no .safetensors or .ckpt file" + (f" ending with {suffix}" if suffix else "")
        )
    return _one(files, str(folder))


def _one(files: list[Path], where: str) -> Path:
    if len(files) > 1:
        names = name_some([path.name for path in files]).removeprefix(f"{len(files)} tensors: ")
        raise CheckpointError(
            f"{where} has {len(files)} checkpoints ({names}): choose one with msds convert --suffix, such as "
            f"{files[-1].stem.rpartition('-')[2]}"
        )
    return files[0]
