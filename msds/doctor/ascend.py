"""NPUs, their driver, CANN, and the links between NPUs. Skipped, with the reason, where there is no NPU."""

from __future__ import annotations

import ipaddress
import json
import re
from importlib import metadata

from msds.doctor.checks import FAIL, PASS, SKIP, WARN, Finding
from msds.doctor.npu_smi import Npu, parse_npus, version
from msds.doctor.software import version_tuple
from msds.doctor.system import System

# Which CANN a MindSpore was published with: ascend-deployer's version_match.json, and for 2.7.2 also MindSpore's
# release notes. Of 2.10 we know no published pairing.
CANN_OF_MINDSPORE = {"2.6.0": "8.2.RC1", "2.7.0": "8.2.RC1", "2.7.1": "8.3.RC1", "2.7.2": "8.5.0"}
# The oldest driver a CANN was published with: the installation table of MindSpore Transformers 1.5.
DRIVER_OF_CANN = {"8.1.RC1": "25.0.RC1"}

HOT = 85.0
"""Degrees Celsius above which a chip gets a warning. Estimate: the tool prints no limit."""
BUSY_SHARE = 0.1
"""Share of a chip's memory in use above which somebody else is presumably on it; an idle driver takes about 5 %."""

_HOME = "/usr/local/Ascend"
_SKIPPED = Finding(SKIP, "no NPU: no /dev/davinci* and no npu-smi")


def has_npu(system: System) -> bool:
    """Whether the machine shows a device or the driver's tool."""
    return bool(system.glob("/dev/davinci[0-9]*")) or _npu_smi(system) is not None


def _npu_smi(system: System) -> str | None:
    return system.find("npu-smi", "/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi")


def _npus(system: System) -> list[Npu]:
    program = _npu_smi(system)
    return [] if program is None else parse_npus(system.run([program, "info"]).text)


def npus(system: System) -> Finding:
    """Health, temperature, memory and load of every chip."""
    if not has_npu(system):
        return _SKIPPED
    program = _npu_smi(system)
    if program is None:
        return Finding(FAIL, "NPU devices, but no npu-smi", "install the driver's tools, or put npu-smi on PATH")
    answer = system.run([program, "info"])
    found = parse_npus(answer.text)
    if not found:
        said = answer.text.strip().splitlines()[:3]
        return Finding(
            FAIL,
            f"npu-smi info lists no NPU (exit code {answer.code}): {' '.join(said)}",
            "check the driver (dmesg, /var/log/ascend_seclog) and that the container maps /dev/davinci*",
        )
    return _judged(found)


def _judged(found: list[Npu]) -> Finding:
    sick = [npu for npu in found if npu.health != "OK"]
    hot = [npu for npu in found if npu.temperature is not None and npu.temperature > HOT]
    busy = [npu for npu in found if npu.memory_used and npu.memory_total and _share(npu) > BUSY_SHARE]
    lines = [f"{len(found)} chips: {', '.join(sorted({npu.name for npu in found}))}"]
    lines += [f"{npu.label}: health {npu.health}" for npu in sick]
    lines += [f"{npu.label}: {npu.temperature:g} degrees" for npu in hot]
    lines += [
        f"{npu.label}: {npu.memory_used:,} of {npu.memory_total:,} MB in use, load {npu.utilisation or 0:g} %"
        for npu in busy
    ]
    text = "\n".join(lines)
    if sick:
        return Finding(FAIL, text, "npu-smi info -t health -i ID names the fault; reset or leave out these chips")
    if hot:
        return Finding(WARN, text, "check the cooling: hot chips lower their clock")
    if busy:
        return Finding(WARN, text, "npu-smi info lists the processes: stop them, or choose other chips")
    return Finding(PASS, text)


def _share(npu: Npu) -> float:
    return (npu.memory_used or 0) / (npu.memory_total or 1)


def driver(system: System) -> Finding:
    """Driver and firmware are there, and the driver's tool is of the same version."""
    if not has_npu(system):
        return _SKIPPED
    of_driver = _version_in(system.read(f"{_HOME}/driver/version.info"))
    of_firmware = _version_in(system.read(f"{_HOME}/firmware/version.info"))
    found = f"driver {of_driver or 'unknown'}, firmware {of_firmware or 'unknown'}"
    if of_driver is None:
        return Finding(FAIL, found, f"install the driver; {_HOME}/driver/version.info should say its version")
    program = _npu_smi(system)
    tool = version(system.run([program, "info"]).text) if program is not None else None
    if tool is not None and version_tuple(tool)[:2] != version_tuple(of_driver)[:2]:
        return Finding(WARN, f"{found}, npu-smi {tool}", "reboot after a driver update, so that all is of one version")
    if of_firmware is None:
        return Finding(WARN, found, "in a container the firmware's file is often not mapped; compare it on the host")
    return Finding(PASS, found)


