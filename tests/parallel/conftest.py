"""One msrun per world size for all cases: starting the processes is most of what they cost."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.mutants import shortened
from tests.parallel.cases import CASES

ROOT = Path(__file__).parents[2]
LIMIT = 900  # seconds; a rank that fails leaves the others waiting for half a minute

Results = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="session")
def parallel_folders(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `models/<case.folder>` of every case."""
    root = tmp_path_factory.mktemp("parallel")
    (root / "models").mkdir()
    for case in {case.folder: case for case in CASES}.values():
        target = root / "models" / case.folder
        if case.variant == "qwen2_odd_vocab":
            _cut_vocabulary(tiny("qwen2_tied"), target, 511)
        elif case.short:
            shortened(tiny(case.variant), target, 1)
        else:
            target.symlink_to(tiny(case.variant))
    return root


def _cut_vocabulary(source: Path, target: Path, size: int) -> None:
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    tensors = load_file(source / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file({**tensors, name: np.ascontiguousarray(tensors[name][:size])}, target / "model.safetensors")


@pytest.fixture(scope="session")
def results(parallel_folders: Path) -> Results:
    """results(name, rank) -> what a rank wrote for a case, `collectives` or `exchange`; starts the job on first use."""
    ran: set[int] = set()
    sizes = {case.name: case.ranks for case in CASES} | {"collectives": 4, "exchange": 4}

    def of(name: str, rank: int) -> dict[str, Any]:
        if sizes[name] not in ran:
            ran.add(sizes[name])
            _launch(parallel_folders, sizes[name])
        with np.load(parallel_folders / f"{name}.{rank}.npz") as arrays:
            return dict(arrays)

    return of


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _launch(folder: Path, size: int) -> None:
    logs = folder / f"logs{size}"
    binaries = Path(sys.executable).parent
    roots = os.pathsep.join(str(ROOT / part) for part in (".", "graphs", "ops", "serve"))
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": roots}
    command = [
        *(sys.executable, str(binaries / "msrun"), f"--worker_num={size}", f"--local_worker_num={size}"),
        *(f"--master_port={_free_port()}", f"--log_dir={logs}", "--join=True"),
        *(str(Path(__file__).with_name("worker.py")), str(folder)),
    ]
    with open(folder / f"msrun{size}.log", "wb") as log:
        job = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, preexec_fn=_die_with_parent
        )
        try:
            code = job.wait(LIMIT)
        except BaseException:
            job.terminate()
            job.wait(20)
            raise
    if code != 0:
        tails = [f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(logs.glob("worker_*"))]
        pytest.fail(f"a job of {size} processes ended with {code}\n" + "\n".join(tails))
