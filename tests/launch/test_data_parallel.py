"""Two replicas train as one process does, and go on with what one process has left; launched once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msds.launch import Cluster, launch
from msds.train.state import LOG_NAME, STATE_NAME, read_state
from msds_serve.cli import main
from tests.launch.train_entries import train
from tests.reference.checkpoints import write_checkpoint
from tests.reference.variants import VARIANTS


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 of one MoE layer: each process compiles it."""
    base = VARIANTS["v3_all_moe"]
    sizes = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "n_routed_experts": 8, "vocab_size": 256}
    VARIANTS["v3_one_layer"] = replace(base, name="v3_one_layer", config=base.config | sizes)
    try:
        return write_checkpoint("v3_one_layer", tmp_path_factory.mktemp("small") / "model")
    finally:
        del VARIANTS["v3_one_layer"]


@pytest.fixture(scope="module")
def runs(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `one` and `two`, of one process and of two; `one-half` gone on with by two."""
    root = tmp_path_factory.mktemp("runs")
    train(str(small), root / "one")
    shutil.copytree(root / "one-half", root / "mixed")
    arguments = {"model": str(small), "folder": str(root / "two"), "half": str(root / "mixed")}
    launch("tests.launch.train_entries:train_rank", arguments, Cluster(2), logs=root / "logs")
    return root


def state(folder: Path) -> dict[str, Any]:
    return read_state(folder / STATE_NAME)[0]


@pytest.mark.parametrize(
    ("here", "there"), [("one-half", "two-half"), ("one", "two"), ("one", "mixed")], ids=["one step", "two", "resumed"]
)
def test_two_replicas_are_one_process(runs: Path, here: str, there: str) -> None:
    """Parameters and moments; after one step the first moment is the gradient, but for a factor."""
    ours, theirs = state(runs / there), state(runs / here)
    assert ours.keys() == theirs.keys()
    assert any(np.abs(array).max() > 0 for name, array in ours.items() if name.startswith("first."))
    for name, want in theirs.items():
        np.testing.assert_allclose(ours[name], want, rtol=0, atol=1e-6 * max(np.abs(want).max(), 1e-12), err_msg=name)


def test_the_log_is_that_of_one_process(runs: Path) -> None:
    one, two = (
        [json.loads(line) for line in (runs / name / LOG_NAME).read_text().splitlines()] for name in ("one", "two")
    )
    assert len(one) == len(two) == 2  # one rank writes
    for ours, theirs in zip(two, one, strict=True):
        for name in ours.keys() - {"tokens_per_second"}:
            assert ours[name] == pytest.approx(theirs[name], abs=2e-5), name


def test_what_does_not_divide_is_refused_before_launching(capsys: pytest.CaptureFixture[str]) -> None:
    training = ["train", "nowhere", "none.jsonl", "--run", "r", "--steps", "1", "--batch-size", "4"]
    assert main([*training, "--data-parallel", "3"]) == 2
    assert "a batch of 4 does not divide" in capsys.readouterr().err
    assert main([*training, "--data-parallel", "0"]) == 2
    assert "data_parallel is 0" in capsys.readouterr().err
    assert main([*training, "--nodes", "2"]) == 2
    assert "--nodes is for several processes: give --data-parallel too" in capsys.readouterr().err
