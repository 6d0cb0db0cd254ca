"""Load a service for a while as people do, rudely, and check that it comes back to where it was.

    python -m tests.benchmarks.load MODEL --seconds 180 --streams 64      # starts `msds serve MODEL` on a free port
    python -m tests.benchmarks.load --url http://127.0.0.1:8000           # a running one; its process is not watched

Streams of mixed lengths and seeds, whole answers among them, clients that leave in the middle, requests that must be
refused. The report is a table of checks; the exit code is 1 when one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msds_serve.client import CHAT, COMPLETIONS, Server, in_parallel

WORDS = ["the", "sea", "is", "wide", "and", "the", "sky", "is", "high"]
RSS_SLOPE_MIB = 64.0
"""Growth of memory over the second half of the load that still counts as none: allocators are not exact."""


@dataclass
class Outcome:
    """How one request ended: kind of request, kind of end, and what was wrong with it."""

    kind: str
    end: str
    fault: str | None = None


@dataclass
class Report:
    """Checks by name: whether each holds, and the numbers behind it."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    checks: list[tuple[str, bool, str]] = field(default_factory=list)

    def check(self, name: str, holds: bool, numbers: object) -> None:
        self.checks.append((name, holds, str(numbers)))

    @property
    def passed(self) -> bool:
        return all(holds for _, holds, _ in self.checks)

    def render(self) -> str:
        lines = [f"{kind:>12} {end:<12}{count:>7}" for (kind, end), count in sorted(self.outcomes.items())]
        lines += [""] + [f"{'ok' if holds else 'FAILED':>8}  {name}: {numbers}" for name, holds, numbers in self.checks]
        return "\n".join(lines)


def requests_of(model: str, context: int, seed: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Endless (kind, path, body): of ten requests five are streams, two whole, two left under way, one bad."""
    rng = random.Random(seed)
    kinds = ["stream"] * 5 + ["whole"] * 2 + ["leave"] * 2 + ["bad"]
    bad: list[dict[str, Any]] = [
        {"temperature": -1},
        {"max_tokens": 10**6},
        {"model": "none"},
        {"no_such": 1},
        {"n": 0},
    ]
    for number in itertools.count():
        kind = rng.choice(kinds)
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, max(1, context // 16))))
        chat = rng.random() < 0.5
        body: dict[str, Any] = {"model": model, "max_tokens": rng.randint(1, max(2, context // 4)), "ignore_eos": True}
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        body |= rng.choice([{"temperature": 0}, {"seed": number}, {"temperature": 1.2, "top_p": 0.9}, {"n": 2}])
        if kind in ("stream", "leave"):
            body["stream"] = True
        if kind == "bad":
            body |= rng.choice(bad)
        yield kind, CHAT if chat else COMPLETIONS, body


def send(server: Server, kind: str, path: str, body: dict[str, Any]) -> Outcome:
    """One request of `requests_of`, judged."""
    if kind == "leave":
        return leave(server, path, body)
    exchange = server.ask(path, body)
    if exchange.status in (429, 503):
        time.sleep(0.2)
        return Outcome(kind, "refused")
    if kind == "bad":
        wrong = None if exchange.status in (400, 404) else f"status {exchange.status} for {body}"
        return Outcome(kind, "rejected", wrong)
    if exchange.error is not None:
        return Outcome(kind, "failed", exchange.error)
    reasons = [choice["finish_reason"] for choice in exchange.answer.choices]
    missing = len(reasons) != body.get("n", 1) or not set(reasons) <= {"stop", "length"}
    return Outcome(kind, "finished", f"finish reasons {reasons}" if missing else None)


def leave(server: Server, path: str, body: dict[str, Any]) -> Outcome:
    """Begin a stream and go: at once, or after its first event."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with contextlib.suppress(OSError), socket.create_connection((server.host, server.port or 80), timeout=60) as link:
        link.sendall(head.encode() + data)
        if len(data) % 2:
            link.recv(4096)
    return Outcome("leave", "left")


def metric(url: str, name: str) -> float:
    """A metric's value, summed over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@dataclass(frozen=True)
class Process:
    """What a process holds: resident memory in MiB, threads, file handles."""

    rss: float
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Process:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        rss, threads = int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"])
        return cls(rss, threads, len(os.listdir(f"/proc/{pid}/fd")))


@contextlib.contextmanager
def served(model: Path, arguments: list[str]) -> Iterator[tuple[str, int]]:
    """`msds serve` on a free port, ready: its URL and process id. Its log is shown when it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "msds_serve", "serve", str(model), "--port", str(port), *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            while not _is_ready(url):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"msds serve ended with {process.returncode}:\n{log.read()}")
                time.sleep(0.2)
            yield url, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def load(url: str, pid: int | None, *, seconds: float, streams: int, seed: int = 0) -> Report:
    """Load a service that is ready and check what it left. pid: of its process, None for one elsewhere."""
    server, report = Server.at(url, timeout=120), Report()
    model = server.model()
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        context = int(json.load(answer)["data"][0]["max_model_len"])
    compiled = metric(url, "msds_graph_compilations_total")
    end = time.monotonic() + seconds
    jobs = itertools.takewhile(lambda _: time.monotonic() < end, requests_of(model, context, seed))
    faults: list[str] = []
    samples: list[Process] = []
    finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(pid, samples, finished))
    watcher.start()
    try:
        for outcome in in_parallel(jobs, lambda job: send(server, *job), streams):
            report.outcomes[outcome.kind, outcome.end] += 1
            if outcome.fault is not None:
                faults.append(outcome.fault)
    finally:
        finished.set()
        watcher.join()
    report.check("every answer ended with a finish reason, every bad request was refused", not faults, faults[:3])
    report.check("requests were answered", report.outcomes["stream", "finished"] > 0, sum(report.outcomes.values()))
    _check_rest(report, url, compiled)
    if pid is not None and samples:
        _check_process(report, samples, Process.of(pid), streams)
    return report


