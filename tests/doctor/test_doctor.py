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


def found(path: Path) -> dict[str, Finding]:
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


def test_a_missing_folder(tmp_path: Path) -> None:
    findings = found(tmp_path / "absent")
    assert findings["config"].status == "fail"
    assert "does not exist" in findings["config"].found
    assert findings["python"].status == "pass"


def test_a_model_that_is_too_large_for_this_machine(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: 1000)
    room = found(tiny("llama_base"))["room"]
    assert room.status == "fail"
    assert "msds plan" in room.next_step


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
