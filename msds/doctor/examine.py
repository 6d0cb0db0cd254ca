"""The list of checks, in the order in which their results are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msds.doctor import ascend, machine, model, software
from msds.doctor.checks import SKIP, Check, Finding, run_checks
from msds.doctor.report import DoctorReport
from msds.doctor.system import System
from msds.errors import OptionError
from msds.presets import is_preset, resolve_model
from msds.pretrained import model_folder

LONG_SECONDS = 45.0
"""For checks that read a checkpoint; all run side by side, so a preflight ends within a minute."""


def examine(model_name: str | Path | None = None, *, port: int = 8000, system: System | None = None) -> DoctorReport:
    """Look at this machine, and at a model if one is given: a folder, a config.json, the shipped model or a preset.

    OptionError for a port that none can have, ConfigError for the empty name; whatever else is wrong is a result.
    """
    if model_name == "":
        resolve_model("")
    if not 1 <= port <= 65535:
        raise OptionError(f"port is {port}: it must be from 1 to 65535")
    name = None if model_name is None else model_folder(str(model_name))
    place = None if name is None or not Path(name).exists() else Path(name)
    return DoctorReport(run_checks([*_machine(system or System(), place, port), *_model(name, place)]))


def _machine(system: System, place: Path | None, port: int) -> Iterator[Check]:
    folder = Path.cwd() if place is None else place if place.is_dir() else place.parent
    yield Check("python", software.python_version)
    yield Check("packages", software.packages)
    yield Check("mindspore copies", software.two_mindspores)
    yield Check("npus", lambda: ascend.npus(system))
    yield Check("driver", lambda: ascend.driver(system))
    yield Check("cann", lambda: ascend.cann(system))
    yield Check("links", lambda: ascend.links(system), LONG_SECONDS)
    yield Check("hccl variables", lambda: ascend.hccl_environment(system))
    yield Check("memory", lambda: machine.memory(system))
    yield Check("cores", machine.cores)
    yield Check("disk", lambda: machine.disk(folder, model.checkpoint_bytes(folder) if place else 0, system))
    yield Check("open files", machine.open_files)
    yield Check("shared memory", lambda: machine.shared_memory(system))
    yield Check("clock", lambda: machine.clock(system))
    yield Check("port", lambda: machine.port(port))


def _model(name: str | None, place: Path | None) -> Iterator[Check]:
    """Of a model that is not there one failure, of a preset what can be told from its config; the rest is skipped."""
    if name is None:
        return
    if place is not None:
        yield Check("config", lambda: model.config(place))
        yield Check("checkpoint", lambda: model.checkpoint(place), LONG_SECONDS)
        yield Check("digests", lambda: model.digests(place), LONG_SECONDS)
        yield Check("tokenizer", lambda: model.tokenizer(place), LONG_SECONDS)
        yield Check("room", lambda: model.room(name), LONG_SECONDS)
        return
    known = is_preset(name)
    why = "a preset is a config without a folder" if known else "there is no such folder"
    skipped = Finding(SKIP, why)
    yield Check("config", lambda: model.preset_config(name) if known else model.absent(name))
    for other in ("checkpoint", "digests", "tokenizer"):
        yield Check(other, lambda: skipped)
    yield Check("room", lambda: model.room(name) if known else skipped, LONG_SECONDS)
