"""Watch the ranks of one node: hear what they report, name the one that fails, and end them together."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from msds.errors import RankError
from msds.launch.cluster import Cluster, name_ranks
from msds.launch.meeting import Links, News

AFTERMATH_SECONDS = 3.0
"""What the others get to say why, after a rank has failed."""
TAIL_LINES = 15
_TICK = 0.05
_OBEYED = (130, -signal.SIGTERM)
"""Exit codes, beside 0, of a rank that was told to end, and did."""


@dataclass
class Process:
    """One process: rank None is MindSpore's scheduler. shown: how much of its log went to our stderr."""

    rank: int | None
    popen: subprocess.Popen[bytes]
    log: Path
    report: int | None
    pending: bytes = b""
    is_ready: bool = False
    errors: list[str] = field(default_factory=list)
    shown: int = 0

    @property
    def failed(self) -> bool:
        return self.popen.poll() not in (None, 0)

    @property
    def runs(self) -> bool:
        return self.popen.poll() is None


class Supervision:
    """From the start of all ranks to the end of the last. keeps_logs: what happened is worth to be looked into."""

    def __init__(
        self,
        processes: Sequence[Process],
        cluster: Cluster,
        links: Links,
        received: Sequence[signal.Signals],
        stop_seconds: float,
    ) -> None:
        self.keeps_logs = True
        self._processes = processes
        self._ranks = [process for process in processes if process.rank is not None]
        self._cluster, self._links = cluster, links
        self._received, self._stop_seconds = received, stop_seconds
        self._left: str | None = None
        """Why the ranks of another node are leaving."""
        self._excused: set[int] = set()
        """Nodes that have said that they end."""
        self._is_odd = False
        """Ranks did not end as they were told to."""
        self._deadline: float | None = None
        self._aftermath: float | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> bool:
        """Return when every rank has ended well, or as it was told to: whether all of them had exit code 0.

        RankError for a rank that failed, here or on another node, and where another node has left.
        """
        started = time.monotonic()
        with self._selector:
            for process in self._ranks:
                assert process.report is not None
                self._selector.register(process.report, selectors.EVENT_READ, process)
            while True:
                self._hear()
                self._hear_nodes(self._links.news())
                runs = any(process.runs for process in self._ranks)
                failed = [process for process in self._processes if process.failed]  # after: the last one may just fail
                if failed and not self._is_ending:
                    raise self._failure(failed)
                if not runs:
                    break
                self._check_startup(started)
                if self._is_ending and self._end(failed):
                    break
            self._hear()
        return self._outcome()

    @property
    def _is_ending(self) -> bool:
        return bool(self._received) or self._left is not None

    def _hear(self) -> None:
        """What ranks report, and what rank 0 has logged."""
        for key, _ in self._selector.select(_TICK):
            if not _hear(key.data):
                self._selector.unregister(key.fd)
        _show(self._ranks)

    def _hear_nodes(self, news: Sequence[News]) -> None:
        for one in news:
            if one.kind == "leaving" and self._left is None:
                self._left = one.fields["why"]
                self._links.tell("leaving", one.fields, beside=one.node)
            elif one.kind == "failed" and not self._is_ending:
                problem, code = f"node {one.node}: {one.fields['problem']}", one.fields["exit_code"]
                self._settle_all(problem, code, one.node)
                raise RankError(problem, code)
            elif one.kind == "gone" and not self._is_ending and one.node not in self._excused:
                problem = f"{self._cluster.names([one.node])} went without a word: look there"
                self._settle_all(problem, 1, one.node)
                raise RankError(problem)
            if one.kind in ("done", "leaving"):
                self._excused.add(one.node)

    def _check_startup(self, started: float) -> None:
        limit = self._cluster.startup_seconds
        late = [process for process in self._ranks if not process.is_ready and process.runs]
        if late and time.monotonic() - started > limit:
            problem = f"{_names(late)} did not report within {limit:g} s of starting"
            self._links.tell("failed", {"problem": problem, "exit_code": 1})
            raise RankError(problem + _tail(late[0]))

    def _end(self, failed: Sequence[Process]) -> bool:
        """Tell ranks to end; whether there is nothing more to wait for."""
        now = time.monotonic()
        left = [process for process in self._ranks if process.runs]
        if self._deadline is None:
            self._deadline = now + self._stop_seconds
            if self._received:
                tell_leaving(self._links, self._cluster, self._received[0])
            why = self._received[0].name if self._received else self._left
            _say(
                f"{why}: {_names(left)} {'are' if len(left) > 1 else 'is'} told to end, within {self._stop_seconds:g} s"
            )
            for process in left:
                process.popen.send_signal(signal.SIGTERM)
        if len(self._received) > 1:
            _say(f"{self._received[1].name} again: {_names(left)} killed")
            self._is_odd = True
            return True
        if now > self._deadline:
            _say(f"{_names(left)} did not end within {self._stop_seconds:g} s: killed")
            self._is_odd = True
            return True
        if failed and self._aftermath is None:
            self._aftermath = now + AFTERMATH_SECONDS  # the others cannot go on without it
            # those that end later do so because it has
            self._is_odd = all(process.popen.returncode not in _OBEYED for process in failed)
        if self._aftermath is not None and now > self._aftermath:
            _say(
                f"{_names(left)} killed: {_names(failed)} had ended {AFTERMATH_SECONDS:g} s before, and a graph that "
                "is being compiled or waits for other ranks cannot be interrupted"
            )
            return True
        return False

    def _outcome(self) -> bool:
        """After the end: whether all went well; RankError where it is not us who were told to end."""
        self.keeps_logs = self._is_odd
        ended_well = all(process.popen.poll() == 0 for process in self._ranks)
        if self._received or self._left is None or (ended_well and not self._cluster.is_master):
            return ended_well
        raise RankError(f"{self._left}: this node has ended too")

    def _failure(self, failed: Sequence[Process]) -> RankError:
        """The rank that failed first, as far as one can tell, what it said last, and what the others say."""
        text, code, _ = _explain(failed, self._ranks)
        self._links.tell("failed", {"problem": text, "exit_code": code})
        others = self._settle()
        text, code, tail = _explain(failed, self._ranks)
        return RankError("; ".join([text, *others]) + tail, code)

    def _settle_all(self, problem: str, code: int, node: int) -> None:
        """The failure of another node is that of all others, too."""
        self._links.tell("failed", {"problem": problem, "exit_code": code}, beside=node)
        self._settle()

    def _settle(self) -> list[str]:
        """After a failure: let the others say what they have to, for a little while; what other nodes say."""
        until = time.monotonic() + AFTERMATH_SECONDS
        said: list[str] = []
        while time.monotonic() < until and any(process.runs for process in self._ranks):
            self._hear()
            said += _problems(self._links.news())
        for key in list(self._selector.get_map().values()):
            while _hear(key.data):
                pass
            self._selector.unregister(key.fd)
        _show(self._ranks)
        while self._links and not said and time.monotonic() < until:
            time.sleep(_TICK)
            said += _problems(self._links.news())
        return said


