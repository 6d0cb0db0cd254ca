"""Machines made of files and scripts: an A2 node of two NPUs whose tools print what the real ones do."""

from __future__ import annotations

from pathlib import Path

from msds.doctor import System

A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 95.7        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3332 / 65536         |
+===========================+===============+====================================================+
| 7     910B3               | OK            | 101.2       41                0    / 0             |
| 0                         | 0000:42:00.0  | 3           0    / 0          3351 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 7       0                 | 12345         | python3                  | 48                      |
+===========================+===============+====================================================+
"""

A3 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.3.rc1                 Version: 25.3.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 160.2       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3134 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           35                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 99          0    / 0          61440/ 65536         |
+===========================+===============+====================================================+
"""


def npu_machine(root: Path, table: str = A2, *, link: str = "link status: UP", code: int = 0, **env: str) -> System:
    """A machine under `root` with devices, driver, CANN 8.5.0, npu-smi and hccn_tool."""
    for number in range(2):
        _write(root / f"dev/davinci{number}", "")
    _write(root / "dev/shm/.keep", "")
    home = root / "usr/local/Ascend"
    _write(home / "driver/version.info", "Version=25.2.0\nascendhal_version=7.35.23\n")
    _write(home / "firmware/version.info", "Version=7.7.0.1.231\n")
    _write(home / "ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info", "package=x\nversion=8.5.0\n")
    _write(root / "npu-smi.txt", table)
    _script(root / "usr/local/sbin/npu-smi", f"cat {root}/npu-smi.txt; exit {code}")
    answers = f'case "$*" in *-link*) echo "{link}";; *) echo "net health status: Success";; esac'
    _script(home / "driver/tools/hccn_tool", answers)
    return System(root=root, env={"PATH": "/usr/bin:/bin", **env})


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _script(path: Path, body: str) -> None:
    _write(path, f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