def _check_rest(report: Report, url: str, compiled: float) -> None:
    deadline = time.monotonic() + 60
    names = ("msds_requests_running", "msds_requests_waiting", "msds_cache_usage_ratio")
    held = {name: metric(url, name) for name in names}
    while any(held.values()) and time.monotonic() < deadline:
        time.sleep(0.1)
        held = {name: metric(url, name) for name in names}
    report.check("no answer and no cache block is held", not any(held.values()), held)
    failed = metric(url, "msds_failed_steps_total")
    report.check("no step failed", failed == 0, failed)
    more = metric(url, "msds_graph_compilations_total") - compiled
    report.check("nothing was compiled", more == 0, more)


def _check_process(report: Report, samples: list[Process], after: Process, streams: int) -> None:
    before, middle = samples[0], samples[len(samples) // 2]
    report.check("threads are as before", after.threads <= before.threads + 40, f"{before.threads} -> {after.threads}")
    report.check("file handles are as before", after.files <= before.files + 8, f"{before.files} -> {after.files}")
    growth = after.rss - middle.rss
    numbers = f"{before.rss:.0f} -> {middle.rss:.0f} -> {after.rss:.0f} MiB at start, half-time and end"
    report.check(f"memory grows by less than {RSS_SLOPE_MIB:g} MiB", growth < RSS_SLOPE_MIB, numbers)


def _watch(pid: int | None, samples: list[Process], finished: threading.Event) -> None:
    while pid is not None and not finished.wait(0.5):
        with contextlib.suppress(OSError):
            samples.append(Process.of(pid))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description="Load a service rudely and check what it left.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("model", nargs="?", type=Path, help="folder to serve")
    where.add_argument("--url", help="a running service instead")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options, serve = parser.parse_known_args()
    if options.url:
        report = load(options.url, None, seconds=options.seconds, streams=options.streams, seed=options.seed)
    else:
        with served(options.model, serve) as (url, pid):
            report = load(url, pid, seconds=options.seconds, streams=options.streams, seed=options.seed)
    print(report.render())
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
