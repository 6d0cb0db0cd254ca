"""A whole preflight: independence of checks, checkpoints that are whole or damaged, exit codes, JSON."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from msds.checkpoint import write_manifest
from msds.doctor import examine
from msds.doctor.checks import Check, Finding, run_checks
from msds.doctor.report import DoctorReport
from msds.errors import ConfigError
from msds.planning import make_demand, make_plan
from msds_serve.cli import main

Tiny = Callable[..., Path]


def test_a_check_that_breaks_or_hangs_leaves_the_others_alone() -> None:
    release = threading.Event()

    def breaks() -> Finding:
        raise ZeroDivisionError("by zero")

    def hangs() -> Finding:
        release.wait(30)
        return Finding("pass", "late")

    good = Check("good", lambda: Finding("pass", "well"))
    results = run_checks([Check("hangs", hangs, 0.05), Check("breaks", breaks), good])
    release.set()
    assert [(result.name, result.finding.status) for result in results] == [
        ("hangs", "fail"),
        ("breaks", "fail"),
        ("good", "pass"),
    ]
    assert "did not end within 0.05 s" in results[0].finding.found
    assert "ZeroDivisionError: by zero" in results[1].finding.found
    report = DoctorReport(results)
    assert not report.passed
    assert report.summary == {"pass": 1, "warn": 0, "fail": 2, "skip": 0}
    assert "2 fail" in report.render()


def found(path: str | Path) -> dict[str, Finding]:
    return {result.name: result.finding for result in examine(path).results}


def test_a_good_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("v3_base", tokenizer=True), folder)
    assert found(folder)["digests"].status == "skip"
    write_manifest(folder, progress=False)
    findings = found(folder)
    assert findings["checkpoint"].status == "pass"
    assert findings["digests"].status == "pass"
    assert findings["room"].status == "pass"
    assert findings["tokenizer"].status in ("pass", "warn")
    assert "ids" in findings["tokenizer"].found
    assert findings["config"].status in ("pass", "warn")


def test_a_damaged_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama_base"), folder)
    write_manifest(folder, progress=False)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    findings = found(folder)
    for name in ("checkpoint", "digests"):
        assert findings[name].status == "fail"
        assert "model.safetensors" in findings[name].found
    assert findings["tokenizer"].status == "warn"  # it has none
    (folder / "tokenizer.json").write_text("{")
    assert found(folder)["tokenizer"].status == "fail"
    (folder / "config.json").write_text("{}")
    assert found(folder)["config"].status == "fail"


MODEL_CHECKS = ("config", "checkpoint", "digests", "tokenizer", "room")


def statuses(path: str | Path) -> list[str]:
    findings = found(path)
    return [findings[name].status for name in MODEL_CHECKS]


def test_what_is_not_there_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (tmp_path / "absent", "deepseek-v9", "/nonexist/model"):
        assert statuses(name) == ["fail", "skip", "skip", "skip", "skip"]
        findings = found(name)
        assert "no such folder" in findings["config"].found
        assert "tiny-r1 ships with msds, the presets are deepseek-v3," in findings["config"].found
        assert {findings[name].found for name in MODEL_CHECKS[1:]} == {"there is no such folder"}
        assert findings["python"].status == "pass"
    with pytest.raises(ConfigError, match="model '' is neither"):
        examine("")
    assert main(["doctor", ""]) == main(["plan", "", "--mesh", "a2:1"]) == 2


def test_a_preset_has_a_config_and_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"x" * (1 << 20))
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: 64 << 30)
    assert statuses("r1-distill-qwen-1.5b") == ["pass", "skip", "skip", "skip", "pass"]
    findings = found("deepseek-v3")
    assert statuses("deepseek-v3") == ["pass", "skip", "skip", "skip", "fail"]
    assert "a preset" in findings["tokenizer"].found
    assert "page cache" not in findings["disk"].found  # what lies here is not the preset's
    mesh = findings["room"].next_step.partition("--mesh ")[2].split()[0]
    assert make_plan(make_demand("deepseek-v3", mesh)).fits
    assert statuses("tiny-r1")[:2] == ["pass", "pass"]


def test_a_config_that_cannot_be_read_is_said_once(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama_base", tokenizer=True), folder)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"hidden_size": -1}))
    findings = found(folder)
    assert "hidden_size" in findings["config"].found
    assert [findings[name].status for name in ("config", "checkpoint", "room")] == ["fail", "skip", "skip"]
    assert findings["tokenizer"].status != "fail"
    assert [name for name in MODEL_CHECKS if "hidden_size" in findings[name].found] == ["config"]


@pytest.mark.parametrize(
    ("variant", "field", "wrong"),
    [
        ("v3_base", "hidden_size", 65),
        ("v3_base", "kv_lora_rank", 8),
        ("v3_base", "vocab_size", 1000),
        ("llama_base", "intermediate_size", 100),
        ("llama_base", "hidden_size", 128),
    ],
)
def test_the_field_that_contradicts_the_tensors_is_named(
    tiny: Tiny, tmp_path: Path, variant: str, field: str, wrong: int
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny(variant), folder)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {field: wrong}))
    finding = found(folder)["checkpoint"]
    assert finding.status == "fail"
    assert finding.found.startswith(f"{field} is {wrong} in the config; if it were {data[field]}, ")
    assert finding.next_step.startswith(f"set {field} to {data[field]} in config.json")
    assert len(finding.found.splitlines()) <= 8


def test_tensors_that_no_field_explains_are_listed_in_part(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama_base"), folder)
    data = json.loads((folder / "config.json").read_text())
    changed = {"hidden_size": 2 * data["hidden_size"], "intermediate_size": data["intermediate_size"] - 4}
    (folder / "config.json").write_text(json.dumps(data | changed))
    finding = found(folder)["checkpoint"]
    assert finding.status == "fail"
    assert "in the config; if it were" not in finding.found
    assert finding.found.endswith("\n  and others")
    assert len(finding.found.splitlines()) == 7


def test_a_model_that_is_too_large_for_this_machine(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: 1000)
    folder = tiny("llama_base")
    room = found(folder)["room"]
    assert room.status == "fail"
    assert f"msds plan {folder} --mesh a2:1" in room.next_step
    assert "0.00" not in room.found


def test_the_command(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "absent"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"passed", "summary", "checks"}
    assert report["passed"] is False
    for check in report["checks"]:
        assert check.keys() == {"name", "status", "found", "next_step", "seconds"}
        assert check["status"] in ("pass", "warn", "fail", "skip")
        assert check["next_step"] or check["status"] in ("pass", "skip"), check
    assert sum(report["summary"].values()) == len(report["checks"]) == 20
    assert main(["doctor", "--port", "70000"]) == 2
    assert "port is 70000" in capsys.readouterr().err


def test_exit_code_follows_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for status, code in (("pass", 0), ("warn", 0), ("skip", 0), ("fail", 1)):
        report = DoctorReport(run_checks([Check("one", lambda status=status: Finding(status, "x"))]))  # type: ignore[misc]
        monkeypatch.setattr("msds.doctor.examine", lambda *args, report=report, **options: report)
        assert main(["doctor"]) == code
        assert capsys.readouterr().out.startswith(f"{status}  one  x")
