"""Expert balancing while serving: count which experts are used, and move them so that ranks of ep have equal work.

The idea is DeepSeek's EPLB (DeepSeek-V3, section 3.4). Where ranks are on several machines, weights cross between them
only where no machine can help itself (`rebalance_experts`). No tensors. L MoE layers, E experts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from msds.errors import PlacementError
from msds.models.specs.placement import ExpertPlacement
from msds.models.specs.rebalancing import count_arrivals, count_moves, rebalance_experts

if TYPE_CHECKING:
    from msds.engine.runner import Runner

logger = logging.getLogger("msds")

LEAST_GAIN = 0.05
"""A layer's experts stay where they are unless its busiest rank is relieved of this share: moving stops the service,
and counts of a few steps differ by chance."""

Counts = npt.NDArray[Any]
Placements = Sequence[ExpertPlacement]


@dataclass(frozen=True)
class BalanceStats:
    """imbalance: how much the busiest rank had, over the mean, in the steps before the last look at the counts, None
    before the first; rebalancings: how often experts were moved since then; moves: slots that were given another;
    failures: how often a layer could not be moved, and kept its experts where they were."""

    imbalance: float | None
    rebalancings: int
    moves: int
    failures: int


class ExpertBalance:
    """Looks at the counts of a runner every `interval` steps. Used by the engine's thread, between steps.

    nodes, groups: what is near to what, as `rebalance_experts` wants it (`expert_topology`).
    """

    def __init__(self, interval: int, *, nodes: int = 1, groups: int = 1) -> None:
        self.interval = interval
        self._nodes, self._groups = nodes, groups
        self._steps = 0
        self._seen: Counts | None = None
        self._imbalance: float | None = None
        self._rebalancings = 0
        self._moves = 0
        self._failures = 0

    @property
    def stats(self) -> BalanceStats:
        """What came of it so far."""
        return BalanceStats(self._imbalance, self._rebalancings, self._moves, self._failures)

    def after_step(self, runner: Runner) -> None:
        """A step is done. Where experts cannot be moved they stay, and it is tried again after the next interval;
        what this raises means that ranks may hold different things, and nothing can be computed any more."""
        self._steps += 1
        if self._steps % self.interval:
            return
        counts = self._new_counts(runner.expert_counts())
        if not counts.any():
            return
        old = runner.model.placements
        new = tuple(self._rebalanced(placement, row.tolist()) for placement, row in zip(old, counts, strict=True))
        self._imbalance = imbalance(old, counts)
        before = f"in {self.interval} steps the busiest rank of ep had {self._imbalance:.2f} times the mean load"
        if new == old:
            logger.info("experts stay: %s", before)
            return
        start = time.perf_counter()
        try:
            runner.place_experts(new)
        except PlacementError as error:
            self._failures += 1
            logger.error("%s; the layers before it have moved, the engine goes on", error)
        self._count(old, runner.model.placements, counts, before, time.perf_counter() - start)

    def _count(self, old: Placements, new: Placements, counts: Counts, before: str, seconds: float) -> None:
        """What has really moved."""
        pairs = list(zip(old, new, strict=True))
        moves = sum(count_moves(one, other) for one, other in pairs)
        if not moves:
            return
        self._rebalancings += 1
        self._moves += moves
        slots = len(new) * new[0].ranks * new[0].slots_per_rank
        far = sum(count_arrivals(one, other, self._nodes) for one, other in pairs)
        logger.info(
            "experts rebalanced: %s, and would have had %.2f; %d of %d slots changed in %.2f s%s",
            *(before, imbalance(new, counts), moves, slots, seconds),
            f", {far} of them to an expert that their machine had not" if self._nodes > 1 else "",
        )

    def _rebalanced(self, old: ExpertPlacement, counts: Sequence[float]) -> ExpertPlacement:
        """A placement of a layer that is worth moving to, or the old one."""
        return rebalance_experts(old, counts, nodes=self._nodes, groups=self._groups, least_gain=LEAST_GAIN)

    def _new_counts(self, counts: Counts) -> Counts:
        """[L, E] what has come since the last look. Counters of 32 bits wrap; the difference is right all the same."""
        before = np.zeros_like(counts) if self._seen is None else self._seen
        self._seen = counts
        return (counts.view(np.uint32) - before.view(np.uint32)).astype(np.int64)


def imbalance(placements: Sequence[ExpertPlacement], counts: Counts) -> float:
    """The busiest rank's load over the mean, layers weighted by their time; counts [L, E]. 1 is even.

    Layers wait for their busiest rank one after the other, so the sum of what those compute is what counts.
    """
    loads = [placement.load(row.tolist()) for placement, row in zip(placements, counts, strict=True)]
    return float(sum(load.max() for load in loads) / sum(load.mean() for load in loads))
