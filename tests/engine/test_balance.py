"""When experts are moved, and what is said of it; the runner is a stand-in that counts what it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from msds.config import read_config
from msds.engine.balance import LEAST_GAIN, BalanceStats, ExpertBalance, imbalance
from msds.errors import PlacementError
from msds.launch import Place
from msds.llm import LLM
from msds.models.specs.placement import ExpertPlacement, balance_experts
from msds.models.specs.rebalancing import count_arrivals, count_moves, rebalance_experts
from msds.options import EngineOptions
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan

RUNS = ExpertPlacement.contiguous(8, 2)
SPARE = balance_experts([1] * 8, 2, 5)


class Counting:
    """Two layers of eight experts on two ranks."""

    def __init__(self, placement: ExpertPlacement, start: int = 0) -> None:
        self.model = SimpleNamespace(placements=(placement, placement))
        self.total = np.full((2, 8), start, np.int64)
        self.placed = 0

    def expert_counts(self) -> Any:
        return self.total.astype(np.int32)  # wraps

    def place_experts(self, placements: Sequence[ExpertPlacement]) -> None:
        self.model.placements = tuple(placements)
        self.placed += 1

    def compute(self, balance: ExpertBalance, *counts: list[int]) -> None:
        self.total += np.array(counts)
        balance.after_step(self)  # type: ignore[arg-type]


HOT, EVEN, NONE = [9, 9, 9, 9, 1, 1, 1, 1], [3] * 8, [0] * 8


@pytest.mark.parametrize("placement", [RUNS, SPARE], ids=["none spare", "two spare"])
def test_a_skewed_load_is_evened_out(placement: ExpertPlacement, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "msds")
    runner, balance = Counting(placement), ExpertBalance(2)
    hot = [9 if expert not in placement.slots[1] else 1 for expert in range(8)]
    even = [2 * placement.tables()["num_replicas"][expert] for expert in range(8)]
    runner.compute(balance, hot, even)
    assert balance.stats == BalanceStats(None, 0, 0, 0)
    runner.compute(balance, hot, even)
    before = imbalance((placement, placement), np.array([hot, even]))
    assert balance.stats.imbalance == pytest.approx(before)
    assert (balance.stats.rebalancings, runner.placed) == (1, 1)
    assert runner.model.placements[1] is placement  # it was even already
    after = imbalance(runner.model.placements, np.array([hot, even]))
    assert 1 <= after < before
    (line,) = caplog.messages
    assert f"the busiest rank of ep had {before:.2f} times the mean load, and would have had {after:.2f}" in line
    assert f"{balance.stats.moves} of {4 * placement.slots_per_rank} slots changed" in line
    for _ in range(2):
        runner.compute(balance, hot, even)
    assert (balance.stats.rebalancings, runner.placed) == (1, 1)  # nothing is gained by more
    assert balance.stats.imbalance == pytest.approx(after)
    assert "experts stay" in caplog.messages[-1]


def test_counts_are_of_the_last_interval_alone() -> None:
    runner, balance = Counting(RUNS), ExpertBalance(1)
    runner.compute(balance, EVEN, EVEN)
    runner.compute(balance, HOT, EVEN)
    assert balance.stats.imbalance == pytest.approx(imbalance((RUNS, RUNS), np.array([HOT, EVEN])))


def test_counters_may_wrap() -> None:
    runner, balance = Counting(RUNS), ExpertBalance(1)
    runner.compute(balance, [2**31 - 2] * 8, [2**31 - 2] * 8)
    runner.compute(balance, HOT, HOT)
    assert balance.stats.imbalance == pytest.approx(36 / 20)


def test_a_little_skew_moves_nothing() -> None:
    runner, balance = Counting(RUNS), ExpertBalance(1)
    little = [50, 50, 50, 51, 49, 50, 50, 50]
    runner.compute(balance, little, little)
    assert balance.stats.imbalance == pytest.approx(201 / 200)
    assert runner.placed == 0


def test_a_layer_that_cannot_be_moved_is_said_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """The first layer moves, the second does not, until it can."""
    caplog.set_level(logging.INFO, "msds")
    runner, balance = Counting(RUNS), ExpertBalance(1)
    real = runner.place_experts

    def place(placements: Sequence[ExpertPlacement]) -> None:
        real((placements[0], RUNS))
        raise PlacementError("experts of layers.2 stay where they are: no memory")

    runner.place_experts = place  # type: ignore[method-assign]
    runner.compute(balance, HOT, HOT)
    assert runner.model.placements[0] != RUNS
    assert runner.model.placements[1] == RUNS
    moves = count_moves(RUNS, runner.model.placements[0])
    assert balance.stats == BalanceStats(1.8, 1, moves, 1)
    (error, said) = caplog.records
    assert error.levelno == logging.ERROR
    assert "layers.2 stay where they are: no memory" in error.getMessage()
    after = imbalance(runner.model.placements, np.array([HOT, HOT]))
    assert f"would have had {after:.2f}; {moves} of 16 slots changed" in said.getMessage()
    runner.place_experts = real  # type: ignore[method-assign]
    runner.compute(balance, HOT, HOT)
    assert balance.stats.failures == 1
    assert balance.stats.moves == 2 * moves


def test_anything_else_that_is_raised_ends_the_engine() -> None:
    runner, balance = Counting(RUNS), ExpertBalance(1)

    def place(placements: Sequence[ExpertPlacement]) -> None:
        raise RuntimeError("the ranks have lost each other")

    runner.place_experts = place  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        runner.compute(balance, HOT, HOT)


def test_experts_stay_on_their_machine_while_that_is_a_gain(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "msds")
    runs = ExpertPlacement.contiguous(8, 4)
    runner, balance = Counting(runs), ExpertBalance(1, nodes=2, groups=4)
    hot = [9, 9, 5, 5, 1, 1, 1, 1]  # the best of all would be a hot one and a cold one on each rank
    runner.compute(balance, hot, EVEN)
    assert count_arrivals(runs, runner.model.placements[0], 2) == 0
    assert ", 0 of them to an expert that their machine had not" in caplog.messages[0]
    runner.compute(balance, [9] * 4 + [1] * 4, EVEN)
    assert count_arrivals(runs, runner.model.placements[0], 2) == 4
    assert f", {4} of them to an expert that their machine had not" in caplog.messages[1]


def test_the_engine_knows_which_ranks_share_a_machine(tiny: Callable[..., Path]) -> None:
    """Four ranks of ep on two machines, and a router that keeps to two of four groups: first placement and later."""
    config = replace(read_config(tiny("v3_base")), n_group=4, topk_group=2)
    place = Place(0, 4, 2, ("localhost", 1), "secret")
    llm: Any = SimpleNamespace(
        options=EngineOptions(eplb_step_interval=1, num_redundant_experts=4),
        max_model_len=64,
        model=SimpleNamespace(config=config),
        _make_runner=lambda **_: SimpleNamespace(num_blocks=9, block_size=16, num_replicas=1),
        _ranks=Ranks(ShardPlan.parse("tp4.ep4")),
        _seqs_per_replica=2,
        _team=SimpleNamespace(place=place),
    )
    llm._num_machines = LLM._num_machines.fget(llm)  # type: ignore[attr-defined]
    first, *_ = LLM._placements(llm, config)
    assert first == balance_experts([1.0] * 16, 4, 5, nodes=2, groups=4)
    balance = LLM._build_engine(llm, 9)._balance
    assert balance is not None
    hot = [9, 9, 5, 5, *[1] * 12]
    wanted = rebalance_experts(first, hot, nodes=2, groups=4, least_gain=LEAST_GAIN)
    assert balance._rebalanced(first, hot) == wanted != rebalance_experts(first, hot, least_gain=LEAST_GAIN)


def test_steps_without_tokens_say_nothing() -> None:
    runner, balance = Counting(RUNS), ExpertBalance(1)
    runner.compute(balance, NONE, NONE)
    assert balance.stats == BalanceStats(None, 0, 0, 0)
    runner.compute(balance, HOT, NONE)  # a layer that nothing ran through stays as it is
    assert runner.model.placements[1] is RUNS
    assert runner.placed == 1
