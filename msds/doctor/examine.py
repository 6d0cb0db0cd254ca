"""The list of checks, in the order in which their results are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msds.doctor import ascend, machine, model, software
from msds.doctor.checks import Check, run_checks
from msds.doctor.report import DoctorReport
from msds.doctor.system import System
from msds.errors import OptionError

LONG_SECONDS = 45.0
"""For checks that read a checkpoint; all run side by side, so a preflight ends within a minute."""


def examine(path: str | Path | None = None, *, port: int = 8000, system: System | None = None) -> DoctorReport:
    """Look at this machine, and at a checkpoint folder or config.json if one is given.

    OptionError for a port that none can have; whatever else is wrong is a result.
    """
    if not 1 <= port <= 65535:
        raise OptionError(f"port is {port}: it must be from 1 to 65535")
    place = None if path is None else Path(path)
    return DoctorReport(run_checks([*_machine(system or System(), place, port), *_model(place)]))


def _machine(system: System, place: Path | None, port: int) -> Iterator[Check]:
    folder = Path.cwd() if place is None or not place.exists() else place if place.is_dir() else place.parent
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


def _model(place: Path | None) -> Iterator[Check]:
    if place is None:
        return
    yield Check("config", lambda: model.config(place))
    yield Check("checkpoint", lambda: model.checkpoint(place), LONG_SECONDS)
    yield Check("digests", lambda: model.digests(place), LONG_SECONDS)
    yield Check("tokenizer", lambda: model.tokenizer(place), LONG_SECONDS)
    yield Check("room", lambda: model.room(place))
