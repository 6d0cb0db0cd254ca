"""Checks of the machine and its packages."""

from __future__ import annotations

import socket
from importlib import metadata
from pathlib import Path

import pytest

from msds.doctor import System, machine, software

GIB = 2**30


def files(root: Path, **contents: str) -> System:
    for name, text in contents.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return System(root=root, env={"PATH": ""})


def meminfo(free: int, swapped: int = 0) -> str:
    lines = [("MemTotal", 64), ("MemAvailable", free), ("SwapTotal", 8), ("SwapFree", 8 - swapped)]
    return "".join(f"{name}: {size << 20} kB\n" for name, size in lines)


@pytest.mark.parametrize(
    ("free", "swapped", "limit", "status"),
    [
        (32, 0, "max", "pass"),
        (32, 0, str(16 * GIB), "pass"),
        (3, 0, "max", "fail"),
        (32, 0, str(2 * GIB), "fail"),
        (32, 2, "max", "warn"),
    ],
)
def test_memory(tmp_path: Path, free: int, swapped: int, limit: str, status: str) -> None:
    system = files(tmp_path, proc__meminfo=meminfo(free, swapped), sys__fs__cgroup__memory_DOT_max=limit)
    finding = machine.memory(system)
    assert finding.status == status
    assert f"{free}.0 GiB of 64.0 GiB RAM free" in finding.found
    assert ("limit" in finding.found) is (limit != "max")
    assert machine.memory(System(root=tmp_path / "none", env={})).status == "skip"


def test_the_first_version_of_control_groups_writes_no_limit_as_a_number(tmp_path: Path) -> None:
    system = files(tmp_path, sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="9223372036854771712\n")
    assert machine.cgroup_limit(system) is None


def test_disk_and_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = files(tmp_path, proc__meminfo=meminfo(32))
    sizes = {"free": 100 * GIB}
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), sizes)())
    assert "15.0 GiB fits into the page cache of 32.0" in machine.disk(tmp_path, 15 * GIB, system).found
    assert "does not fit" in machine.disk(tmp_path, 40 * GIB, system).found
    assert machine.disk(tmp_path, 0, system).status == "pass"
    sizes["free"] = 5 * GIB
    assert machine.disk(tmp_path, 0, system).status == "warn"
    sizes["free"] = GIB // 2
    assert machine.disk(tmp_path, 0, system).status == "fail"


def test_a_clock_before_the_project_is_wrong(tmp_path: Path) -> None:
    system = System(root=tmp_path, env={"PATH": ""})
    assert machine.clock(system, now=0.0).status == "fail"
    assert "1970-01-01" in machine.clock(system, now=0.0).found
    assert "cannot be told" in machine.clock(system).found


def test_a_port_that_is_taken() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        taken = machine.port(number)
        assert taken.status == "fail"
        assert f"port {number}" in taken.found
    assert machine.port(number).status == "pass"


@pytest.mark.parametrize(("soft", "status"), [(1024, "warn"), (4096, "pass"), (-1, "pass")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, status: str) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, 65536))
    assert machine.open_files().status == status


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert machine.shared_memory(System(root=tmp_path, env={})).status == "warn"


def installed(versions: dict[str, str]):  # type: ignore[no-untyped-def]
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version


@pytest.mark.parametrize(
    ("changes", "found", "pin"),
    [
        ({"numpy": "2.4.0"}, "numpy 2.4.0: MindSpore 2.10 breaks", "'numpy>=1.26,<2'"),
        ({"scipy": "1.14.0"}, "scipy 1.14.0", "'scipy>=1.11,<1.14'"),
        ({"mindspore": "2.9.1"}, "mindspore 2.9.1", "'mindspore>=2.10,<2.11'"),
        ({"mindspore": ""}, "mindspore", "'mindspore>=2.10,<2.11'"),
        ({"mindspore": None}, "mindspore is not installed", "'mindspore>=2.10,<2.11'"),
    ],
)
def test_versions_that_do_not_go_together(changes: dict[str, str | None], found: str, pin: str) -> None:
    good: dict[str, str | None] = {"mindspore": "2.10.0", "numpy": "1.26.4", "scipy": "1.13.1"}
    assert software.packages(installed({k: v for k, v in good.items() if v is not None})).status == "pass"
    have = {name: version for name, version in (good | changes).items() if version is not None}
    finding = software.packages(installed(have))
    assert finding.status == "fail"
    assert found in finding.found
    assert finding.next_step == f"pip install {pin}"


def test_ranges_are_those_of_the_project() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, lowest, too_high, _ in software.RANGES:
        low, high = (".".join(map(str, version)) for version in (lowest, too_high))
        assert f'"{name}>={low},<{high}"' in text


def test_two_copies_of_mindspore() -> None:
    assert software.two_mindspores(installed({})).status == "pass"
    finding = software.two_mindspores(installed({"mindspore-ascend": "2.2.0"}))
    assert finding.status == "warn"
    assert "mindspore-ascend 2.2.0" in finding.found
