"""Models of several replicas (dp) on several processes: one engine, the answers of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msds import LLM
from msds.launch import Cluster, launch
from tests.launch.replica_entries import answers, few_shapes
from tests.models.mutants import shortened

OPTIONS = {"max_model_len": 64, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("plan", "ranks", "drafts"), [("dp2.ep2", 2, 1), pytest.param("dp2.tp2.ep2", 4, 0, marks=pytest.mark.slow)]
)
def test_answers_are_those_of_one_process(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, ranks: int, drafts: int
) -> None:
    """Both replicas busy and one alone, with and without seeds, and nothing compiles on any rank after the warm-up."""
    folder = str(shortened(tiny("v3_base"), tmp_path / "short", 1))
    options: dict[str, Any] = {**OPTIONS, "num_speculative_tokens": drafts}
    arguments = {"folder": folder, "plan": plan, "target": str(tmp_path / "said"), "options": options}
    launch("tests.launch.replica_entries:answer_rank", arguments, Cluster(ranks), logs=tmp_path / "logs")
    said, steps = json.loads((tmp_path / "said").read_text())
    monkeypatch.setattr("msds.llm.step_ladders", few_shapes)
    assert said == answers(LLM(folder, progress=False, **OPTIONS), folder)  # type: ignore[arg-type]
    for name in ("prefill", "decode", *(["draft"] if drafts else [])):
        assert [name, [0, 1]] in steps
        assert [name, [0]] in steps or [name, [1]] in steps
    assert [(tmp_path / f"said.{rank}").read_text() for rank in range(ranks)] == ["0"] * ranks
