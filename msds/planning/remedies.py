"""What would make a plan fit, each with its own arithmetic. Plans that are executed come before those that are not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from msds.models.specs.rules import is_executed
from msds.planning.demand import Demand, make_demand
from msds.planning.memory import Ledger
from msds.planning.quantised import SCHEMES
from msds.planning.search import Candidate, all_plans, best_plan, evaluate
from msds_graphs.errors import GraphError
from msds_graphs.mesh import Mesh

MOST_SUGGESTED_RANKS = 1024
"""No larger mesh is suggested."""
LEAST_TOKENS = 128
"""No shorter text is suggested: a question and its answer need as many."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """change: what to ask for instead. plan: the best one then. needed and budget: bytes of its fullest rank.
    executed: whether the model functions run that plan. is_option: whether the change is one of the command line."""

    change: str
    plan: str
    needed: int
    budget: int
    executed: bool
    is_option: bool = True

    @property
    def fits(self) -> bool:
        return self.needed <= self.budget

    @property
    def works(self) -> bool:
        """Whether it fits with a plan that is executed."""
        return self.fits and self.executed


def remedies(demand: Demand, chosen: Candidate, *, is_auto: bool) -> tuple[Remedy, ...]:
    """For a plan that does not fit, or that was chosen although it is not executed: another plan, less to hold, int8
    weights, a larger mesh, and more than one of them where one is not enough. First what works. Schemes that do not
    help enough are listed too, so that nobody has to try them."""
    found = list(_single(demand, chosen, is_auto=is_auto))
    if not demand.is_cpu:
        found += _larger_mesh(demand)
    if not any(remedy.works for remedy in found):
        found += _several(demand)
    if not is_auto:
        found = [_with_plan(remedy, chosen) for remedy in found]
    if demand.is_cpu and chosen.status != "fits":
        found.append(_more_memory(demand, chosen))
    return tuple(sorted(found, key=lambda remedy: (not remedy.works, not remedy.fits)))


def _with_plan(remedy: Remedy, chosen: Candidate) -> Remedy:
    """Named with its plan, where another one was asked for: the change is to be typed as it stands."""
    if remedy.plan == str(chosen.plan) or "--plan" in remedy.change:
        return remedy
    return replace(remedy, change=f"{remedy.change} --plan {remedy.plan}")


def _single(demand: Demand, chosen: Candidate, *, is_auto: bool) -> Iterator[Remedy]:
    """Changes of one thing, on the same mesh."""
    if not is_auto and (best := best_plan(demand)).status == "fits" and best.plan != chosen.plan:
        yield _remedy(f"--plan {best.plan}", best)
    yield from _less(demand, chosen, is_auto=is_auto)
    if demand.quant == "none" and not demand.is_cpu:
        for scheme in SCHEMES[1:]:
            yield _remedy(f"--quant {scheme}", best_plan(replace(demand, quant=scheme)))
    if demand.engine.num_redundant_experts:
        without = replace(demand, engine=replace(demand.engine, num_redundant_experts=0))
        yield _remedy("--num-redundant-experts 0", evaluate(without, chosen.plan))


def _less(demand: Demand, chosen: Candidate, *, is_auto: bool) -> Iterator[Remedy]:
    """The most texts, and the longest, that fit: with any plan that is executed, or with the one that was asked for."""
    ledgers = list(_ledgers(demand)) if is_auto else [Ledger(demand, chosen.plan)]

    def planned(changed: Demand) -> Candidate:
        return best_plan(changed) if is_auto else evaluate(changed, chosen.plan)

    # a number that was asked for is met by the whole process where it can be, else by what the engine would take
    texts = max((ledger.most_texts(whole=True) for ledger in ledgers), default=0)
    texts = texts or max((ledger.most_texts() for ledger in ledgers), default=0)
    if demand.concurrency is not None and 0 < texts < demand.concurrency:
        yield _remedy(f"--concurrency {texts}", planned(replace(demand, concurrency=texts)))
    length = max((_longest(ledger) for ledger in ledgers), default=0)
    if LEAST_TOKENS <= length < demand.max_model_len:
        what = f"--max-model-len {length}" + ("" if demand.concurrency is not None else ", a text per replica")
        yield _remedy(what, planned(replace(demand, max_model_len=length)))


def _longest(ledger: Ledger) -> int:
    """Tokens that the texts which are asked for may have: one per replica where no number was given."""
    asked = ledger.demand.concurrency
    return ledger.longest_text() if asked is None else ledger.longest_text(ledger.plan.replica_share(asked), whole=True)


def _larger_mesh(demand: Demand) -> Iterator[Remedy]:
    """The smallest larger mesh that is enough; and with int8 weights, where a smaller one is and they alone are not."""
    meshes = list(_meshes(demand.mesh))
    larger = [replace(demand, mesh=mesh) for mesh in meshes[1:]]
    plain = next((changed for changed in larger if _fits(changed)), None)
    if plain is not None:
        yield _remedy(f"--mesh {plain.mesh}", best_plan(plain))
    if demand.quant != "none":
        return
    int8 = [replace(demand, mesh=mesh, quant=SCHEMES[1]) for mesh in meshes]
    least = next((changed for changed in int8 if _fits(changed)), None)
    if least is None or least.mesh == demand.mesh or (plain is not None and plain.mesh.ranks <= least.mesh.ranks):
        return
    yield _remedy(f"--quant {SCHEMES[1]} --mesh {least.mesh}", best_plan(least))


def _several(demand: Demand) -> Iterator[Remedy]:
    """Fewer texts, and if that is not enough shorter ones too, on the smallest mesh that holds any, with int8 weights
    where that is smaller."""
    schemes = ("none", SCHEMES[1]) if demand.quant == "none" and not demand.is_cpu else (demand.quant,)
    for mesh in [demand.mesh] if demand.is_cpu else _meshes(demand.mesh):
        for quant in schemes:
            changed = replace(demand, mesh=mesh, quant=quant)
            ledgers = list(_ledgers(changed))
            texts = max((ledger.most_texts() for ledger in ledgers), default=0)
            length = demand.max_model_len
            if not texts:
                texts = 1
                length = max((ledger.longest_text() for ledger in ledgers), default=0)
            if length < LEAST_TOKENS:
                continue
            texts = min(texts, demand.concurrency or texts)
            options = {
                "--quant": (quant, demand.quant),
                "--mesh": (mesh, demand.mesh),
                "--concurrency": (texts, demand.concurrency),
                "--max-model-len": (length, demand.max_model_len),
            }
            what = " ".join(f"{name} {new}" for name, (new, old) in options.items() if new != old)
            yield _remedy(what, best_plan(replace(changed, concurrency=texts, max_model_len=length)))
            return


def _more_memory(demand: Demand, chosen: Candidate) -> Remedy:
    """What must be free on this machine, of which memory_fraction is planned with."""
    assert chosen.memory is not None
    needed = chosen.memory.needed
    free = math.ceil(needed / demand.memory_fraction) * demand.mesh.ranks
    return Remedy(
        change=f"{free / 2**30:.2f} GiB of free memory",
        plan=str(chosen.plan),
        needed=needed,
        budget=needed,
        executed=is_executed(chosen.plan),
        is_option=False,
    )


def _ledgers(demand: Demand) -> Iterator[Ledger]:
    """The legal plans that are executed."""
    for plan in all_plans(demand):
        if is_executed(plan):
            try:
                yield Ledger(demand, plan)
            except GraphError:
                continue


def _fits(demand: Demand) -> bool:
    """Whether a plan that is executed fits; bytes alone are looked at, no times."""
    return any(ledger.planned().fits for ledger in _ledgers(demand))


def _meshes(mesh: Mesh) -> Iterator[Mesh]:
    """This mesh, and larger ones as far as they are suggested."""
    while mesh.ranks <= MOST_SUGGESTED_RANKS:
        yield mesh
        mesh = mesh.larger()


def _remedy(change: str, found: Candidate) -> Remedy:
    memory = found.memory
    assert memory is not None
    return Remedy(
        change=change,
        plan=str(found.plan),
        needed=memory.needed,
        budget=memory.budget,
        executed=is_executed(found.plan),
    )


def smallest_mesh(model: str, kind: str = "a2") -> Mesh | None:
    """The smallest mesh of a kind, as far as they are suggested, that holds a model as it is planned by default."""
    return next((mesh for mesh in _meshes(Mesh.parse(f"{kind}:1")) if _fits(make_demand(model, str(mesh)))), None)
