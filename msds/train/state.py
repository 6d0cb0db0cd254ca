"""The state of a training run: one file from which it goes on bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from msds.checkpoint.dtypes import Array
from msds.checkpoint.save import tensor_source, write_file
from msds.errors import CheckpointError, TrainingError
from msds.train.step import TrainStep
from msds_graphs.binding import assign, to_numpy

STATE_NAME = "state.safetensors"
LOG_NAME = "log.jsonl"

PARTS = ("params", "first", "second")
"""What a step keeps: parameters and both moments."""


def check_run_folder(folder: Path) -> None:
    """TrainingError for what cannot become the folder of a run: to be asked before the work."""
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file: name a folder for the run")
    existing = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise TrainingError(f"run folder {folder} cannot be made: {existing} is no folder that may be written to")


def save_state(folder: Path, step: TrainStep, done: int, options: dict[str, Any]) -> None:
    """Write what the step keeps, how far the run is, and with which options; the file is replaced in one go."""
    arrays = {
        f"{part}.{path}": to_numpy(leaf)
        for part in PARTS
        for path, leaf in zip(step.paths, step.state[part], strict=True)
    }
    sources = [tensor_source(name, array) for name, array in arrays.items()]
    record = json.dumps({"done": done, "options": options})
    write_file(folder / STATE_NAME, sources, metadata={"record": record})


def resume_state(folder: Path, step: TrainStep, options: dict[str, Any]) -> int:
    """Put a saved state, if there is one, into the step: how far the run is, 0 without one.

    TrainingError when it belongs to a run with other options.
    """
    path = folder / STATE_NAME
    if not path.exists():
        return 0
    arrays, record = read_state(path)
    if record["options"] != options:
        raise TrainingError(
            f"{path} is of a run with {record['options']}, this one has {options}: "
            "use the same options, or another folder"
        )
    for part in PARTS:
        assign(step.state[part], tuple(arrays[f"{part}.{path}"] for path in step.paths))
    return int(record["done"])


def read_state(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays by part and path, and the record; CheckpointError when it is not such a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            record = json.loads((file.metadata() or {})["record"])
            return {name: np.array(file.get_tensor(name)) for name in file.keys()}, record  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a state of a training run: {error}") from None
