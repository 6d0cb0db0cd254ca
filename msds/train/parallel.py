"""Data parallelism: each rank takes its part of every batch, and sums over the ranks make the parts whole.

A batch's weights are normalised over all of it before it is cut, so the sum of the parts' gradients is the gradient
of the whole, however many tokens each part has. Summing happens outside of what is differentiated: the gradient of
AllReduce itself would add up once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from msds.launch.place import Place
from msds_graphs.collectives import after, all_reduce, create_groups
from msds_graphs.compile import Compiled, compile
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan


def replicas(place: Place) -> Ranks:
    """This process as one of `place.ranks` replicas; once per process, after the launcher has joined it to them."""
    ranks = Ranks(ShardPlan(dp=place.ranks), place.rank)
    create_groups(ranks)
    return ranks


def reducer(ranks: Ranks) -> Callable[[Any], Any] | None:
    """A pure function in the graph that sums gradients and expert counts over the replicas; None for one."""
    if ranks.plan.ranks == 1:
        return None

    def reduce(sums):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        last = sums["grads"][0]
        grads, counts = (), ()
        for leaf in sums["grads"]:
            last = all_reduce(after(leaf, last, ranks), "dp", ranks)
            grads = (*grads, last)  # type: ignore[assignment]
        for leaf in sums["counts"]:
            last = all_reduce(after(leaf, last, ranks), "dp", ranks)
            counts = (*counts, last)  # type: ignore[assignment]
        return {"grads": grads, "counts": counts}

    return reduce


class HostSums:
    """Sums of small float32 vectors over the replicas, for what the host decides and logs."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._compiled: dict[int, Compiled] = {}

    def __call__(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[n] -> [n]; every rank asks for the same n in the same order."""
        if self._ranks.plan.ranks == 1:
            return values
        if len(values) not in self._compiled:
            self._compiled[len(values)] = self._compile(len(values))
        total: npt.NDArray[np.float32] = self._compiled[len(values)]({"values": np.asarray(values, np.float32)})
        return total

    def _compile(self, size: int) -> Compiled:
        ranks = self._ranks

        def total(bound, donated, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            return all_reduce(batch["values"], "dp", ranks), donated

        return compile(total, bound=(), batch={"values": np.zeros(size, np.float32)}, outputs=(), name="host sums")
