"""One model on two ranks, driven from Python: warm-up, steps and new weights reach both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from msds import LLM
from msds.launch import Cluster, launch
from tests.launch.model_entries import OPTIONS, answers


def test_new_weights_reach_all_ranks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(tiny("llama_base"))
    arguments = {"folder": folder, "plan": "tp2", "target": str(tmp_path / "said")}
    launch("tests.launch.model_entries:answer_rank", arguments, Cluster(2), logs=tmp_path / "logs")
    before, after = json.loads((tmp_path / "said").read_text())
    assert before != after
    assert [before, after] == answers(LLM(folder, progress=False, **OPTIONS), folder)  # type: ignore[arg-type]
