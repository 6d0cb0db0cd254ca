"""The state of a training run: one file from which it goes on bit for bit."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from msds.checkpoint.dtypes import Array
from msds.checkpoint.folders import obstacle_to
from msds.checkpoint.save import tensor_source, write_file
from msds.errors import CheckpointError, TrainingError
from msds.train.step import TrainStep
from msds_graphs.binding import assign, to_numpy
from msds_graphs.trees import Tree, tree_flatten

STATE_NAME = "state.safetensors"
LOG_NAME = "log.jsonl"

PARTS = ("params", "first", "second")
"""What a step keeps: parameters and both moments."""


def check_run_folder(folder: Path, export: Path | None = None) -> None:
    """TrainingError for what cannot become the folder of a run, or an export that would hold it: before the work."""
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file: name a folder for the run")
    if (obstacle := obstacle_to(folder.absolute())) is not None:
        raise TrainingError(f"run folder {folder} cannot be made: {obstacle} is no folder that may be written to")
    if export is not None and export.absolute() in (folder.absolute(), *folder.absolute().parents):
        raise TrainingError(f"the export {export} would hold the run folder {folder}: name another")


@contextmanager
def open_log(folder: Path) -> Iterator[TextIO]:
    """The log of a run, to be added to, in its folder; TrainingError while another process has it open."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG_NAME).open("a", encoding="utf-8") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"another process trains in {folder}: wait for it, or name another folder") from None
        yield log


def check_goes_on(folder: Path, *, done: int, wanted: int, unit: str, before: str | None, texts: str) -> None:
    """TrainingError for a run that is beyond what is asked for, or has begun with other texts.

    done, wanted: units (steps, rounds); before, texts: digests of what it was and is trained on.
    """
    if done > wanted:
        raise TrainingError(
            f"{folder} is at {unit} {done} already, beyond {wanted}: ask for more, or start another run"
        )
    if done and before is not None and before != texts:
        raise TrainingError(f"{folder} was trained on other texts: give it the same ones, or name another folder")


def digest_of_tree(tree: Tree) -> str:
    """Tells weights apart."""
    found = hashlib.sha256()
    for leaf in tree_flatten(tree)[0]:
        found.update(np.ascontiguousarray(leaf).data)
    return found.hexdigest()


def save_state(folder: Path, step: TrainStep, done: int, options: dict[str, Any], texts: str | None) -> None:
    """Write what the step keeps, how far the run is, with which options and texts; the file is replaced in one go."""
    arrays = {
        f"{part}.{path}": to_numpy(leaf)
        for part in PARTS
        for path, leaf in zip(step.paths, step.state[part], strict=True)
    }
    sources = [tensor_source(name, array) for name, array in arrays.items()]
    record = json.dumps({"done": done, "options": options, "texts": texts})
    write_file(folder / STATE_NAME, sources, metadata={"record": record})


def resume_state(folder: Path, step: TrainStep, options: dict[str, Any]) -> tuple[int, str | None]:
    """Put a saved state, if there is one, into the step: how far the run is, 0 without one, and with which texts.

    TrainingError when it belongs to a run with other options.
    """
    path = folder / STATE_NAME
    if not path.exists():
        return 0, None
    arrays, record = read_state(path)
    kept = record["options"]
    different = sorted(name for name in {*kept, *options} if kept.get(name) != options.get(name))
    if different:
        shown = "; ".join(f"{name} was {kept.get(name)}, now {options.get(name)}" for name in different)
        raise TrainingError(f"{path} is of another run ({shown}): use the same options and model, or another folder")
    for part in PARTS:
        assign(step.state[part], tuple(arrays[f"{part}.{path}"] for path in step.paths))
    return int(record["done"]), record.get("texts")


def read_state(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays by part and path, and the record; CheckpointError when it is not such a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            record = json.loads((file.metadata() or {})["record"])
            return {name: np.array(file.get_tensor(name)) for name in file.keys()}, record  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a state of a training run: {error}") from None
