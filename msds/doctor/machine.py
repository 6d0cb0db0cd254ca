"""Memory, disk, limits, clock and ports of this machine."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import time
from pathlib import Path

from msds.doctor.checks import FAIL, PASS, SKIP, WARN, Finding
from msds.doctor.system import System
from msds.planning.units import sized

GIB = 1 << 30
SMALLEST_RAM = 4 * GIB
"""MindSpore itself takes 0.4 GiB, compiling a few more. Estimate."""
SMALLEST_DISK = 1 * GIB
COMFORTABLE_DISK = 10 * GIB
SMALLEST_SHM = 1 * GIB
"""HCCL and MindSpore hand data between processes through /dev/shm. Estimate."""
OPEN_FILES = 4096
"""A file per shard and a socket per client, with room. Estimate."""
BORN = 1_750_000_000
"""No clock is right that shows a time before this project began (June 2025)."""


def meminfo(system: System) -> dict[str, int]:
    """Fields of /proc/meminfo in bytes, {} where there is none."""
    fields = {}
    for line in (system.read("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if rest.split() and rest.split()[0].isdigit():
            fields[name] = int(rest.split()[0]) * 1024
    return fields


def cgroup_limit(system: System) -> int | None:
    """Bytes that the control group allows, version 2 or 1; None for no limit."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (system.read(file) or "").strip()
        if text.isdigit() and int(text) < 1 << 60:  # version 1 writes "no limit" as almost 2^63
            return int(text)
    return None


def memory(system: System) -> Finding:
    """RAM that is free, the control group's limit, and swap in use."""
    fields = meminfo(system)
    if "MemAvailable" not in fields:
        return Finding(SKIP, "no /proc/meminfo with MemAvailable")
    limit, free = cgroup_limit(system), fields["MemAvailable"]
    found = f"{_gib(free)} of {_gib(fields.get('MemTotal', 0))} RAM free"
    if limit is not None:
        found += f", control group limit {_gib(limit)}"
    swapped = fields.get("SwapTotal", 0) - fields.get("SwapFree", 0)
    if swapped:
        found += f", {_gib(swapped)} of swap in use"
    if min(free, limit if limit is not None else free) < SMALLEST_RAM:
        return Finding(FAIL, found, f"free memory or raise the limit: at least {_gib(SMALLEST_RAM)} is needed")
    if swapped > GIB:
        return Finding(WARN, found, "what is swapped out makes every step wait: find who needs the memory (smem, top)")
    return Finding(PASS, found)


def cores() -> Finding:
    """Cores that this process may use, and how busy they are."""
    usable, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    found = f"{usable} of {os.cpu_count()} cores usable, load {load:.1f}"
    if load > usable:
        return Finding(WARN, found, "others use these cores: measurements will be off, and threads will wait")
    return Finding(PASS, found)


def disk(folder: Path, checkpoint_bytes: int, system: System) -> Finding:
    """Free space where the model (or the current folder) is; and whether its files fit into the page cache."""
    free = shutil.disk_usage(folder).free
    available = meminfo(system).get("MemAvailable", 0)
    found = f"{_gib(free)} free at {folder}"
    if free < SMALLEST_DISK:
        return Finding(FAIL, found, f"free some space: at least {_gib(SMALLEST_DISK)} is needed for logs and caches")
    if checkpoint_bytes:
        cached = "fits" if checkpoint_bytes < available else "does not fit"
        found += f"; the checkpoint of {sized(checkpoint_bytes)} {cached} into the page cache of {_gib(available)}"
    if free < COMFORTABLE_DISK:
        return Finding(WARN, found, f"{_gib(COMFORTABLE_DISK)} leave room for a converted copy and logs")
    return Finding(PASS, found)


def open_files() -> Finding:
    """Soft and hard limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"limit {_limit(soft)}, may be raised to {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return Finding(WARN, found, f"ulimit -n {OPEN_FILES} before starting, or LimitNOFILE in the service's unit")
    return Finding(PASS, found)


def shared_memory(system: System) -> Finding:
    """Size of /dev/shm."""
    place = system.path("/dev/shm")
    if not place.is_dir():
        return Finding(WARN, "no /dev/shm", "mount one; several ranks on one machine hand data through it")
    free = shutil.disk_usage(place).free
    if free < SMALLEST_SHM:
        return Finding(
            WARN, f"{_gib(free)} free in /dev/shm", "enlarge it (docker run --shm-size=8g) for several ranks"
        )
    return Finding(PASS, f"{_gib(free)} free in /dev/shm")


def clock(system: System, now: float | None = None) -> Finding:
    """The clock is plausible and kept by NTP: certificates and logs of several machines depend on it."""
    seconds = time.time() if now is None else now
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    if seconds < BORN:
        return Finding(FAIL, shown, "set the clock, for example with chronyc makestep or timedatectl set-ntp true")
    program = system.find("timedatectl")
    answer = system.run([program, "show", "-p", "NTPSynchronized", "--value"]) if program is not None else None
    if answer is None or answer.code != 0:
        return Finding(PASS, f"{shown}; whether NTP keeps it cannot be told here")
    if answer.text.strip() != "yes":
        return Finding(WARN, f"{shown}, not synchronised", "timedatectl set-ntp true, where machines work together")
    return Finding(PASS, f"{shown}, synchronised")


def port(number: int, host: str = "127.0.0.1") -> Finding:
    """Whether the service could listen there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            listener.bind((host, number))
        except OSError as error:
            if error.errno == errno.EACCES:
                return Finding(FAIL, f"port {number} needs privileges", "choose a port from 1024 on with --port")
            return Finding(
                FAIL, f"port {number} of {host}: {error.strerror}", "stop who listens there (ss -ltnp), or use --port"
            )
    return Finding(PASS, f"port {number} of {host} is free")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
