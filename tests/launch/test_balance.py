"""Experts that move between two ranks in the midst of generation; launched once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from msds import LLM
from msds.launch import Cluster, launch
from tests.launch.balance_entries import INTERVAL, OPTIONS, answers, traffic
from tests.models.mutants import shortened
from tests.models.test_expert_counts import counts, routing_of


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One MoE layer, whose router prefers experts that one rank holds at first."""
    folder = shortened(tiny("v3_base"), tmp_path_factory.mktemp("balanced") / "model", 1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate.e_score_correction_bias"][[2, 4, 6, 8]] += 0.2
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def found(folder: Path, logs: Path) -> list[dict[str, Any]]:
    """What each rank has written."""
    arguments = {"folder": str(folder), "plan": "tp2.ep2", "target": str(logs)}
    launch("tests.launch.balance_entries:balance_rank", arguments, Cluster(2), logs=logs)
    return [json.loads((logs / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[list[int]]]:
    """What one process answers, by first token."""
    llm = LLM(folder, **OPTIONS)
    return {first: answers(llm, first) for first in (100, 200, 300)}


def test_answers_are_those_of_one_process_during_and_after_swaps(
    found: list[dict[str, Any]], alone: dict[int, list[list[int]]]
) -> None:
    assert found[0]["answers"] == [alone[100], alone[200]]
    assert found[0]["first"]["rebalancings"] >= 1  # with requests under way: between two of the first round's steps


def test_counts_are_those_of_the_routing(found: list[dict[str, Any]], folder: Path) -> None:
    """Every token of every text once, but for the last of each answer, which is never computed."""
    texts = []
    for first, said in zip((100, 200), found[0]["answers"], strict=True):
        prompts, _ = traffic(first)
        texts += [prompt + answer[:-1] for prompt, answer in zip(prompts, said, strict=True)]
    want = counts([routing_of(folder, text)[0] for text in texts])
    np.testing.assert_array_equal(found[0]["counts"], [want])


def test_a_skewed_load_becomes_more_balanced(found: list[dict[str, Any]], logs: Path) -> None:
    first, now = found[0]["imbalance"]
    assert first > 1.3
    assert 1 <= now < 1.1
    assert found[0]["last"]["moves"] >= found[0]["last"]["rebalancings"] >= 1
    log = (logs / "rank-0.log").read_text()
    assert f"experts rebalanced: in {INTERVAL} steps the busiest rank of ep had" in log


def test_a_fault_of_one_rank_leaves_the_experts_of_all(
    found: list[dict[str, Any]], alone: dict[int, list[list[int]]], logs: Path
) -> None:
    """In the midst of the weights' exchange; what is answered then is what one process answers."""
    assert found[0]["refused"] == "experts of layers.0 stay where they are: another rank could not"
    assert found[0]["stayed"]
    assert found[0]["after"] == alone[300]
    log = (logs / "rank-1.log").read_text()
    assert "place_experts failed: experts of layers.0 stay where they are: 'NoneType'" in log


def test_all_ranks_agree_and_compiled_nothing_after_warm_up(found: list[dict[str, Any]]) -> None:
    assert [one["compiled"] for one in found] == [0, 0]
    assert found[0]["placements"] == found[1]["placements"]
