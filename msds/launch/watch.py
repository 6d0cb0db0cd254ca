"""Who has done what, and who has not: the bookkeeping behind the watchdog of rank 0. No sockets, no threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

SILENT_BEATS = 3
"""A rank is silent after so many missing signs of life: it is named before others, which may only wait for it."""


@dataclass
class _Call:
    what: str
    began: float
    waiting: set[int]
    errors: dict[int, str] = field(default_factory=dict)


class Watch:
    """Calls in flight on all `ranks`; the first is the caller's own. Times in seconds; any thread may use it.

    A rank is overdue when neither the beginning of a call nor a sign of progress in it is younger than `timeout`; a
    rank other than the first is gone when nothing was heard of it for longer than that, whatever is in flight.
    """

    def __init__(self, ranks: Iterable[int], timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self.beat_seconds = min(5.0, timeout / 4)
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._count = 0
        now = clock()
        self._progress = dict.fromkeys(self.ranks, now)
        self._heard = dict.fromkeys(self.ranks[1:], now)
        self._problem: str | None = None

    def begin(self, what: str) -> int:
        """A call that every rank is to carry out; its number."""
        with self._lock:
            self._count += 1
            self._calls[self._count] = _Call(what, self._clock(), set(self.ranks))
            return self._count

    def done(self, rank: int, number: int, error: str | None = None) -> None:
        """A rank has carried a call out, or failed in it. All must fail or none: they hold the same state."""
        with self._lock:
            self._note(rank, progress=True)
            call = self._calls[number]
            call.waiting.discard(rank)
            if error is not None:
                call.errors[rank] = error
            if call.waiting:
                return
            del self._calls[number]
            if call.errors and len(call.errors) < len(self.ranks):
                names, first = _names(call.errors), next(iter(call.errors.values()))
                self._problem = self._problem or f"{names} failed in {call.what}, the others did not: {first}"

    def progress(self, rank: int) -> None:
        """A rank gets on with its call."""
        with self._lock:
            self._note(rank, progress=True)

    def heard(self, rank: int) -> None:
        """A sign of life."""
        with self._lock:
            self._note(rank, progress=False)

    def lost(self, rank: int) -> None:
        """A rank's connection has ended."""
        with self._lock:
            running = next(iter(self._calls.values())).what if self._calls else "no step"
            self._problem = self._problem or f"rank {rank} has ended (in {running})"

    def problem(self) -> str | None:
        """Why the ranks cannot go on, by name, or None. It stays once there is one."""
        with self._lock:
            self._problem = self._problem or self._overdue() or self._gone()
            return self._problem

    def _note(self, rank: int, *, progress: bool) -> None:
        now = self._clock()
        if rank in self._heard:
            self._heard[rank] = now
        if progress:
            self._progress[rank] = now

    def _overdue(self) -> str | None:
        now = self._clock()
        for call in self._calls.values():
            late = [rank for rank in call.waiting if now - max(call.began, self._progress[rank]) > self.timeout]
            if late:
                silent = [rank for rank in late if now - self._heard.get(rank, now) > SILENT_BEATS * self.beat_seconds]
                return f"{_names(silent or late)} did not finish {call.what} within {self.timeout:g} s"
        return None

    def _gone(self) -> str | None:
        now = self._clock()
        limit = self.timeout + 2 * self.beat_seconds  # after `_overdue`, which knows the step, where there is one
        gone = [rank for rank, heard in self._heard.items() if now - heard > limit]
        return f"{_names(gone)} gave no sign of life for {limit:g} s" if gone else None


def _names(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
