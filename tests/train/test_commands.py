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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("problems x.jsonl --count 0", "count is 0"),
        ("problems words.txt", "words.txt exists"),
        ("problems absent/x.jsonl", "absent/x.jsonl cannot be written: No such file"),
        ("train nowhere none.jsonl --run r --steps 1", "none.jsonl cannot be read"),
        ("train nowhere none.jsonl --run r --steps 0", "steps is 0"),
        ("train nowhere words.txt --run r --steps 1", "words.txt, line 1 is not JSON"),
        ("train nowhere bytes --run r --steps 1", "bytes is not text in UTF-8, from byte 1 on"),
        (
            "train nowhere words.txt --run r --steps 5 --warmup-steps 6",
            "warmup_steps 6 and decay_steps 0 do not fit into 5",
        ),
        (
            "train nowhere words.txt --run r --steps 5 --decay-steps 6 --data-parallel 2",
            "decay_steps 6 do not fit into 5",
        ),
        ("train nowhere words.txt --run r --steps 1 --temperature 2", "name a --teacher too"),
        ("train nowhere words.txt --run r/s --steps 1 --export r", "the export r would hold the run folder r/s"),
        ("reinforce nowhere number.jsonl --run r --rounds 1 --export r", "the export r would hold the run folder r"),
        ("evaluate nowhere none.jsonl", "none.jsonl cannot be read"),
        ("evaluate nowhere number.jsonl", "number.jsonl, line 1: answer is 12: it must be a string"),
        ("reinforce nowhere number.jsonl --run words.txt --rounds 1", "words.txt is a file"),
        ("reinforce nowhere number.jsonl --run words.txt/r --rounds 1", "words.txt is no folder"),
        ("init words.txt/folder", "words.txt is no folder"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("no JSON", "utf-8")
    Path("bytes").write_bytes(b"a\xff")
    Path("number.jsonl").write_text('{"messages": [{"role": "user", "content": "6 + 6?"}], "answer": 12}', "utf-8")
    assert run(*command.split()) == 2
    assert said in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"words.txt", "bytes", "number.jsonl"}
