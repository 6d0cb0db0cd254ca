"""From nothing to a reinforced endpoint by commands alone, on a model a tenth of the tiny R1's size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msds.train.tiny_r1 import recipe
from msds_serve.cli import main

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 16}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_the_whole_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "CONFIG", recipe.CONFIG | SMALL)
    assert run("init", "init") == 0
    assert run("problems", "train.jsonl", "--count", 64, "--seed", 1) == 0
    assert run("problems", "test.jsonl", "--count", 6, "--held-out") == 0
    training = ["train", "init", "train.jsonl", "--run", "sft", "--batch-size", 4, "--lengths", "112"]
    assert run(*training, "--steps", 2, "--warmup-steps", 1) == 0
    assert run(*training, "--steps", 4, "--warmup-steps", 1, "--export", "trained") == 0
    log = [json.loads(line) for line in Path("sft/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [2, 4]
    assert run(*training, "--steps", 4, "--export", "trained") == 2  # before a step, and by name
    assert "trained exists already" in capsys.readouterr().err
    reinforcing = ["--run", "rl", "--rounds", 1, "--tasks-per-round", 2, "--group-size", 4, "--micro-batch", 8]
    assert run("reinforce", "trained", "train.jsonl", *reinforcing, "--max-tokens", 8, "--export", "better") == 0
    capsys.readouterr()
    assert run("evaluate", "better", "test.jsonl", "--baseline", "trained", "--max-tokens", 8, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [score["count"] for score in report["scores"]] == [1] * 6 + [6]
    assert {"won", "lost", "p_value", "scores", "model"} == report["baseline"].keys()
    assert json.loads(Path("better/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_transformers_reads_the_recipe(tmp_path: Path) -> None:
    """The untrained folder gives transformers the logits that it gives us."""
    import numpy as np

    import msds
    from tests.reference.checkpoints import transformers_logits

    folder = recipe.write_untrained(tmp_path / "init")
    ids = list(range(3, 40))
    ours = msds.load(folder, progress=False).logits(ids)
    np.testing.assert_allclose(ours, transformers_logits(folder, ids), atol=1e-5)


def test_bad_input_is_named_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("problems", "x.jsonl", "--count", 0) == 2
    assert "count is 0" in capsys.readouterr().err
    assert run("train", "nowhere", "none.jsonl", "--run", "r", "--steps", 1) == 2
    assert "none.jsonl cannot be read" in capsys.readouterr().err
    assert run("train", "nowhere", "none.jsonl", "--run", "r", "--steps", 0) == 2
    assert "steps is 0" in capsys.readouterr().err
    assert run("evaluate", "nowhere", "none.jsonl") == 2
    assert "none.jsonl cannot be read" in capsys.readouterr().err
