"""From a demand to a report: choose or check a plan, count its bytes, estimate its speed, say what would help."""

from __future__ import annotations

from collections.abc import Iterator

from msds.errors import OptionError
from msds.models.specs.rules import is_executed
from msds.planning.collectives import exchange_refusal
from msds.planning.cpu_graphs import BESIDE_BYTES
from msds.planning.demand import Demand, num_experts
from msds.planning.memory import Ledger
from msds.planning.remedies import remedies
from msds.planning.report import PlanReport
from msds.planning.search import Candidate, evaluate, rank_plans
from msds.planning.speed import compare, estimate_speed
from msds.planning.units import sized
from msds_graphs.sharding import ShardPlan


def make_plan(demand: Demand, plan: str = "auto") -> PlanReport:
    """The report on one plan, or on the best of all with "auto".

    OptionError where the plan is illegal, with the reason, or where no plan is legal.
    """
    others: tuple[Candidate, ...] = ()
    if plan == "auto":
        ranked = rank_plans(demand)
        chosen, others = ranked[0], tuple(ranked[1:])
        if chosen.status == "illegal":
            raise OptionError(f"no plan cuts {demand.model} for mesh {demand.mesh}: the first says {chosen.reason}")
    else:
        chosen = evaluate(demand, ShardPlan.parse(plan))
        if chosen.status == "illegal":
            raise OptionError(f"plan {chosen.plan} for {demand.model} on {demand.mesh}: {chosen.reason}")
    ledger = Ledger(demand, chosen.plan)
    most = ledger.most_texts()
    is_auto = plan == "auto"
    is_answer = chosen.status == "fits" and (is_executed(chosen.plan) or not is_auto)
    texts = demand.texts if demand.concurrency is not None else max(1, min(demand.texts, most))
    speed = estimate_speed(ledger, texts)
    memory = chosen.memory
    assert memory is not None
    return PlanReport(
        demand=demand,
        plan=chosen.plan,
        memory=memory,
        total_bytes=ledger.total_bytes(memory.num_blocks),
        most_texts=most,
        longest_text=ledger.longest_text(),
        speed=speed,
        comparisons=compare(ledger, speed, most),
        others=others,
        remedies=() if is_answer else remedies(demand, chosen, is_auto=is_auto),
        notes=tuple(_notes(demand, chosen)),
    )


def _way_to_experts(demand: Demand, plan: ShardPlan) -> str:
    bucket = {"S": plan.replica_share(demand.texts), "Q": 1 + demand.mtp}
    refusal = exchange_refusal(demand, plan, bucket)
    if refusal:
        return f"replicas gather each other's tokens for the experts, since {refusal}"
    return "decode sends tokens to their experts by operators of Ascend, which were compiled but never run"


def _notes(demand: Demand, chosen: Candidate) -> Iterator[str]:
    plan, memory = chosen.plan, chosen.memory
    assert memory is not None
    has_experts = num_experts(demand.config) > 0
    if not demand.is_cpu or demand.mesh.ranks > 1:
        yield (
            "msds serve runs dp, tp and ep over CPU processes in float32 today, not pp"
            + ("" if demand.is_cpu else ", and nothing was run on an NPU")
        )
    if not is_executed(plan):
        yield f"{plan.pp} pipeline stages are planned, not executed: a choice only where no plan without them fits"
    if demand.mesh.ranks > 1:
        yield (
            "which messages a step has, and their bytes, are those of the functions"
            + (f": {_way_to_experts(demand, plan)}" if plan.dp > 1 and has_experts else "")
            + "; their seconds, and all others, are estimates"
        )
    if demand.texts % plan.dp:
        together = plan.replica_share(demand.texts) * plan.dp
        yield (
            f"{plan.dp} replicas decode as many texts each: shapes are those of --max-num-seqs {together}, which "
            "msds serve takes in multiples of dp"
        )
    if demand.balances:
        slots, experts = demand.num_slots, num_experts(demand.config)
        yield (
            f"experts are balanced: {slots // plan.ep} slots of a rank in each MoE layer for {slots} over ep = "
            f"{plan.ep}, {slots - experts} more than experts; they are counted in every step"
        )
    if has_experts:
        yield "routing is taken as even: each rank waits for the mean, not for the busiest of them"
    if demand.quant != "none":
        yield f"quantised execution does not exist here yet: {demand.quant} is a plan for when it does"
    if not demand.is_cpu:
        yield (
            f"{demand.mesh.hardware.note}; the budget is {demand.memory_fraction:.0%} of the memory, the rest is left "
            "to driver, runtime and fragmentation"
        )
        yield "activations presume fused attention and grouped expert products on NPUs, which do not exist here yet"
    else:
        yield (
            f"the budget is memory_fraction = {demand.memory_fraction:g} of what is free on this machine; activations "
            "and graphs come from the rest"
        )
        if demand.mesh.ranks > 1:
            yield (
                f"beside the processes of the ranks two more launch them and let them find each other: "
                f"{sized(BESIDE_BYTES)} together, not counted above"
            )
        rest = demand.memory_bytes - memory.budget
        if memory.other_bytes > rest:
            yield (
                f"activations and graphs may take {sized(memory.other_bytes)}, the rest is {sized(rest)}: lower "
                "--max-model-len, or prefill_chunk and memory_fraction when serving"
            )
    vocab = demand.config.vocab_size
    if vocab % plan.tp:
        rows = -(-vocab // plan.tp) * plan.tp
        yield f"the vocabulary of {vocab} is padded to {rows} rows for tp = {plan.tp}: {rows - vocab} rows of zeros"
