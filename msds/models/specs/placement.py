"""Which rank holds which experts of a layer, as data, and how to choose that from how often each was used. Host code.

E experts, N ranks of `ep`, P slots per rank, R replicas of an expert at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msds_graphs.errors import GraphError


@dataclass(frozen=True)
class ExpertPlacement:
    """slots: for each rank the logical experts in its P slots, in order; an expert may be on several ranks.

    GraphError where ranks differ in slots, an expert has no slot, or a rank holds one twice.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        widths = sorted({len(row) for row in self.slots})
        if len(widths) != 1:
            raise GraphError(f"ranks have {widths} expert slots: every rank needs as many")
        for rank, row in enumerate(self.slots):
            for expert in row:
                if not 0 <= expert < self.num_experts:
                    raise GraphError(f"rank {rank} holds expert {expert}: the layer has {self.num_experts}")
            if len(set(row)) < len(row):
                raise GraphError(f"rank {rank} holds an expert twice in {row}: replicas belong on different ranks")
        absent = set(range(self.num_experts)) - {expert for row in self.slots for expert in row}
        if absent:
            raise GraphError(f"experts {sorted(absent)} have no slot: every expert needs at least one")

    @classmethod
    def contiguous(cls, num_experts: int, ranks: int) -> ExpertPlacement:
        """Runs of experts in order, one slot each. GraphError if the ranks do not divide the experts."""
        if num_experts % ranks:
            raise GraphError(f"{num_experts} experts cannot be cut into {ranks} equal runs")
        held = num_experts // ranks
        return cls(num_experts, tuple(tuple(range(r * held, (r + 1) * held)) for r in range(ranks)))

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.slots)

    @property
    def slots_per_rank(self) -> int:
        """P."""
        return len(self.slots[0])

    @property
    def max_replicas(self) -> int:
        """R of any placement of these sizes: what tables are made for, so that a swap changes no shape."""
        return min(self.ranks, 1 + self.ranks * self.slots_per_rank - self.num_experts)

    def holders(self, expert: int) -> list[tuple[int, int]]:
        """The (rank, slot) of each replica of an expert."""
        return [(rank, row.index(expert)) for rank, row in enumerate(self.slots) if expert in row]

    def tables(self) -> dict[str, npt.NDArray[np.int32]]:
        """What graphs read: slot_table [E, R], the slots of the replicas counted over all ranks, and num_replicas [E].

        Entries beyond num_replicas repeat the first replica and are not read.
        """
        table = np.zeros((self.num_experts, self.max_replicas), np.int32)
        counts = np.zeros(self.num_experts, np.int32)
        for expert in range(self.num_experts):
            places = [rank * self.slots_per_rank + slot for rank, slot in self.holders(expert)]
            table[expert] = places[0]
            table[expert, : len(places)] = places
            counts[expert] = len(places)
        return {"slot_table": table, "num_replicas": counts}

    def load(self, counts: Sequence[float]) -> npt.NDArray[np.float64]:
        """How much each rank computes [N] if expert e is chosen counts[e] times, dealt evenly to its replicas."""
        share = np.asarray(counts, np.float64) / self.tables()["num_replicas"]
        return np.array([share[list(row)].sum() for row in self.slots])


