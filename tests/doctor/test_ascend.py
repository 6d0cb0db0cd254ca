"""NPU checks on made-up machines: what the tools print, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from msds.doctor import System, ascend
from msds.doctor.npu_smi import parse_npus, version
from tests.doctor.machines import A2, A3, npu_machine

BARE = {"PATH": "/usr/bin:/bin"}
SOURCED = {"ASCEND_HOME_PATH": "/usr/local/Ascend/ascend-toolkit/latest"}


def test_an_a2_table() -> None:
    first, last = parse_npus(A2)
    assert (first.npu, first.chip, first.name, first.health) == (0, 0, "910B3", "OK")
    assert (first.power_watts, first.temperature, first.utilisation) == (95.7, 37.0, 0.0)
    assert (first.memory_used, first.memory_total) == (3332, 65536)
    assert (last.npu, last.utilisation, last.temperature) == (7, 3.0, 41.0)
    assert version(A2) == "25.2.0"


def test_an_a3_table_has_two_chips_per_npu() -> None:
    first, second = parse_npus(A3)
    assert [(npu.npu, npu.chip) for npu in (first, second)] == [(0, 0), (0, 1)]
    assert second.power_watts is None  # power is the package's
    assert (second.temperature, second.utilisation, second.memory_used) == (35.0, 99.0, 61440)


@pytest.mark.parametrize(
    "text", ["", "DrvMngGetConsoleLogLevel failed. (ret=4)\n", A2.splitlines()[0], "| | |\n|1|2|3|"]
)
def test_a_text_without_chips_gives_none(text: str) -> None:
    assert parse_npus(text) == []


def test_without_an_npu_all_is_skipped_with_the_reason(tmp_path: Path) -> None:
    system = System(root=tmp_path, env=BARE)
    for check in (ascend.npus, ascend.driver, ascend.cann, ascend.links, ascend.hccl_environment):
        finding = check(system)
        assert finding.status == "skip"
        assert "no NPU" in finding.found


def test_a_healthy_machine(tmp_path: Path) -> None:
    system = npu_machine(tmp_path, **SOURCED)
    assert ascend.npus(system).status == "pass"
    assert "2 chips: 910B3" in ascend.npus(system).found
    assert ascend.driver(system).found == "driver 25.2.0, firmware 7.7.0.1.231"
    assert ascend.driver(system).status == "pass"
    assert ascend.links(system).found == "2 ports up and healthy"
    assert ascend.cann_version(system) == "8.5.0"


@pytest.mark.parametrize(
    ("old", "new", "status", "found"),
    [
        (
            "| 0     910B3               | OK   ",
            "| 0     910B3               | Alarm",
            "fail",
            "NPU 0 chip 0: health Alarm",
        ),
        ("101.2       41", "101.2       97", "warn", "NPU 7 chip 0: 97 degrees"),
        ("3351 / 65536", "61000/ 65536", "warn", "NPU 7 chip 0: 61,000 of 65,536 MB in use, load 3 %"),
    ],
)
def test_chips_that_are_not_well(tmp_path: Path, old: str, new: str, status: str, found: str) -> None:
    assert old in A2
    finding = ascend.npus(npu_machine(tmp_path, A2.replace(old, new)))
    assert finding.status == status
    assert found in finding.found
    assert finding.next_step


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    finding = ascend.npus(npu_machine(tmp_path, "dcmi module initialize failed. ret is -8005\n", code=255))
    assert finding.status == "fail"
    assert "exit code 255" in finding.found
    assert "-8005" in finding.found


def test_devices_without_tools(tmp_path: Path) -> None:
    system = npu_machine(tmp_path)
    (tmp_path / "usr/local/sbin/npu-smi").unlink()
    assert ascend.npus(system).status == "fail"
    assert "no npu-smi" in ascend.npus(system).found
    (tmp_path / "usr/local/Ascend/driver/tools/hccn_tool").unlink()
    assert ascend.links(system).status == "skip"


def test_a_tool_of_another_version_than_the_driver(tmp_path: Path) -> None:
    finding = ascend.driver(npu_machine(tmp_path, A2.replace("25.2.0", "24.1.0")))
    assert finding.status == "warn"
    assert "npu-smi 24.1.0" in finding.found


def test_a_link_that_is_down(tmp_path: Path) -> None:
    finding = ascend.links(npu_machine(tmp_path, link="link status: DOWN"))
    assert finding.status == "warn"
    assert "NPU 1 -link: link status: DOWN" in finding.found


def test_cann_needs_its_environment(tmp_path: Path) -> None:
    finding = ascend.cann(npu_machine(tmp_path))
    assert (finding.status, finding.found) == ("fail", "CANN 8.5.0, its environment is not set")
    assert "set_env.sh" in finding.next_step
    system = System(root=tmp_path / "other", env={**BARE, **SOURCED})
    (tmp_path / "other/dev").mkdir(parents=True)
    (tmp_path / "other/dev/davinci0").touch()
    assert ascend.cann(system).found == "no CANN toolkit"


@pytest.mark.parametrize(
    ("mindspore", "cann", "driver", "status"),
    [
        ("2.7.2", "8.5.0", "25.5.0", "pass"),
        ("2.7.1", "8.5.0", "25.5.0", "warn"),
        ("2.10.0", "8.5.0", "25.5.0", "warn"),  # no published pairing known
        ("2.6.0", "8.2.RC1", None, "pass"),
    ],
)
def test_pairs_of_versions(mindspore: str, cann: str, driver: str | None, status: str) -> None:
    finding = ascend.cann_pairing(mindspore, cann, driver)
    assert finding.status == status
    assert bool(finding.next_step) is (status == "warn")


def test_a_driver_older_than_its_cann() -> None:
    finding = ascend.cann_pairing("2.6.0", "8.1.RC1", "24.1.RC3")
    assert (finding.status, finding.next_step) == ("warn", "CANN 8.1.RC1 was published with driver 25.0.RC1")
    assert "driver" not in ascend.cann_pairing("2.6.0", "8.1.RC1", "25.0.RC1").next_step


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("HCCL_BUFFSIZE", "0", "HCCL_BUFFSIZE=0"),
        ("HCCL_BUFFSIZE", "200MB", "HCCL_BUFFSIZE=200MB"),
        ("HCCL_CONNECT_TIMEOUT", "60", "from 120 to 7200"),
        ("HCCL_IF_IP", "10.0.0.256", "no IP address"),
        ("HCCL_SOCKET_IFNAME", "eth9", "there is lo"),
        ("RANK_TABLE_FILE", "/absent.json", "no such file"),
        ("ASCEND_RT_VISIBLE_DEVICES", "0-7", "numbers such as 0,1,2"),
        ("MS_SIMULATION_LEVEL", "1", "nothing would be computed"),
    ],
)
def test_variables_that_make_no_sense(tmp_path: Path, name: str, value: str, found: str) -> None:
    (tmp_path / "sys/class/net/lo").mkdir(parents=True)
    finding = ascend.hccl_environment(System(root=tmp_path, env={**BARE, name: value}))
    assert finding.status == "fail"
    assert found in finding.found


def test_variables_that_do(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    finding = ascend.hccl_environment(npu_machine(tmp_path, HCCL_BUFFSIZE="400", HCCL_SOCKET_IFNAME="eth0"))
    assert (finding.status, finding.found) == ("pass", "HCCL_BUFFSIZE=400, HCCL_SOCKET_IFNAME=eth0")
