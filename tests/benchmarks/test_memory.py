"""What the memory benchmark prints, on made-up measurements; and what it takes from a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msds.pretrained import DEFAULT_MODEL
from tests.benchmarks.bench_memory import MIB, main, markdown, plan_bytes
from tests.benchmarks.test_report import MACHINE


def test_a_row_for_what_is_exact_and_one_for_the_whole() -> None:
    planned = {"weights": 100 * MIB, "cache": 50 * MIB, "activations": 10 * MIB, "graphs, process": 740 * MIB}
    measured = {"arrays": 150 * MIB, "loaded": 400 * MIB, "compiled": 900 * MIB, "generated": 1000 * MIB}
    text = markdown({"machine": MACHINE, "planned": planned, "measured": measured})
    assert "| weights and cache | 150 | 150 | 1.000 |" in text
    assert "| whole process, at its peak | 900 | 1,000 | 0.90 |" in text
    assert "loaded 400, compiled 900, generated 1,000" in text


def test_the_plan_is_of_the_model_as_it_is_served() -> None:
    plain, drafting = (plan_bytes(str(DEFAULT_MODEL), 128, drafts) for drafts in (0, 2))
    assert all(size > 0 for size in plain.values())
    assert all(drafting[name] > plain[name] for name in ("weights", "cache", "graphs, process"))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["0", "2"])
def test_a_process_takes_what_its_plan_says(tmp_path: Path, drafts: str) -> None:
    """The shipped model, every shape compiled and its cache full: within a tenth."""
    main(["--model", str(DEFAULT_MODEL), "--drafts", drafts, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    planned, measured = found["planned"], found["measured"]
    assert planned["weights"] + planned["cache"] == measured["arrays"]
    assert sum(planned.values()) == pytest.approx(measured["generated"], rel=0.1)
