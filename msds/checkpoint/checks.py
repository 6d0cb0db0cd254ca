"""Does a checkpoint fit a model? Answered from headers, before allocation, with all faults at once."""

from collections.abc import Iterable, Sequence

from msds.checkpoint.dtypes import stored_type
from msds.checkpoint.header import TensorInfo
from msds.checkpoint.ledger import Entry, Ledger, Skip
from msds.checkpoint.quantisation import SCALE_SUFFIX, scale_grid, wrong_grid
from msds.checkpoint.shards import Checkpoint, name_some
from msds.errors import CheckpointError

MAX_FAULTS = 40
"""How many faults of one kind are spelled out; a model of the wrong size has tens of thousands."""


def check_checkpoint(checkpoint: Checkpoint, entries: Iterable[Entry], skipped: Sequence[Skip] = ()) -> Ledger:
    """Checks files, names, shapes, number types and scales, and returns the ledger that a load will keep.

    Raises one CheckpointError that lists every fault. Values are not read: `load` looks at them as they pass.
    """
    ledger = Ledger(entries, checkpoint.tensors, skipped)
    missing: dict[str, list[str]] = {}
    for name, path in ledger.missing:
        if name not in checkpoint.unreadable:  # those are named with their file already
            missing.setdefault(path, []).append(name)
    absent = [f"parameter {path} lacks {name_some(names)}" for path, names in missing.items()]
    tensor_faults = [
        fault
        for entry in ledger.entries.values()
        for name in entry.names
        if name in checkpoint
        for fault in _tensor_faults(checkpoint, entry, checkpoint.info(name))
    ]
    faults = [*_limit(list(checkpoint.faults)), *_limit(absent), *_limit(tensor_faults)]
    if faults:
        count = len(checkpoint.faults) + len(absent) + len(tensor_faults)
        title = f"{checkpoint.folder} cannot be loaded ({count} {'fault' if count == 1 else 'faults'}):"
        raise CheckpointError("\n  ".join([title, *faults]))
    return ledger


def _limit(faults: list[str]) -> list[str]:
    rest = len(faults) - MAX_FAULTS
    return faults if rest <= 0 else [*faults[:MAX_FAULTS], f"... and {rest} more like these"]


def _tensor_faults(checkpoint: Checkpoint, entry: Entry, info: TensorInfo) -> list[str]:
    """What is wrong with one tensor for the parameter that it is to fill."""
    faults = []
    if info.shape != entry.tensor_shape:
        faults.append(
            f"tensor {info.name} has shape {list(info.shape)}, the config asks for {list(entry.tensor_shape)}"
        )
    if info.dtype == "float8_e4m3fn":
        faults += _scale_faults(checkpoint, info)
    elif not stored_type(info.dtype).is_float or info.dtype == "float8_e5m2":
        faults.append(
            f"tensor {info.name} is stored as {info.dtype}; weights must be float32, float16, bfloat16 "
            "or block-scaled float8_e4m3fn"
        )
    return faults


def _scale_faults(checkpoint: Checkpoint, info: TensorInfo) -> list[str]:
    name = info.name + SCALE_SUFFIX
    block = checkpoint.weight_block_size
    if len(info.shape) != 2:
        return [f"tensor {info.name} {list(info.shape)} is float8 but not a matrix"]
    if name not in checkpoint:
        if name in checkpoint.unreadable:
            return []
        return [f"tensor {info.name} is float8 but lacks its scales {name}"]
    if block is None:
        return [f"tensor {info.name} is float8, but the config has no quantization_config.weight_block_size"]
    scale = checkpoint.info(name)
    faults = []
    if not stored_type(scale.dtype).is_float or scale.dtype.startswith("float8"):
        faults.append(f"scales {name} are stored as {scale.dtype}; they must be float32, float16 or bfloat16")
    if scale.shape != scale_grid(info.shape, block):
        faults.append(wrong_grid(info.name, info.shape, scale.shape, block))
    return faults
