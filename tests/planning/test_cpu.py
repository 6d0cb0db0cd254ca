"""On a CPU the plan is what LLM does: the same bytes, counted on the arrays that a tiny model really has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msds import LLM, load
from msds.models.specs import tree_bytes
from msds.models.specs.parts import spread_experts
from msds.options import EngineOptions
from msds.planning import make_demand, make_plan
from msds.pretrained import DEFAULT_MODEL, TINY_R1
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan
from msds_graphs.trees import tree_flatten

Tiny = Callable[..., Path]


def allocated(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_flatten(tree)[0])


FAMILIES = ["v3_base", "v2_lite", "qwen2_base", "llama_tied", TINY_R1]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tiny: Tiny) -> Path:
    """A tiny checkpoint by its variant, or the model that ships with the package."""
    return DEFAULT_MODEL if request.param == TINY_R1 else tiny(request.param)


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_planned_bytes_are_allocated_bytes(folder: Path) -> None:
    """Weights with what is derived from them, and the cache: to the byte, in the type that the engine uses."""
    memory = make_plan(make_demand(str(folder), "cpu:1", max_model_len=100)).memory
    llm = LLM(folder, max_model_len=100)
    assert memory.weight_bytes == allocated(llm.model.params)
    assert memory.cache_bytes == allocated(llm.engine.runner.cache)
    assert memory.num_blocks == llm.engine.runner.num_blocks == 1 + 8 * 7


CUTS = [(name, plan) for name in FAMILIES for plan in ("tp2", "dp2")]
CUTS += [(name, plan) for name in ("v3_base", "v2_lite", TINY_R1) for plan in ("tp2.ep2", "dp2.ep2")]


@pytest.mark.parametrize(("folder", "plan"), CUTS, indirect=["folder"])
def test_planned_bytes_are_those_that_each_rank_loads(folder: Path, plan: str) -> None:
    """To the byte on every rank, since padded parts are held as they are planned."""
    shards = ShardPlan.parse(plan)
    demand = make_demand(str(folder), "cpu:2", max_model_len=100)
    memory = make_plan(demand, plan).memory
    for rank in range(2):
        model = load(folder, ranks=Ranks(shards, rank), mtp=False)
        assert allocated(model.params) == memory.weight_bytes
        cache = model.cache_spec(memory.num_blocks, demand.engine.block_size)
        assert tree_bytes(cache) == memory.cache_bytes


@pytest.mark.parametrize(("plan", "redundant"), [("tp2.ep2", 2), ("dp2.ep2", 0)])
@pytest.mark.parametrize("mtp", [0, 1])
def test_balanced_experts_are_planned_as_each_rank_loads_them(tiny: Tiny, plan: str, redundant: int, mtp: int) -> None:
    """Slots, tables and counters, to the byte; and the engine leaves as much to its cache."""
    folder, shards = tiny("v3_base"), ShardPlan.parse(plan)
    balancing = {"eplb_step_interval": 10, "num_redundant_experts": redundant}
    demand = make_demand(str(folder), "cpu:2", max_model_len=100, mtp=mtp, **balancing)
    memory = make_plan(demand, plan).memory
    placements = spread_experts(demand.config, shards, redundant)
    for rank in range(2):
        model = load(folder, ranks=Ranks(shards, rank), mtp=mtp > 0, placements=placements)
        counters = model.expert_counts_spec().nbytes
        assert allocated(model.params) + counters == memory.weight_bytes
        assert memory.weights["balancing"] > counters > 0
        llm: Any = SimpleNamespace(options=EngineOptions(**balancing), _ranks=Ranks(shards, rank))
        assert LLM._held_bytes(llm, demand.config, placements) == memory.weight_bytes


def test_drafts_are_planned_as_they_are_allocated(tiny: Tiny) -> None:
    """The MTP layer's weights and its page of the cache."""
    folder = tiny("v3_base")
    memory = make_plan(make_demand(str(folder), "cpu:1", max_model_len=100, mtp=2)).memory
    llm = LLM(folder, max_model_len=100, num_speculative_tokens=2)
    assert memory.weight_bytes == allocated(llm.model.params)
    assert memory.cache_bytes == allocated(llm.engine.runner.cache)
    assert memory.num_blocks == llm.engine.runner.num_blocks == 1 + 8 * 7


def test_scarce_memory_gives_the_same_number_of_blocks(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("llama_base")
    plenty = make_plan(make_demand(str(folder), "cpu:1", max_model_len=100)).memory
    free = int((plenty.weight_bytes + 20.5 * plenty.block_bytes) / 0.8) + 1
    for module in ("msds.llm", "msds.planning.demand"):
        monkeypatch.setattr(f"{module}.free_memory_bytes", lambda: free)
    report = make_plan(make_demand(str(folder), "cpu:1", max_model_len=100))
    assert report.fits
    assert report.memory.num_blocks == LLM(folder, max_model_len=100).engine.runner.num_blocks == 20
    assert report.most_texts == 2  # 19 blocks are two texts of seven


def test_a_model_that_llm_refuses_does_not_fit(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: 1 << 20)
    report = make_plan(make_demand("r1-distill-qwen-1.5b", "cpu:1"))
    assert not report.fits
    assert report.memory.budget == int(0.8 * (1 << 20))
    assert report.memory.weight_bytes == 1_777_088_000 * 4  # its parameters in float32


def test_processes_share_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: 1 << 36)
    assert make_plan(make_demand("r1-distill-llama-8b", "cpu:4")).memory.budget == int(0.8 * (1 << 34))


def test_a_tenth_of_a_gibibyte_too_little_is_named_with_two_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 8B in float32 and one text of 131,072 tokens."""
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: 1 << 40)
    one = make_plan(make_demand("r1-distill-llama-8b", "cpu:1", max_model_len=131072, concurrency=1)).memory.needed
    free = int((one - 0.1 * 2**30) / 0.8)
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: free)
    report = make_plan(make_demand("r1-distill-llama-8b", "cpu:1", max_model_len=131072))
    assert not report.fits
    assert report.memory.needed == one
    assert "short of 0.100" in report.render()
    shorter, more = report.remedies
    per_token = 2 * 8 * 128 * 4 * 32
    missing = -(-(report.memory.needed - report.memory.budget) // (16 * per_token)) * 16
    assert shorter.change == f"--max-model-len {131072 - missing}, a text per replica"
    assert shorter.fits
    assert more.change == f"{one / 0.8 / 2**30:.2f} GiB of free memory"


def test_memory_that_must_be_free_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: 1 << 34)
    report = make_plan(make_demand("deepseek-v3", "cpu:2"))
    text = report.render()
    needed, (memory,) = report.memory.needed / 2**30, report.remedies
    assert f"or {2 * needed / 0.8:.2f} GiB of free memory on this machine: 2 x {needed:,.1f} GiB are 80% of it" in text
    assert not memory.is_option
    assert "would need" not in text
    assert "nothing else that helps was found" in text
