"""Seconds of collectives over the links of a mesh. Estimates: peaks of the hardware, and the share of them reached."""

from __future__ import annotations

import math

from msds.planning.collectives import Rule
from msds_graphs.mesh import Link, Mesh
from msds_graphs.sharding import ShardPlan

LINK_SHARE = 0.7
"""Of a link's bandwidth that large messages reach. Estimate."""


class Links:
    """What joins the ranks of a plan. Groups of several nodes work in two levels, inside the nodes and between them."""

    def __init__(self, mesh: Mesh, plan: ShardPlan) -> None:
        self._mesh = mesh
        self._plan = plan
        self._levels: dict[str, tuple[tuple[int, Link], ...]] = {}

    def seconds(self, rule: Rule) -> float:
        """One collective of a rule. CPUs have the sum alone, and the functions make the others of it."""
        if rule.kind in ("dispatch", "combine"):
            return self._exchange(rule.sent)
        sent, received = rule.nbytes
        whole = max(sent, received)
        if rule.kind == "all_reduce" or self._mesh.hardware.kind == "cpu":
            return self._passes(rule.axis, whole, 2)  # scattered, then gathered
        return self._passes(rule.axis, whole, 1)

    def _exchange(self, sent: int) -> float:
        """Each rank sends to each rank of `ep` an equal share of so many bytes, and gets as much from it; to other
        nodes at the same time as within its own, over other links.

        A token crosses to a node once per expert that it has there. Servers of A2 can be told to send it once and pass
        it on inside (HCCL_INTRA_PCIE_ENABLE, CANN's "layered"); that is not counted.
        """
        ranks = math.prod(size for size, _ in self._levels_of("ep"))
        seconds, near = 0.0, 1
        for size, link in self._levels_of("ep"):
            share = (size - 1) * near / ranks
            seconds = max(seconds, link.latency + share * sent / (link.bandwidth * LINK_SHARE))
            near *= size
        return seconds

    def hand_over(self, size: float) -> float:
        """Sending `size` bytes from a rank to the same one of the next pipeline stage."""
        (_, link) = self._levels_of("pp")[-1]
        return link.latency + size / (link.bandwidth * LINK_SHARE)

    def _passes(self, axis: str, whole: float, passes: int) -> float:
        """Each rank sends or receives all of `whole` bytes but its own part, so many times.

        Between nodes ranks of one place in their nodes exchange a share of the bytes each, so the ranks of a node use
        their links side by side; inside a node everything moves.
        """
        seconds, share = 0.0, whole
        for size, link in self._levels_of(axis):
            seconds += passes * (size - 1) / size * share / (link.bandwidth * LINK_SHARE)
            seconds += math.ceil(math.log2(size)) * link.latency
            share /= size
        return seconds

    def _levels_of(self, axis: str) -> tuple[tuple[int, Link], ...]:
        """(ranks, link) inside a node, then (nodes, link) between them; levels of one rank are left out."""
        if axis not in self._levels:
            ranks = self._plan.group(axis, 0)
            nodes = len({self._mesh.node(rank) for rank in ranks})
            local = len(ranks) // nodes
            levels = ((local, ranks[:local]), (nodes, ranks))
            self._levels[axis] = tuple((size, self._link(group)) for size, group in levels if size > 1)
        return self._levels[axis]

    def _link(self, ranks: tuple[int, ...]) -> Link:
        kind = self._mesh.link_kind(ranks)
        assert kind is not None
        return self._mesh.hardware.links[kind]
