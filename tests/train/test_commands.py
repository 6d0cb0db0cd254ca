"""The guide's way from nothing to a reinforced model, by commands alone, on a model a tenth of the tiny R1's size."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import msds.train
from msds.train.tiny_r1 import recipe
from msds.train.tiny_r1.problems import KINDS
from msds_serve.cli import _parser, main

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 16}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


SMALLER = {
    "problems": ("--count", 64),
    "train": ("--steps", 2, "--warmup-steps", 1, "--decay-steps", 0, "--batch-size", 4, "--lengths", 112),
    "reinforce": ("--rounds", 1, "--tasks-per-round", 2, "--group-size", 4, "--micro-batch", 8, "--max-tokens", 8),
    "evaluate": ("--max-tokens", 8, "--json"),
}
"""Said after what the guide says, so it is what counts."""


def guide() -> list[list[str]]:
    """The arguments of every `msds` command of the guide, in order."""
    text = Path(msds.train.__file__).with_name("README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("msds ")]


def test_the_guide_leads_from_nothing_to_a_reinforced_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands as they stand, but with fewer problems and steps."""
    monkeypatch.setattr(recipe, "CONFIG", recipe.CONFIG | SMALL)
    commands, reports = guide(), []
    training = next(command for command in commands if command[0] == "train")
    for command in commands:
        if command[0] in ("serve", "verify"):
            _parser().parse_args(command)
            continue
        capsys.readouterr()
        assert run(*command, *SMALLER.get(command[0], ())) == 0
        if command[0] == "evaluate":
            reports.append(json.loads(capsys.readouterr().out))
    assert [command[0] for command in commands] == [
        *("init", "problems", "problems", "problems", "train", "reinforce"),
        *("evaluate", "evaluate", "verify", "serve"),
    ]
    paired, cut = reports
    assert [score["kind"] for score in paired["scores"]] == [*KINDS, "all"]
    assert paired["scores"][-1]["count"] == cut["scores"][-1]["count"] == 64
    assert {"won", "lost", "p_value", "scores", "model"} == paired["baseline"].keys()
    assert json.loads(Path("tiny/r1/config.json").read_text())["torch_dtype"] == "bfloat16"

    again = [*training, *SMALLER["train"], "--steps", 4]
    assert run(*again) == 2  # before a step, and by name
    assert "tiny/supervised is not an empty folder" in capsys.readouterr().err
    assert run(*again, "--export", "tiny/longer") == 0
    log = [json.loads(line) for line in Path("tiny/supervised-run/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [2, 4]


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
