"""What is measured on: processor, load, versions, and how fast this machine streams memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

PACKAGES = ("msds-engine", "mindspore", "transformers", "torch", "numpy")
BUSY_PER_CORE = 0.5
STREAM_BYTES = 1 << 29  # far above any last-level cache
STREAM_CHUNK = 1 << 20  # floats per product; one call is then long against its overhead
STREAM_ROUNDS = 7


def describe(threads: int) -> dict[str, Any]:
    """Date, processor, threads and versions, as they go into the report."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "python": sys.version.split()[0],
        "versions": {package: version(package) for package in PACKAGES},
        "load_at_start": load_average(),
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        fields = [line.split(":", 1) for line in file if ":" in line]
    names = [value.strip() for key, value in fields if key.strip() in ("model name", "CPU part")]
    return names[0] if names else "unknown"


def load_average() -> float:
    """Runnable processes, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)


def warn_if_busy() -> None:
    """A second process costs a two-thread region up to a scheduler slice: such numbers say nothing."""
    cores, load = len(os.sched_getaffinity(0)), load_average()
    if load > BUSY_PER_CORE * cores:
        print(
            f"WARNING: the load average is {load} on {cores} cores (more than {BUSY_PER_CORE} per core): "
            "do not publish these numbers; run again on a quiet machine",
            file=sys.stderr,
        )


def pin_threads(count: int) -> None:
    """Confine this process to `count` processors, so that no library uses more than it was told."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def measure_bandwidth(threads: Sequence[int]) -> dict[int, float]:
    """Bytes per second of a streaming read of float32, the best of several rounds, for each number of threads.

    Runs in a process of its own, because the BLAS library reads its own number of threads when it is imported.
    """
    command = [sys.executable, "-m", "tests.benchmarks.machine", *map(str, threads)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return {count: float(line) for count, line in zip(threads, printed.splitlines(), strict=True)}


def _stream(threads: int) -> float:
    """Each thread runs dot products of its part with itself: one read of memory, no write, vectorised."""
    import numpy as np

    data = np.ones(STREAM_BYTES // 4, np.float32)
    parts = np.array_split(data, threads)

    def read(part: Any) -> float:
        chunks = (part[start : start + STREAM_CHUNK] for start in range(0, len(part), STREAM_CHUNK))
        return sum(float(chunk @ chunk) for chunk in chunks)

    fastest = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(STREAM_ROUNDS):
            start = time.perf_counter()
            list(pool.map(read, parts))
            fastest = min(fastest, time.perf_counter() - start)
    return data.nbytes / fastest


if __name__ == "__main__":
    for count in sys.argv[1:]:
        print(_stream(int(count)))
