"""One check and how a list of them is run: side by side, each with its own time, none able to stop the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
STATUSES = (PASS, WARN, FAIL, SKIP)


@dataclass(frozen=True)
class Finding:
    """status: one of STATUSES. found: what is there. next_step: what to do, for a warning or failure."""

    status: str
    found: str
    next_step: str = ""


@dataclass(frozen=True)
class Check:
    """name: what is looked at. run: looks. seconds: after which it counts as failed."""

    name: str
    run: Callable[[], Finding]
    seconds: float = 15.0


@dataclass(frozen=True)
class Result:
    """A finding, of which check, and how long it took."""

    name: str
    finding: Finding
    seconds: float


def run_checks(checks: Sequence[Check]) -> tuple[Result, ...]:
    """All results in the order of the checks; all run at once, so the slowest decides how long it takes."""
    start = time.monotonic()
    running = [_start(check) for check in checks]
    return tuple(entry.result(start) for entry in running)


@dataclass
class _Running:
    check: Check
    thread: threading.Thread
    outcome: list[Result]

    def result(self, start: float) -> Result:
        self.thread.join(max(0.0, start + self.check.seconds - time.monotonic()))
        if self.outcome:
            return self.outcome[0]
        finding = Finding(
            FAIL,
            f"did not end within {self.check.seconds:g} s",
            "see whether what it looks at (a disk, a driver, a network) hangs, then run it again",
        )
        return Result(self.check.name, finding, self.check.seconds)


def _start(check: Check) -> _Running:
    outcome: list[Result] = []

    def look() -> None:
        start = time.monotonic()
        try:
            finding = check.run()
        except Exception as error:  # whatever a check stumbles over is its own failure, not the end of the others
            finding = Finding(
                FAIL, f"the check itself broke: {type(error).__name__}: {error}", "report this with the text above"
            )
        outcome.append(Result(check.name, finding, time.monotonic() - start))

    thread = threading.Thread(target=look, name=f"check {check.name}", daemon=True)  # one that hangs ends with us
    thread.start()
    return _Running(check, thread, outcome)
