"""The short form of the load script, on a real server process with a tiny model; and that it can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.load import Process, Report, _check_process, load, served

OPTIONS = ["--max-model-len", "128", "--max-num-seqs", "4", "--max-waiting", "64", "--memory-fraction", "0.2"]


def test_a_short_load_leaves_nothing(tiny: Callable[..., Path]) -> None:
    with served(tiny("llama_base", tokenizer=True), OPTIONS) as (url, pid):
        report = load(url, pid, seconds=6, streams=16)
    print(report.render())
    assert report.passed, report.render()
    assert {kind for kind, _ in report.outcomes} == {"stream", "whole", "leave", "bad"}


def test_what_a_leak_looks_like() -> None:
    report = Report()
    start = Process(rss=500, threads=30, files=20)
    _check_process(report, [start, start, start], Process(rss=600, threads=90, files=60), streams=16)
    assert not any(holds for _, holds, _ in report.checks)
