"""Python and the packages whose wrong versions are known to break things. Nothing is imported to find out."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata

from msds.doctor.checks import FAIL, PASS, WARN, Finding

Version = tuple[int, ...]

# (package, lowest, first that is too high, why): as pyproject.toml declares them, which pip alone enforces
RANGES: tuple[tuple[str, Version, Version, str], ...] = (
    ("mindspore", (2, 10), (2, 11), "every graph-mode fact that this project relies on was measured on 2.10"),
    ("numpy", (1, 26), (2,), "MindSpore 2.10 breaks with NumPy 2 (bfloat16 and JIT fallback), and does not say so"),
    ("scipy", (1, 11), (1, 14), "SciPy from 1.14 on wants NumPy 2"),
)


def python_version() -> Finding:
    """3.10 to 3.12 on Linux."""
    version, where = sys.version_info, f"{platform.system()} {platform.machine()}"
    found = f"Python {platform.python_version()}, {where}"
    if platform.system() != "Linux":
        return Finding(FAIL, found, "use Linux: MindSpore's CPU and Ascend builds and this project run there")
    if not (3, 10) <= version[:2] <= (3, 12):
        return Finding(FAIL, found, "use Python 3.10, 3.11 or 3.12")
    return Finding(PASS, found)


def packages(installed: Callable[[str], str] = metadata.version) -> Finding:
    """MindSpore, NumPy and SciPy inside the ranges that work together."""
    versions: dict[str, str] = {}
    faults, pins = [], []
    for name, lowest, too_high, why in RANGES:
        span = f">={_text(lowest)},<{_text(too_high)}"
        try:
            versions[name] = installed(name)
        except metadata.PackageNotFoundError:
            faults.append(f"{name} is not installed")
            pins.append(f"'{name}{span}'")
            continue
        if not lowest <= version_tuple(versions[name]) < too_high:
            faults.append(f"{name} {versions[name]}: {why}")
            pins.append(f"'{name}{span}'")
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if faults:
        return Finding(FAIL, "\n".join(([found] if found else []) + faults), f"pip install {' '.join(pins)}")
    return Finding(PASS, found)


def two_mindspores(installed: Callable[[str], str] = metadata.version) -> Finding:
    """Packages that put a second copy of `mindspore` into the same folder."""
    others = []
    for name in ("mindspore-dev", "mindspore-ascend", "mindspore-gpu", "mindspore-lite"):
        try:
            others.append(f"{name} {installed(name)}")
        except metadata.PackageNotFoundError:
            continue
    if others:
        return Finding(
            WARN,
            f"also installed: {', '.join(others)}",
            "uninstall all of them and mindspore, then install mindspore once: they overwrite each other's files",
        )
    return Finding(PASS, "one MindSpore")


def version_tuple(text: str) -> Version:
    """The leading numbers: "2.10.0rc1" -> (2, 10, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _text(version: Version) -> str:
    return ".".join(map(str, version))
