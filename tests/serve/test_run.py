"""What a start of the service refuses before it loads anything, and how it ends on SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from msds.errors import OptionError
from msds_serve.run import serve
from tests.launch.served import PYTHONPATH


def test_an_address_that_cannot_be_had_is_refused_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OptionError, match=rf"host 127.0.0.1 with port {port} cannot be served on: .*in use"):
            serve("no such folder", host="127.0.0.1", port=port, engine={}, service={"model_names": ("tiny",)})
    with pytest.raises(OptionError, match=r"host nowhere.invalid with port 8000 cannot be served on"):
        serve("no such folder", host="nowhere.invalid", port=8000, engine={}, service={"model_names": ("tiny",)})


LOADS_FOR_EVER = (
    "import os, sys, time\nimport msds_serve.run\nfrom msds_serve.cli import main\n"
    "msds_serve.run.LLM = lambda *_, **__: (os.write(2, b'it loads'), time.sleep(600))\nmain(sys.argv[1:])"
)


def test_a_service_that_has_drained_ends_with_exit_code_0(tiny: Callable[..., Path], tmp_path: Path) -> None:
    arguments = ["--max-model-len", "16", "--max-num-seqs", "1"]
    process, port = _service(tmp_path, ["-m", "msds_serve"], tiny("llama_base"), arguments)
    try:
        _until(process, tmp_path, lambda: _is_ready(port))
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_service_that_is_ended_while_it_starts_says_so(tiny: Callable[..., Path], tmp_path: Path) -> None:
    process, _ = _service(tmp_path, ["-c", LOADS_FOR_EVER], tiny("llama_base"), [])
    try:
        _until(process, tmp_path, lambda: "it loads" in (tmp_path / "stderr").read_text())
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert "msds: told to end before it served\n" in (tmp_path / "stderr").read_text()


def _service(
    tmp_path: Path, program: list[str], folder: Path, arguments: list[str]
) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *program, "serve", str(folder), "--port", str(port), *arguments]
    with (tmp_path / "stderr").open("w") as errors:
        environment = os.environ | {"PYTHONPATH": PYTHONPATH}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=errors), port


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False


def _until(process: subprocess.Popen[bytes], tmp_path: Path, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
