"""Counted experts: what the steps of a runner count is how NumPy routes the same tokens, and no padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msds
from msds.engine.batch import Row
from msds.engine.runner import Runner
from msds_graphs.plan import Plan
from tests.models.compare import IDS, Array
from tests.models.mutants import shortened
from tests.reference import numpy_deepseek
from tests.reference.checkpoints import read_config, to_numpy_tensors

LENGTHS = (7, 3)
TEXTS = (IDS[:8].tolist(), IDS[8:12].tolist())
TABLES = ([1, 2], [3, 4])


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MoE layer and an MTP layer."""
    return shortened(tiny("v3_base"), tmp_path_factory.mktemp("counted") / "model", 1)


def routing_of(folder: Path, text: list[int]) -> list[Array]:
    """The experts [T, K] of every token in each MoE layer by NumPy, then those of the MTP layer [T - 1, K]."""
    tensors, config = to_numpy_tensors(folder), read_config(folder)
    seen: list[Array] = []
    gate = numpy_deepseek.gate
    with pytest.MonkeyPatch.context() as patch:

        def recorded(*arguments: Any) -> Any:
            result = gate(*arguments)
            seen.append(result[0])
            return result

        patch.setattr(numpy_deepseek, "gate", recorded)
        hidden = numpy_deepseek.forward(tensors, config, text)["hidden"]
        numpy_deepseek.mtp(tensors, config, hidden[:-1], text[1:], np.arange(1, len(text)))
    return seen


def counts(chosen: list[Array], experts: int = 16) -> Array:
    """How often each expert was chosen."""
    return np.bincount(np.concatenate(chosen).reshape(-1), minlength=experts)


@pytest.mark.parametrize("writer", ["portable", "reference"])
def test_counts_are_those_of_the_routing(folder: Path, writer: str) -> None:
    main, ahead = zip(*(routing_of(folder, text) for text in TEXTS), strict=True)
    model = msds.load(folder, mtp=True, plan=Plan((("cache_write", writer),)), progress=False)
    runner = Runner(
        model,
        num_blocks=5,
        block_size=8,
        prefill_buckets=[{"S": 3, "Q": 8, "B": 2}],
        decode_buckets=[{"S": 3, "Q": 1, "B": 2}],
        num_drafts=1,
        counts_experts=True,
    )
    runner.warm_up(None)
    assert not runner.expert_counts().any()
    first = runner.prefill(
        [Row(text[:length], 0, table) for text, length, table in zip(TEXTS, LENGTHS, TABLES, strict=True)]
    )
    before = runner.expert_counts()
    np.testing.assert_array_equal(before[0], counts([chosen[:-1] for chosen in main]))
    assert before[0].sum() == sum(LENGTHS) * 3
    assert not before[1].any()
    states = [first.hidden[i, length - 1] for i, length in enumerate(LENGTHS)]
    rows = [
        Row(text[-1:], length, table, state)
        for text, length, table, state in zip(TEXTS, LENGTHS, TABLES, states, strict=True)
    ]
    runner.draft(rows)
    runner.decode(rows)
    np.testing.assert_array_equal(runner.expert_counts(), [counts(main), counts([chosen[-1:] for chosen in ahead])])
    assert not np.array_equal(before, runner.expert_counts())  # a copy


def test_nothing_is_counted_unless_asked_for(folder: Path) -> None:
    model = msds.load(folder, mtp=False, progress=False)
    bucket = [{"S": 1, "Q": 8, "B": 1}]
    runner = Runner(model, num_blocks=2, block_size=8, prefill_buckets=bucket, decode_buckets=bucket)
    assert "expert_counts" not in runner.cache
