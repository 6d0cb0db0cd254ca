"""Which rank holds which experts of a layer, as data, and how to choose that from how often each was used. Host code.

E experts, N ranks of `ep`, P slots per rank, R replicas of an expert at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    def num_replicas(self) -> npt.NDArray[np.int32]:
        """How many slots each expert has [E]."""
        return np.bincount(np.concatenate(self.slots), minlength=self.num_experts).astype(np.int32)

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
        for expert in range(self.num_experts):
            places = [rank * self.slots_per_rank + slot for rank, slot in self.holders(expert)]
            table[expert] = places[0]
            table[expert, : len(places)] = places
        return {"slot_table": table, "num_replicas": self.num_replicas}

    def load(self, counts: Sequence[float]) -> npt.NDArray[np.float64]:
        """How much each rank computes [N] if expert e is chosen counts[e] times, dealt evenly to its replicas."""
        share = np.asarray(counts, np.float64) / self.num_replicas
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
    check_topology(ranks, experts, nodes, groups)
    if not keeps_groups(experts, slots_per_rank, nodes, groups):
        nodes, groups = 1, 1
    by_group, members = load.reshape(groups, -1), np.arange(experts).reshape(groups, -1)
    rows: list[tuple[int, ...]] = []
    for home in deal(by_group.sum(1), nodes):
        rows += place_node(load, members[home].ravel().tolist(), ranks // nodes, slots_per_rank)
    return ExpertPlacement(experts, tuple(rows))


def check_topology(ranks: int, experts: int, nodes: int, groups: int) -> None:
    """GraphError unless the nodes have as many ranks each, and the groups as many experts."""
    if ranks % nodes or experts % groups:
        raise GraphError(f"{nodes} nodes must divide {ranks} ranks, and {groups} groups {experts} experts")


def keeps_groups(experts: int, slots_per_rank: int, nodes: int, groups: int) -> bool:
    """Whether each group of experts can have a node of its own, or share it with whole other ones."""
    return nodes > 1 and groups % nodes == 0 and slots_per_rank <= experts // nodes


def deal(load: npt.NDArray[np.float64], bins: int) -> list[list[int]]:
    """As many items for each bin, the heaviest first to the lightest bin that has room."""
    room, total = len(load) // bins, np.zeros(bins)
    result: list[list[int]] = [[] for _ in range(bins)]
    for item in np.argsort(-load, kind="stable"):
        target = min((b for b in range(bins) if len(result[b]) < room), key=lambda b: total[b])
        result[target].append(int(item))
        total[target] += load[item]
    return result


def place_node(load: npt.NDArray[np.float64], experts: Sequence[int], ranks: int, slots: int) -> list[tuple[int, ...]]:
    """The slots of a node's ranks for its experts, of which there are at least as many as slots per rank."""
    replicas = dict.fromkeys(experts, 1)
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
