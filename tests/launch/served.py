"""`msds serve --mesh` as a process of its own, for tests that ask it over HTTP."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(str(ROOT / part) for part in ("", "graphs", "ops", "serve"))
START_SECONDS = 400


@dataclass
class Served:
    """A running `msds serve` of several ranks; logs: where they and `parent.log` are; ranks: their process ids."""

    url: str
    process: subprocess.Popen[str]
    logs: Path
    ranks: list[int]


@contextlib.contextmanager
def serving(folder: Path, logs: Path, *arguments: str) -> Iterator[Served]:
    """Serve a checkpoint folder with these arguments, --mesh among them, from the time it is ready to the exit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "msds_serve", "serve", str(folder), "--port", str(port), *arguments]
    command += ["--rank-logs", str(logs), "--step-timeout", "120"]
    with (logs / "parent.log").open("w") as errors:
        environment = os.environ | {"PYTHONPATH": PYTHONPATH}
        process = subprocess.Popen(command, cwd=logs, env=environment, stderr=errors, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _ready(url):
            assert process.poll() is None, (logs / "parent.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Served(url, process, logs, [int(pid) for pid in children])
    finally:
        process.terminate()
        process.wait(60)


def _ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/ready", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False
