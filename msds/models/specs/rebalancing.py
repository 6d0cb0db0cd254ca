"""Another placement of experts for what their load has become, for as little moving as the gain needs. Host code.

E experts, N ranks of `ep`, P slots per rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msds.models.specs.placement import ExpertPlacement, check_topology, deal, keeps_groups, place_node

Load = npt.NDArray[np.float64]


def rebalance_experts(
    old: ExpertPlacement, counts: Sequence[float], *, nodes: int = 1, groups: int = 1, least_gain: float = 0.0
) -> ExpertPlacement:
    """A placement in the slots of `old` that relieves its busiest rank of more than this share of its load, or `old`.

    nodes, groups: as for `balance_experts`. Of the placements that do, the one whose weights travel least: experts
    change ranks inside their nodes; or nodes exchange whole groups; or all experts are dealt anew. A node that keeps
    its experts, and is no busier than the busiest rank will be, stays as it is; so does the slot of an expert that
    stays on its rank.
    """
    check_topology(old.ranks, old.num_experts, nodes, groups)
    before = old.load(counts)
    most = (1 - least_gain) * before.max()
    for regions in _choices(old, np.asarray(counts, np.float64), nodes, groups):
        after = _placed(old, regions, nodes).load(counts)
        gaining = [r for r in regions if r.is_new(old) or after[r.ranks].max() < before[r.ranks].max()]
        new = _placed(old, gaining, nodes)
        busiest = new.load(counts).max()
        if busiest < most:
            needed = [r for r in gaining if r.is_new(old) or before[r.ranks].max() > busiest]
            less = _placed(old, needed, nodes)
            return less if less.load(counts).max() < most else new
    return old


def count_moves(old: ExpertPlacement, new: ExpertPlacement) -> int:
    """Slots that hold another expert."""
    pairs = zip(old.slots, new.slots, strict=True)
    return sum(one != other for held, row in pairs for one, other in zip(held, row, strict=True))


def count_arrivals(old: ExpertPlacement, new: ExpertPlacement, nodes: int) -> int:
    """Slots that hold an expert which no rank of their node held before."""
    spans = _spans(old.ranks, nodes)
    return sum(expert not in _held(old, span) for span in spans for rank in span for expert in new.slots[rank])


@dataclass(frozen=True)
class _Region:
    """Ranks that are to share these experts; rows: for each of them, in whatever order, the experts of its slots."""

    ranks: range
    experts: frozenset[int]
    rows: Sequence[tuple[int, ...]]

    def is_new(self, old: ExpertPlacement) -> bool:
        """Whether the ranks held other experts."""
        return self.experts != _held(old, self.ranks)


def _choices(old: ExpertPlacement, load: Load, nodes: int, groups: int) -> Iterator[list[_Region]]:
    """Ways to share the experts, those of the shortest ways first."""
    spans, held = _spans(old.ranks, nodes), [_held(old, span) for span in _spans(old.ranks, nodes)]

    def region(span: range, experts: Collection[int], part: Load) -> _Region:
        rows = place_node(part, sorted(experts), len(span), old.slots_per_rank)
        return _Region(span, frozenset(experts), rows)

    if not keeps_groups(old.num_experts, old.slots_per_rank, nodes, groups):
        if nodes > 1:
            parts = (load * _share(old, span) for span in spans)
            yield [region(span, own, part) for span, own, part in zip(spans, held, parts, strict=True)]
        yield [region(range(old.ranks), set(range(old.num_experts)), load)]
        return
    by_group, members = load.reshape(groups, -1).sum(1), np.arange(old.num_experts).reshape(groups, -1)

    def at(homes: Sequence[Collection[int]]) -> list[_Region]:
        return [
            region(span, members[sorted(home)].ravel().tolist(), load) for span, home in zip(spans, homes, strict=True)
        ]

    homes = [{expert // members.shape[1] for expert in own} for own in held]
    if sum(map(len, homes)) == groups:  # each group is on one node
        yield at(homes)
        yield at(_exchanged(by_group, homes))
    yield at(_nearest([set(home) for home in deal(by_group, nodes)], homes, homes))


def _share(old: ExpertPlacement, span: range) -> Load:
    """What some ranks hold of the replicas of each expert [E]."""
    here = np.bincount(np.concatenate([old.slots[rank] for rank in span]), minlength=old.num_experts)
    return np.asarray(here / old.num_replicas, np.float64)


def _exchanged(load: Load, homes: Sequence[set[int]]) -> list[list[int]]:
    """Who has which groups after exchanges of two, each of which relieves the busiest node most, until none does."""
    rows = [sorted(home) for home in homes]
    while True:
        total = [load[row].sum() for row in rows]
        busiest = int(np.argmax(total))
        found = []
        for other in set(range(len(rows))) - {busiest}:
            for mine in rows[busiest]:
                for theirs in rows[other]:
                    given = sorted({*rows[busiest], theirs} - {mine})
                    taken = sorted({*rows[other], mine} - {theirs})
                    found.append((max(load[given].sum(), load[taken].sum()), other, given, taken))
        if not found or min(found)[0] >= total[busiest]:
            return rows
        _, other, rows[busiest], rows[other] = min(found)


def _placed(old: ExpertPlacement, regions: Sequence[_Region], nodes: int) -> ExpertPlacement:
    """The experts of each region on its ranks, in the slots where they are if they are there; the rest as it was."""
    slots, per_node = list(old.slots), old.ranks // nodes
    near = [_held(old, span) for span in _spans(old.ranks, nodes)]
    for region in regions:
        held, around = [set(old.slots[rank]) for rank in region.ranks], [near[r // per_node] for r in region.ranks]
        for rank, row in zip(region.ranks, _nearest([set(row) for row in region.rows], held, around), strict=True):
            coming = iter(sorted(row - set(old.slots[rank])))
            slots[rank] = tuple(expert if expert in row else next(coming) for expert in old.slots[rank])
    return ExpertPlacement(old.num_experts, tuple(slots))


def _nearest(wanted: Sequence[set[int]], held: Sequence[set[int]], around: Sequence[set[int]]) -> list[set[int]]:
    """Each of `wanted` at the place that holds most of it, or where more of it is around: greedy, one for each place.

    Which place gets what makes no difference to the load.
    """
    found: dict[int, set[int]] = {}
    taken = set[int]()
    pairs = [
        (len(row & own), len(row & near), -i, -place)
        for i, row in enumerate(wanted)
        for place, (own, near) in enumerate(zip(held, around, strict=True))
    ]
    for *_, i, place in sorted(pairs, reverse=True):
        if -place not in found and -i not in taken:
            taken.add(-i)
            found[-place] = wanted[-i]
    return [found[place] for place in range(len(held))]


def _held(placement: ExpertPlacement, span: range) -> set[int]:
    return {expert for rank in span for expert in placement.slots[rank]}


def _spans(ranks: int, nodes: int) -> list[range]:
    """The ranks of each node."""
    each = ranks // nodes
    return [range(node * each, (node + 1) * each) for node in range(nodes)]
