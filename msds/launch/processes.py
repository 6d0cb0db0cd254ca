"""Start the ranks of a program on this machine, watch them, and end them together.

MindSpore's own `msrun` sets the same variables, but its ranks outlive it, and a rank that dies is looked for in logs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from msds.errors import RankError
from msds.launch.cluster import Cluster
from msds.launch.place import Place
from msds_graphs.interrupts import collected

logger = logging.getLogger("msds")

STARTUP_SECONDS = 600.0
"""Until every rank has joined: MindSpore is imported and the others are found."""
AFTERMATH_SECONDS = 3.0
"""What the others get to say why, after a rank has failed."""
TAIL_LINES = 15
_TICK = 0.05


@dataclass
class _Process:
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


def launch(
    entry: str,
    arguments: Mapping[str, Any],
    cluster: Cluster,
    *,
    logs: Path | None = None,
    collectives: bool = True,
    startup_seconds: float = STARTUP_SECONDS,
    stop_seconds: float = 30.0,
) -> None:
    """Run `function(place, **arguments)` in one process per rank, entry "module:function"; return when all are done.

    arguments: what JSON can say. logs: folder of each process's output, a new one by default; rank 0 keeps our stdout,
    and its log is shown on our stderr. collectives: join MindSpore's cluster first. SIGINT and SIGTERM go to the
    ranks, which then have stop_seconds, or until the next one. RankError names the rank that failed, with the end of
    its log; nothing that was started is left. To be called on the main thread.
    """
    folder = logs or Path(tempfile.mkdtemp(prefix="msds-ranks-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"msds: logs of {len(cluster.ranks_here)} ranks in {folder}", file=sys.stderr, flush=True)
    processes: list[_Process] = []
    with collected() as received:
        try:
            _start(processes, entry, arguments, cluster, folder, collectives, startup_seconds)
            _watch(processes, received, startup_seconds, stop_seconds)
        finally:
            _end(processes)
    if received:
        signal.raise_signal(received[0])


def _start(
    processes: list[_Process],
    entry: str,
    arguments: Mapping[str, Any],
    cluster: Cluster,
    folder: Path,
    collectives: bool,
    startup_seconds: float,
) -> None:
    environment = dict(os.environ)
    if collectives:
        host, port = cluster.scheduler_address()
        environment |= {
            "MS_WORKER_NUM": str(cluster.ranks),
            "MS_SCHED_HOST": host,
            "MS_SCHED_PORT": str(port),
            "MS_TOPO_TIMEOUT": str(int(startup_seconds)),
            "RANK_SIZE": str(cluster.ranks),
        }
        if cluster.is_master:
            job: dict[str, Any] = {"name": "scheduler", "place": None}
            variables = {"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
            processes.append(_spawn(None, job, environment | variables, folder / "scheduler.log"))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(cluster.leader_listener()) if cluster.is_master else None
        leader = listener.getsockname() if listener and cluster.master is None else cluster.leader_address()
        for local, rank in enumerate(cluster.ranks_here):
            own = listener.fileno() if listener is not None and rank == 0 else None
            place = Place(rank, cluster.ranks, len(cluster.ranks_here), leader, cluster.secret, own)
            variables = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "RANK_ID": str(rank), "DEVICE_ID": str(local)}
            job = {
                "name": f"rank {rank}",
                "place": asdict(place),
                "collectives": collectives,
                "entry": entry,
                "arguments": dict(arguments),
            }
            processes.append(_spawn(rank, job, environment | variables, folder / f"rank-{rank}.log", listener=listener))


def _spawn(
    rank: int | None,
    job: dict[str, Any],
    environment: dict[str, str],
    log: Path,
    *,
    listener: socket.socket | None = None,
) -> _Process:
    reading, writing = os.pipe()
    passed = [writing]
    if rank == 0 and listener is not None:
        passed.append(listener.fileno())
    with log.open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", "msds.launch.child"],
            stdin=subprocess.PIPE,
            stdout=None if rank == 0 else output,
            stderr=output,
            env=environment,
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C is for us to hand on
        )
    os.close(writing)
    os.set_blocking(reading, False)
    assert popen.stdin is not None
    with contextlib.suppress(BrokenPipeError), popen.stdin as stdin:  # the watch will say that it has ended
        stdin.write(json.dumps(job | {"parent": os.getpid(), "report": writing}).encode())
    return _Process(rank, popen, log, reading)


def _watch(
    processes: list[_Process], received: list[signal.Signals], startup_seconds: float, stop_seconds: float
) -> None:
    """Return when every rank has ended well, or as it was told to; RankError otherwise."""
    ranks = [process for process in processes if process.rank is not None]
    started = time.monotonic()
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for process in ranks:
            assert process.report is not None
            selector.register(process.report, selectors.EVENT_READ, process)
        while True:
            for key, _ in selector.select(_TICK):
                if not _hear(key.data):
                    selector.unregister(key.fd)
            _show(ranks)
            failed = [process for process in processes if process.failed]
            now = time.monotonic()
            if failed and not received:
                _settle(ranks, selector)
                raise _explain(failed, ranks)
            if all(process.popen.poll() is not None for process in ranks):
                return
            late = [process for process in ranks if not process.is_ready and process.popen.poll() is None]
            if late and now - started > startup_seconds:
                names = _names(late)
                raise RankError(f"{names} did not report within {startup_seconds:g} s of starting{_tail(late[0])}")
            if len(received) > 1:
                return
            if received and deadline is None:
                deadline = now + stop_seconds
                for process in ranks:
                    process.popen.send_signal(signal.SIGTERM)
            if deadline is not None:
                if failed:  # the others cannot go on without it
                    deadline = min(deadline, now + AFTERMATH_SECONDS)
                if now > deadline:
                    left = [process for process in ranks if process.popen.poll() is None]
                    logger.warning("%s did not end when told to: killed", _names(left))
                    return


def _hear(process: _Process) -> bool:
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


def _settle(ranks: list[_Process], selector: selectors.BaseSelector) -> None:
    """After a failure: let the others say what they have to, for a little while."""
    until = time.monotonic() + AFTERMATH_SECONDS
    while time.monotonic() < until and any(process.popen.poll() is None for process in ranks):
        for key, _ in selector.select(_TICK):
            if not _hear(key.data):
                selector.unregister(key.fd)
    for key in list(selector.get_map().values()):
        while _hear(key.data):
            pass
        selector.unregister(key.fd)
    _show(ranks)


def _explain(failed: list[_Process], ranks: list[_Process]) -> RankError:
    """The rank that failed first, as far as one can tell, and what it said last."""
    # a signal, which is negative, came from outside; the scheduler fails because a rank has
    first = min(failed, key=lambda process: (process.rank is None, process.popen.returncode))
    code = first.popen.returncode
    if first.errors:
        if code == 2:  # bad input: every rank says the same
            return RankError(first.errors[0], 2)
        return RankError(f"{_names([first])} failed: {first.errors[0]}{_tail(first)}")
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    heard = [f"; rank {one.rank}: {one.errors[0]}" for one in ranks if one is not first and one.errors]
    return RankError(f"{_names([first])} {ended}{''.join(heard)}{_tail(first)}")


def _names(processes: list[_Process]) -> str:
    numbers = [str(process.rank) for process in processes if process.rank is not None]
    if not numbers:
        return "MindSpore's scheduler"
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _tail(process: _Process) -> str:
    lines = process.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    shown = "\n".join(f"    {line}" for line in lines) or "    (empty)"
    return f"\n  the end of {process.log}:\n{shown}"


def _show(ranks: list[_Process]) -> None:
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


def _end(processes: list[_Process]) -> None:
    """Nothing stays: neither a process nor its entry in the process table, nor a descriptor."""
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
    for process in processes:
        process.popen.wait()
        if process.report is not None:
            os.close(process.report)
            process.report = None