def cann_version(system: System) -> str | None:
    """Of the toolkit that the environment names, else at the usual places."""
    homes = [system.env.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    for home in [*filter(None, homes), f"{_HOME}/cann", f"{_HOME}/ascend-toolkit/latest", f"{_HOME}/latest"]:
        files = [*system.glob(f"{home}/*-linux/ascend_toolkit_install.info"), system.path(f"{home}/version.cfg")]
        for file in files:
            found = _version_in(file.read_text(errors="replace") if file.is_file() else None)
            if found is not None:
                return found
    return None


def cann(system: System) -> Finding:
    """CANN is installed, its environment is set, and MindSpore and the driver were published with it."""
    if not has_npu(system):
        return _SKIPPED
    found = cann_version(system)
    if found is None:
        return Finding(FAIL, "no CANN toolkit", f"install CANN, or set ASCEND_HOME_PATH if it is not under {_HOME}")
    if not {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"} & set(system.env):
        return Finding(FAIL, f"CANN {found}, its environment is not set", "source its set_env.sh before starting")
    try:
        mindspore = metadata.version("mindspore")
    except metadata.PackageNotFoundError:
        return Finding(PASS, f"CANN {found}")
    return cann_pairing(mindspore, found, _version_in(system.read(f"{_HOME}/driver/version.info")))


def cann_pairing(mindspore: str, cann: str, driver_version: str | None) -> Finding:
    """Compare versions with the tables above."""
    found = f"CANN {cann}, MindSpore {mindspore}"
    wanted = DRIVER_OF_CANN.get(cann)
    if wanted and driver_version and version_tuple(driver_version)[:2] < version_tuple(wanted)[:2]:
        return Finding(WARN, f"{found}, driver {driver_version}", f"CANN {cann} was published with driver {wanted}")
    paired = CANN_OF_MINDSPORE.get(mindspore)
    if paired is None:
        return Finding(
            WARN,
            f"{found}: no published pairing is known here",
            "compare with the installation table at mindspore.cn/install",
        )
    if paired != cann:
        return Finding(WARN, found, f"MindSpore {mindspore} was published with CANN {paired}: use that pair")
    return Finding(PASS, found)


def _version_in(text: str | None) -> str | None:
    """`version=8.2.RC1` or `Version=25.2.0`; version.cfg has it inside brackets, behind a colon."""
    if text is None:
        return None
    match = re.search(r"(?im)^\s*(?:\w*_)?version\s*=\s*\[?(?:[^\]\s:]*:)?([^\]\s]+)", text)
    return None if match is None else match[1]


def links(system: System) -> Finding:
    """The network port of every NPU is up and healthy, as hccn_tool sees it."""
    if not has_npu(system):
        return _SKIPPED
    program = system.find("hccn_tool", f"{_HOME}/driver/tools/hccn_tool")
    if program is None:
        return Finding(SKIP, "no hccn_tool: links are not looked at (one NPU, or several of one node, need none)")
    devices = system.glob("/dev/davinci[0-9]*")
    ids = list(range(len(_npus(system)))) or [int(path.name.removeprefix("davinci")) for path in devices]
    bad = []
    for number in ids:
        for option, good in (("-link", "UP"), ("-net_health", "Success")):
            text = system.run([program, "-i", str(number), option, "-g"]).text.strip()
            if good.lower() not in text.lower():
                bad.append(f"NPU {number} {option}: {text.splitlines()[0] if text else 'no answer'}")
    if bad:
        return Finding(
            WARN,
            "\n".join([f"{len(ids)} ports looked at", *bad]),
            "needed between nodes: check cable and optics (hccn_tool -i ID -optical -g), address (-ip -g), gateway",
        )
    return Finding(PASS, f"{len(ids)} ports up and healthy")


def hccl_environment(system: System) -> Finding:
    """Variables of HCCL and of MindSpore's simulation that are set, and whether they make sense."""
    env = system.env
    names = [n for n in sorted(env) if n.startswith(("HCCL_", "ASCEND_RT_", "ASCEND_VISIBLE", "RANK_TABLE", "MS_SIM"))]
    faults = []
    for name, low, high in (
        ("HCCL_BUFFSIZE", 1, 1 << 20),
        ("HCCL_CONNECT_TIMEOUT", 120, 7200),
        ("HCCL_EXEC_TIMEOUT", 0, 1 << 31),
        ("HCCL_IF_BASE_PORT", 1024, 65520),
    ):
        if name in env and not (env[name].isdigit() and low <= int(env[name]) <= high):
            faults.append(f"{name}={env[name]}: a whole number from {low} to {high} is wanted")
    if "HCCL_IF_IP" in env and not _is_address(env["HCCL_IF_IP"]):
        faults.append(f"HCCL_IF_IP={env['HCCL_IF_IP']}: no IP address")
    interface = env.get("HCCL_SOCKET_IFNAME", "").lstrip("=^").split(",")[0]
    present = [path.name for path in system.glob("/sys/class/net/*")]
    if interface and not any(name.startswith(interface) for name in present):
        faults.append(f"HCCL_SOCKET_IFNAME={interface}: there is {', '.join(present) or 'no interface'}")
    table = env.get("RANK_TABLE_FILE")
    if table and not _is_json(system.read(table)):
        faults.append(f"RANK_TABLE_FILE={table}: no such file, or not JSON")
    visible = env.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is not None and not re.fullmatch(r"\d+(,\d+)*", visible):
        faults.append(f"ASCEND_RT_VISIBLE_DEVICES={visible}: numbers such as 0,1,2 are wanted")
    if env.get("MS_SIMULATION_LEVEL"):
        faults.append(f"MS_SIMULATION_LEVEL={env['MS_SIMULATION_LEVEL']}: nothing would be computed")
    if faults:
        return Finding(FAIL, "\n".join(faults), "correct or unset these variables")
    if not has_npu(system):
        return _SKIPPED
    return Finding(PASS, ", ".join(f"{name}={env[name]}" for name in names) or "none set, defaults apply")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_json(text: str | None) -> bool:
    try:
        json.loads(text or "")
    except json.JSONDecodeError:
        return False
    return True