def balance_experts(
    counts: Sequence[float], ranks: int, slots_per_rank: int, *, nodes: int = 1, groups: int = 1
) -> ExpertPlacement:
    """A placement that evens out the load of ranks: spare slots replicate what is hottest, then slots are packed.

    counts: how often each expert was chosen [E]. nodes: consecutive ranks per node; where the `groups` of experts
    (node-limited routing sends a token to few of them) can be dealt to the nodes, each group stays on one node, so
    that its tokens cross to one node; otherwise nodes do not matter. The idea is DeepSeek's EPLB (DeepSeek-V3,
    section 3.4); greedy, so not always the best. GraphError for sizes that cannot be.
    """
    load = np.asarray(counts, np.float64)
    experts = len(load)
    if load.ndim != 1 or not np.isfinite(load).all() or (load < 0).any():
        raise GraphError("counts must be one list of finite numbers of at least 0, one per expert")
    if not experts <= ranks * slots_per_rank or slots_per_rank > experts:
        raise GraphError(
            f"{experts} experts cannot have {ranks} * {slots_per_rank} slots: every expert needs one, and no rank "
            "holds one twice"
        )
    if ranks % nodes or experts % groups:
        raise GraphError(f"{nodes} nodes must divide {ranks} ranks, and {groups} groups {experts} experts")
    if groups % nodes or slots_per_rank > experts // nodes:
        nodes, groups = 1, 1
    by_group = load.reshape(groups, -1)
    homes = _deal(by_group.sum(1), nodes)
    rows: list[tuple[int, ...]] = []
    for node in range(nodes):
        members = np.concatenate([np.arange(experts).reshape(groups, -1)[group] for group in homes[node]])
        rows += _place_node(load, members, ranks // nodes, slots_per_rank)
    return ExpertPlacement(experts, tuple(rows))


def rebalance_experts(old: ExpertPlacement, counts: Sequence[float]) -> ExpertPlacement:
    """`balance_experts` in the slots of `old`, with as few of them changed as is easy to see.

    Which rank gets which experts makes no difference to the load, so each rank gets those that it mostly has, and an
    expert that stays on a rank stays in its slot. Ranks must be alike: placements with nodes are not made here.
    """
    rows = [set(row) for row in balance_experts(counts, old.ranks, old.slots_per_rank).slots]
    pairs = [(len(row & set(held)), -i, -rank) for i, row in enumerate(rows) for rank, held in enumerate(old.slots)]
    new: dict[int, tuple[int, ...]] = {}
    taken = set[int]()
    for _, i, rank in sorted(pairs, reverse=True):
        if -rank not in new and i not in taken:
            taken.add(i)
            new[-rank] = _settled(rows[-i], old.slots[-rank])
    return ExpertPlacement(old.num_experts, tuple(new[rank] for rank in range(old.ranks)))


def count_moves(old: ExpertPlacement, new: ExpertPlacement) -> int:
    """Slots that hold another expert."""
    pairs = zip(old.slots, new.slots, strict=True)
    return sum(one != other for held, row in pairs for one, other in zip(held, row, strict=True))


def _settled(row: set[int], held: tuple[int, ...]) -> tuple[int, ...]:
    """The experts of a row, those that are held where they are."""
    coming = iter(sorted(row - set(held)))
    return tuple(expert if expert in row else next(coming) for expert in held)


def _deal(load: npt.NDArray[np.float64], bins: int) -> list[list[int]]:
    """As many items for each bin, the heaviest first to the lightest bin that has room."""
    room, total = len(load) // bins, np.zeros(bins)
    result: list[list[int]] = [[] for _ in range(bins)]
    for item in np.argsort(-load, kind="stable"):
        target = min((b for b in range(bins) if len(result[b]) < room), key=lambda b: total[b])
        result[target].append(int(item))
        total[target] += load[item]
    return result


def _place_node(
    load: npt.NDArray[np.float64], experts: npt.NDArray[Any], ranks: int, slots: int
) -> list[tuple[int, ...]]:
    """The slots of a node's ranks for its experts."""
    replicas = {int(expert): 1 for expert in experts}
    for _ in range(ranks * slots - len(replicas)):
        hottest = max((e for e in replicas if replicas[e] < ranks), key=lambda e: (load[e] / replicas[e], -e))
        replicas[hottest] += 1
    order = sorted(replicas, key=lambda e: (-load[e] / replicas[e], e))
    packed = _pack(load, replicas, order, ranks, slots, by_load=True)
    # Filling the emptiest ranks first always works out; filling the lightest may leave a rank with no legal expert.
    packed = packed or _pack(load, replicas, order, ranks, slots, by_load=False)
    assert packed is not None
    return [tuple(sorted(row)) for row in packed]


def _pack(
    load: npt.NDArray[np.float64], replicas: dict[int, int], order: list[int], ranks: int, slots: int, *, by_load: bool
) -> list[list[int]] | None:
    rows: list[list[int]] = [[] for _ in range(ranks)]
    total = np.zeros(ranks)
    for expert in order:
        free = [rank for rank in range(ranks) if len(rows[rank]) < slots]
        free.sort(key=lambda rank: total[rank] if by_load else len(rows[rank]))
        if len(free) < replicas[expert]:
            return None
        for rank in free[: replicas[expert]]:
            rows[rank].append(expert)
            total[rank] += load[expert] / replicas[expert]
    return rows
