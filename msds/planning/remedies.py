"""What would make a plan fit, each with its own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from msds.planning.demand import Demand
from msds.planning.memory import Ledger
from msds.planning.quantised import SCHEMES
from msds.planning.search import Candidate, evaluate, rank_plans

MOST_RANKS = 1024
"""No larger mesh is suggested."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """change: what to ask for instead. plan: the best one then. needed and budget: bytes of its fullest rank."""

    change: str
    plan: str
    needed: int
    budget: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.budget


def remedies(demand: Demand, chosen: Candidate) -> tuple[Remedy, ...]:
    """For a plan that does not fit: another plan, int8 weights, less to hold, a larger mesh. Those that do not help
    enough are listed too, for the schemes, so that nobody has to try them."""
    return tuple(_remedies(demand, chosen))


def _remedies(demand: Demand, chosen: Candidate) -> Iterator[Remedy]:
    best = rank_plans(demand)[0]
    if best.plan != chosen.plan and best.status == "fits":
        yield _remedy(f"--plan {best.plan}", best)
    if demand.quant == "none" and not demand.is_cpu:
        for scheme in SCHEMES[1:]:
            yield _remedy(f"--quant {scheme}", rank_plans(replace(demand, quant=scheme))[0])
    if demand.engine.num_redundant_experts:
        without = replace(demand, engine=replace(demand.engine, num_redundant_experts=0))
        yield _remedy("--num-redundant-experts 0", evaluate(without, chosen.plan))
    yield from _less(demand, chosen)
    if demand.is_cpu:
        yield _more_memory(demand, chosen)
        return
    mesh = demand.mesh.larger()
    while mesh.ranks <= MOST_RANKS:
        found = rank_plans(replace(demand, mesh=mesh))[0]
        if found.status == "fits":
            yield _remedy(f"--mesh {mesh}", found)
            return
        mesh = mesh.larger()


def _less(demand: Demand, chosen: Candidate) -> Iterator[Remedy]:
    """Fewer or shorter texts, where the weights leave room for any."""
    ledger = Ledger(demand, chosen.plan)
    texts, length = ledger.most_texts(), ledger.longest_text()
    if demand.concurrency is not None and 0 < texts < demand.concurrency:
        yield _remedy(f"--concurrency {texts}", chosen, ledger, texts, demand.max_model_len)
    if not texts and length:
        yield _remedy(f"--max-model-len {length}, a text per replica", chosen, ledger, chosen.plan.dp, length)


def _more_memory(demand: Demand, chosen: Candidate) -> Remedy:
    """What must be free on this machine, of which memory_fraction is planned with."""
    assert chosen.memory is not None
    needed = chosen.memory.needed
    free = math.ceil(needed / demand.memory_fraction) * demand.mesh.ranks
    change = f"{free / 2**30:.2f} GiB of free memory"
    return Remedy(change=change, plan=str(chosen.plan), needed=needed, budget=needed)


def _remedy(change: str, found: Candidate, ledger: Ledger | None = None, texts: int = 0, length: int = 0) -> Remedy:
    memory = found.memory
    if ledger is not None:
        memory = ledger.fullest(ledger.plan.replica_share(texts), length)
    assert memory is not None
    return Remedy(change=change, plan=str(found.plan), needed=memory.needed, budget=memory.budget)
