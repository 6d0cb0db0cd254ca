"""All plans of a mesh: which are illegal, which do not fit, and how the others compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from msds.models.specs.rules import is_executed
from msds.planning.cost import StepTime, decode_time
from msds.planning.demand import Demand, num_experts
from msds.planning.memory import Ledger, RankMemory
from msds.planning.units import sized
from msds_graphs.errors import GraphError
from msds_graphs.sharding import ShardPlan


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan. status: "fits", "too large" or "illegal". reason: why it is not the first, or "" for the first.

    memory and decode are None where it is illegal.
    """

    plan: ShardPlan
    status: str
    reason: str
    memory: RankMemory | None = None
    decode: StepTime | None = None


def all_plans(demand: Demand) -> Iterator[ShardPlan]:
    """Every way to write the mesh as pp * dp * tp, with every ep that divides dp * tp (1 without experts)."""
    ranks = demand.mesh.ranks
    for pp in _divisors(ranks):
        for tp in _divisors(ranks // pp):
            dp = ranks // pp // tp
            for ep in _divisors(dp * tp) if num_experts(demand.config) else (1,):
                yield ShardPlan(dp=dp, tp=tp, ep=ep, pp=pp)


def evaluate(demand: Demand, plan: ShardPlan) -> Candidate:
    """One plan on its own."""
    try:
        ledger = Ledger(demand, plan)
    except GraphError as error:
        return Candidate(plan=plan, status="illegal", reason=str(error))
    memory = ledger.planned()
    decode = decode_time(ledger, demand.texts, demand.max_model_len)
    missing = memory.needed - memory.budget
    reason = f"{sized(missing)} too large" if missing > 0 else ""
    return Candidate(
        plan=plan, status="fits" if missing <= 0 else "too large", reason=reason, memory=memory, decode=decode
    )


def rank_plans(demand: Demand) -> list[Candidate]:
    """All plans, best first: those that fit by estimated seconds of a decode step, then by bytes; then those that are
    too large, by how much; then the illegal ones. Among those that fit, and among those that do not, the plans that the
    functions run come before those with pipeline stages, which they do not."""
    found = [evaluate(demand, plan) for plan in all_plans(demand)]
    fitting = [item for item in found if item.status == "fits"]
    large = [item for item in found if item.status == "too large"]
    fitting.sort(key=_speed)
    large.sort(key=_size)
    if fitting:
        best = fitting[0]
        fitting = [best, *(_compared(item, best) for item in fitting[1:])]
    return [*fitting, *large, *(item for item in found if item.status == "illegal")]


def best_plan(demand: Demand) -> Candidate:
    """The first of `rank_plans`, without looking at plans of stages where one without them fits."""
    found = [evaluate(demand, plan) for plan in all_plans(demand) if is_executed(plan)]
    fitting = [item for item in found if item.status == "fits"]
    return min(fitting, key=_speed) if fitting else rank_plans(demand)[0]


def _size(item: Candidate) -> tuple[bool, float, int, int]:
    """Whether it cannot be run; bytes to two digits, then whole experts, then bytes."""
    assert item.memory is not None
    needed = item.memory.needed
    return not is_executed(item.plan), float(f"{needed:.2g}"), _experts_cut_into(item.plan), needed


def _speed(item: Candidate) -> tuple[bool, float, int, int]:
    """Whether it cannot be run; seconds to two digits, which is more than the estimate is worth; then whole experts,
    then fewer bytes."""
    assert item.decode is not None
    assert item.memory is not None
    seconds = float(f"{item.decode.seconds:.2g}")
    return not is_executed(item.plan), seconds, _experts_cut_into(item.plan), item.memory.needed


def _experts_cut_into(plan: ShardPlan) -> int:
    return plan.stage_ranks // plan.ep


def _compared(item: Candidate, best: Candidate) -> Candidate:
    """With the cause of the largest part of its delay, or why it comes later although it is as fast."""
    assert item.decode is not None
    assert best.decode is not None
    mine, theirs = item.decode.causes, best.decode.causes
    cause = max(mine, key=lambda name: mine[name] - theirs.get(name, 0.0))
    factor = item.decode.seconds / best.decode.seconds
    if not is_executed(item.plan) and is_executed(best.plan):
        reason = f"{factor:.2f} x as long, but its pipeline stages are planned, not executed"
    elif _speed(item)[1] > _speed(best)[1]:
        reason = (
            f"{factor:.2f} x as long: {cause} {mine[cause] * 1e3:.1f} ms instead of {theirs.get(cause, 0) * 1e3:.1f}"
        )
    elif _speed(item)[2] > _speed(best)[2]:
        reason = f"as fast within the estimate, but cuts each expert into {_experts_cut_into(item.plan)}"
    else:
        reason = "as fast within the estimate, but takes no fewer bytes"
    return replace(item, reason=reason)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
