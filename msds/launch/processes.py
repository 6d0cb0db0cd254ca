"""Start the ranks of a program on this machine, watch them, and end them together.

MindSpore's own `msrun` sets the same variables, but its ranks outlive it, and a rank that dies is looked for in logs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msds.errors import OptionError, RankError
from msds.launch.cluster import Cluster
from msds.launch.meeting import Links, meet
from msds.launch.place import Place
from msds.launch.supervise import Process, Supervision, end, tell_leaving
from msds_graphs.interrupts import collected


@dataclass(frozen=True)
class _Program:
    """What `launch` runs."""

    entry: str
    arguments: Mapping[str, Any]
    cluster: Cluster
    collectives: bool
    stop_seconds: float


def launch(
    entry: str,
    arguments: Mapping[str, Any],
    cluster: Cluster,
    *,
    facts: Mapping[str, str] | None = None,
    logs: Path | None = None,
    collectives: bool = True,
    stop_seconds: float = 30.0,
    drains: bool = False,
) -> None:
    """Run `function(place, **arguments)` in one process per rank, entry "module:function"; return when all are done.

    arguments: what JSON can say. facts: what all nodes must have in common, compared before anything is started.
    logs: folder of each process's output; by default a new one, which is removed when all ended well and named when
    not. Rank 0 keeps our stdout, and its log is shown on our stderr. collectives: join MindSpore's cluster first.
    SIGINT and SIGTERM go to the ranks, which then have stop_seconds, or until the next one, and are raised again;
    drains: not a SIGTERM after which every rank ended with exit code 0, which is how a service ends. OptionError before
    anything is started; RankError names the rank that failed, with the end of its log; nothing that was started is
    left. To be called on the main thread.
    """
    program = _Program(entry, arguments, cluster, collectives, stop_seconds)
    if logs is not None:
        _check_logs(logs, cluster)
    ended_well = False
    with collected() as received, contextlib.ExitStack() as stack:
        listener = stack.enter_context(cluster.leader_listener()) if cluster.is_master else None
        links = stack.enter_context(meet(cluster, listener, facts or {}, received))
        if received:
            tell_leaving(links, cluster, received[0])
        else:
            ended_well = _run(program, logs, listener, links, received)
    if received and not (drains and ended_well and received[0] == signal.SIGTERM):
        default = signal.getsignal(received[0]) == signal.SIG_DFL
        signal.raise_signal(received[0])
        if default:
            raise SystemExit(128 + received[0])  # process 1 of a container is not ended by its own signals


def _check_logs(folder: Path, cluster: Cluster) -> None:
    """OptionError where the logs of the ranks cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _log_names(cluster):
            (folder / name).open("wb").close()
    except OSError as error:
        raise OptionError(
            f"rank_logs is {str(folder)!r}, where no logs can be written ({error.strerror or error}): name a folder "
            "that may be written to, or one that can be made"
        ) from None


def _log_names(cluster: Cluster) -> list[str]:
    return [*["scheduler.log"] * cluster.is_master, *[f"rank-{rank}.log" for rank in cluster.ranks_here]]


def _new_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="msds-ranks-"))
    except OSError as error:
        raise OptionError(
            f"no temporary folder can be made for the ranks' logs ({error.strerror or error}): name a folder with "
            "--rank-logs, or set TMPDIR"
        ) from None


def _run(
    program: _Program,
    logs: Path | None,
    listener: socket.socket | None,
    links: Links,
    received: list[signal.Signals],
) -> bool:
    """Whether all ranks ended with exit code 0. Other nodes are told why when not even a start was possible."""
    try:
        return _run_here(program, _new_folder() if logs is None else logs, logs is None, listener, links, received)
    except RankError:
        raise  # they were told by who watches the ranks
    except Exception as error:
        problem = f"its ranks could not be run: {error}"
        links.tell("failed", {"problem": problem, "exit_code": 2 if isinstance(error, OptionError) else 1})
        raise


def _run_here(
    program: _Program,
    folder: Path,
    is_temporary: bool,
    listener: socket.socket | None,
    links: Links,
    received: list[signal.Signals],
) -> bool:
    print(f"msds: logs of {len(program.cluster.ranks_here)} ranks in {folder}", file=sys.stderr, flush=True)
    processes: list[Process] = []
    supervision: Supervision | None = None
    try:
        _start(processes, program, folder, listener)
        supervision = Supervision(processes, program.cluster, links, received, program.stop_seconds)
        ended_well = supervision.run()
        links.tell("done")
        return ended_well
    finally:
        end(processes)
        if is_temporary and (supervision is None or supervision.keeps_logs):
            print(f"msds: the logs of the ranks stay in {folder}", file=sys.stderr, flush=True)
        elif is_temporary:
            shutil.rmtree(folder, ignore_errors=True)


def _start(processes: list[Process], program: _Program, folder: Path, listener: socket.socket | None) -> None:
    cluster = program.cluster
    environment = dict(os.environ)
    if program.collectives:
        host, port = cluster.scheduler_address()
        environment |= {
            "MS_WORKER_NUM": str(cluster.ranks),
            "MS_SCHED_HOST": host,
            "MS_SCHED_PORT": str(port),
            "MS_TOPO_TIMEOUT": str(math.ceil(cluster.startup_seconds)),
            "RANK_SIZE": str(cluster.ranks),
        }
        if cluster.is_master:
            job: dict[str, Any] = {"name": "scheduler", "place": None}
            variables = {"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
            processes.append(_spawn(None, job, environment | variables, folder / "scheduler.log"))
    leader = listener.getsockname() if listener and cluster.master is None else cluster.leader_address()
    for local, rank in enumerate(cluster.ranks_here):
        own = listener.fileno() if listener is not None and rank == 0 else None
        here = len(cluster.ranks_here)
        place = Place(rank, cluster.ranks, here, leader, cluster.secret, own, startup_seconds=cluster.startup_seconds)
        variables = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "RANK_ID": str(rank), "DEVICE_ID": str(local)}
        job = {
            "name": f"rank {rank}",
            "place": asdict(place),
            "collectives": program.collectives,
            "entry": program.entry,
            "arguments": dict(program.arguments),
        }
        processes.append(_spawn(rank, job, environment | variables, folder / f"rank-{rank}.log", listener=listener))
    if listener is not None:
        listener.close()  # rank 0 has it now


def _spawn(
    rank: int | None,
    job: dict[str, Any],
    environment: dict[str, str],
    log: Path,
    *,
    listener: socket.socket | None = None,
) -> Process:
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
    return Process(rank, popen, log, reading)
