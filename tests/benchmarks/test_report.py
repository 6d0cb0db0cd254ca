"""What the benchmarks print, on made-up measurements."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.bench_compile import depths_table, first_token_table
from tests.benchmarks.bench_models import markdown
from tests.benchmarks.report import Line, PartCost, Spread, write_json

MACHINE = {
    "model": "mid",
    "date": "2026-01-01T00:00:00+00:00",
    "cpu": "a processor",
    "cores": 2,
    "threads": 2,
    "python": "3.11",
    "versions": {"msds-engine": "0.1.0"},
    "load_at_start": 0.1,
    "load_at_end": 1.9,
    "bandwidth_bytes_per_second": {1: 20e9, 2: 30e9},
}


def test_models_as_markdown_and_json(tmp_path: Path) -> None:
    rates = {"msds": Spread.of([20.0, 30.0, 25.0]), "transformers": Spread.of([50.0, 50.0, 50.0])}
    content = {
        "machine": MACHINE,
        "rounds": 3,
        "lines": [
            Line("decode", "tok/s", rates, {"msds": 0.25, "transformers": 0.5}),
            Line("compiling", "s", {"msds": Spread.of([1234.0])}),
        ],
        "compiled": [("decode S=1", 1.26)],
        "agreement": {"decode: equal greedy choices": 1.0},
        "parts": [PartCost("head", 1.5, 0.3)],
    }
    text = markdown(content)
    assert "| decode | tok/s | 25.0 (20.0-30.0), 25% of bandwidth | 50.0, 50% of bandwidth | 0.50 |" in text
    assert "| compiling | s | 1,234 | - |  |" in text
    assert "| head | 1.50 | 30% |" in text
    assert "20.0 GB/s with 1, 30.0 GB/s with 2 thread(s)" in text
    assert "load average 0.1 at the start, 1.9 at the end" in text
    write_json(tmp_path / "out.json", content)
    assert json.loads((tmp_path / "out.json").read_text())["lines"][0]["values"]["msds"]["median"] == 25.0


def test_line_through_the_depths() -> None:
    compiled = {depth: {"prefill": 2 + 0.5 * depth, "decode": 1 + 0.25 * depth} for depth in (4, 8, 16)}
    text = depths_table(compiled)
    assert "| 16 | 10.0 | 5.0 |" in text
    assert "prefill: 0.500 s per layer + 2.0 s, at most 0.0 s off the line." in text


def test_phases_until_the_first_token_add_up() -> None:
    phases = {
        "imports": 3.0,
        "config and headers": 0.5,
        "loading weights": 1.0,
        "the rest of LLM()": 0.5,
        "cold prefill": 4.0,
        "cold decode": 5.0,
        "cold host": 0.25,
        "warm prefill": 1.0,
        "warm decode": 0.5,
        "warm host": 0.125,
    }
    text = first_token_table([phases], [{"first byte": 9.5, "end": 14.5, "answer": "The capital"}])
    assert "| compiling prefill | 3.00 | - |" in text
    assert "| **first token** | 9.25 | 1.125 |" in text
    assert "first byte of the answer | 9.50 | - |" in text
