"""A model on two ranks whose experts move while it generates: what it says, what was counted, what was compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msds import LLM, SamplingParams, experts
from msds.engine.balance import imbalance
from msds.engine.ranks import follow
from msds.errors import PlacementError
from msds.launch import Place
from msds.launch.team import Follower, Leader
from msds.models.specs.placement import ExpertPlacement
from msds_graphs.collectives import create_groups
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan

OPTIONS: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2, "progress": False}
INTERVAL, REDUNDANT = 6, 2


def traffic(first: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """What several requests ask; no two begin alike, so no token is found cached."""
    prompts = [[first + index, *range(9, 29)] for index in range(4)]
    limits: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
    sampling = [
        SamplingParams(temperature=0.0, **limits),
        SamplingParams(temperature=1.0, seed=3, **limits),
        SamplingParams(temperature=1.0, seed=4, **limits),
        SamplingParams(temperature=0.0, **limits),
    ]
    return prompts, sampling


def answers(llm: LLM, first: int) -> list[list[int]]:
    """The token ids of every answer."""
    outputs = llm.generate(*traffic(first))
    assert all(output.error is None for output in outputs)
    return [list(output.token_ids) for output in outputs]


def compiled_later(llm: LLM) -> int:
    """Graphs beyond those of warm-up."""
    runner = llm.engine.runner
    return runner.num_compiled - sum(len(step.buckets) for step in runner.steps.values())


def turned(placement: ExpertPlacement) -> ExpertPlacement:
    """What each rank has, on the other end of the ranks."""
    return ExpertPlacement(placement.num_experts, placement.slots[::-1])


def break_moves() -> None:
    """This rank cannot take the second projection of experts whose placement is turned round; the first has come."""
    real = experts._exchange

    def exchange(held: Any, coming: Any, empty: Any, old: Any, new: Any, ranks: Ranks) -> Any:
        broken = coming | {"up_proj": None} if new == turned(old) else coming
        return real(held, broken, empty, old, new, ranks)

    experts._exchange = exchange


def balance_rank(place: Place, folder: str, plan: str, target: str) -> None:
    """Both ranks write what they compiled after warm-up, rank 0 also what it said and counted."""
    ranks = Ranks(ShardPlan.parse(plan), place.rank)
    create_groups(ranks)
    options = OPTIONS | {"ranks": ranks, "eplb_step_interval": INTERVAL, "num_redundant_experts": REDUNDANT}
    if place.rank:
        break_moves()
        follower = Follower(place)
        llm = LLM(folder, team=follower, **options)
        follow(llm.engine.runner, follower)
        _write(target, place.rank, {"compiled": compiled_later(llm), "placements": _slots(llm)})
        place.leave()
    leader = Leader(place, timeout=300.0, on_failure=place.fail)
    llm = LLM(folder, team=leader, warm_up=True, **options)
    runner, initial = llm.engine.runner, llm.model.placements
    found: dict[str, Any] = {"answers": [answers(llm, 100)], "first": vars(llm.engine.balance)}
    counted = runner.expert_counts()
    found["answers"].append(answers(llm, 200))
    total = runner.expert_counts()
    found |= {"counts": total.tolist(), "last": vars(llm.engine.balance), "compiled": compiled_later(llm)}
    found["imbalance"] = [imbalance(at, (total - counted)) for at in (initial, llm.model.placements)]
    before = _slots(llm)
    try:
        runner.place_experts([turned(placement) for placement in llm.model.placements])
    except PlacementError as error:
        found |= {"refused": str(error), "stayed": before == _slots(llm), "after": answers(llm, 300)}
    found["compiled"] = compiled_later(llm)
    _write(target, place.rank, found | {"placements": _slots(llm)})
    leader.stop()
    place.leave()


def _slots(llm: LLM) -> list[Any]:
    return [placement.slots for placement in llm.model.placements]


def _write(target: str, rank: int, found: dict[str, Any]) -> None:
    Path(target, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