def tell_leaving(links: Links, cluster: Cluster, number: signal.Signals) -> None:
    """Other nodes hear that this one was told to end."""
    here = cluster.names([cluster.node_rank])
    links.tell("leaving", {"why": f"{here} left, told to end by {number.name}"})


def end(processes: Sequence[Process]) -> None:
    """Nothing stays: neither a process nor its entry in the process table, nor a descriptor."""
    for process in processes:
        if process.runs:
            process.popen.kill()
    for process in processes:
        process.popen.wait()
        if process.report is not None:
            os.close(process.report)
            process.report = None


def _problems(news: Sequence[News]) -> list[str]:
    """What other nodes say of themselves when something has failed here."""
    names = {"failed": "problem", "leaving": "why"}
    return [f"node {one.node}: {one.fields[names[one.kind]]}" for one in news if one.kind in names]


def _say(text: str) -> None:
    print(f"msds: {text}", file=sys.stderr, flush=True)


def _hear(process: Process) -> bool:
    """Read what a rank reports; False where there is no more."""
    assert process.report is not None
    try:
        data = os.read(process.report, 65536)
    except BlockingIOError:
        return False
    process.pending += data
    *lines, process.pending = process.pending.split(b"\n")
    for line in lines:
        message = json.loads(line)
        process.is_ready |= "ready" in message
        if "error" in message:
            process.errors.append(message["error"])
    return bool(data)


def _explain(failed: Sequence[Process], ranks: Sequence[Process]) -> tuple[str, int, str]:
    """One line, an exit code, and the end of a log where that says more."""
    # a signal, which is negative, came from outside; the scheduler fails because a rank has
    first = min(failed, key=lambda process: (process.rank is None, process.popen.returncode))
    code = first.popen.returncode
    if first.errors:
        if code == 2:  # bad input: every rank says the same
            return first.errors[0], 2, ""
        return f"{_names([first])} failed: {first.errors[0]}", 1, _tail(first)
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    heard = [f"; rank {one.rank}: {one.errors[0]}" for one in ranks if one is not first and one.errors]
    return f"{_names([first])} {ended}{''.join(heard)}", 1, _tail(first)


def _names(processes: Sequence[Process]) -> str:
    numbers = [process.rank for process in processes if process.rank is not None]
    return name_ranks(numbers) if numbers else "MindSpore's scheduler"


def _tail(process: Process) -> str:
    """The end of a log; that of rank 0 was shown."""
    if process.rank == 0:
        return ""
    lines = process.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    shown = "\n".join(f"    {line}" for line in lines) or "    (empty)"
    return f"\n  the end of {process.log}:\n{shown}"


def _show(ranks: Sequence[Process]) -> None:
    """What rank 0 has newly logged, on our stderr."""
    for process in ranks:
        if process.rank == 0:
            with process.log.open("rb") as file:
                file.seek(process.shown)
                text = file.read()
            process.shown += len(text)
            if text:
                _stderr().write(text)
                _stderr().flush()


def _stderr() -> IO[bytes]:
    return sys.stderr.buffer
