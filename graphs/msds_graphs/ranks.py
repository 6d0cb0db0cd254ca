"""Ranks: which rank of which ShardPlan computes a step, as a value that compiled functions close over. Host code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from msds_graphs.errors import GraphError
from msds_graphs.exchange_limits import plan_refusal
from msds_graphs.mesh import HARDWARE
from msds_graphs.sharding import ShardPlan

COLLECTIVE_AXES = ("tp", "dp", "ep", "ep_rest", "stage", "exchange")
"""What collectives run along. stage: all dp * tp ranks of a pipeline stage. exchange: those of `ep` once more, in the
group that Ascend's operators for experts want for themselves; one rank where these cannot be used."""

WHOLE = ShardPlan()
"""A model that is not cut."""


class Place(NamedTuple):
    """A rank's group along an axis: its members in order, and where the rank stands among them."""

    axis: str
    members: tuple[int, ...]
    position: int
    group: str


@dataclass(frozen=True)
class Ranks:
    """One rank of a plan. `Ranks()` is a whole model on one rank: every collective is the identity.

    machine: the kind of hardware, a key of `mesh.HARDWARE`. GraphError for a rank outside the plan and for another
    machine. Frozen, hashable, usable in graphs.
    """

    plan: ShardPlan = WHOLE
    rank: int = 0
    machine: str = "cpu"
    native: bool = field(init=False, repr=False, compare=False)
    """Whether the device has the communication primitives; else they are emulated by AllReduce, the only one that
    reaches sub-groups on CPUs."""
    places: tuple[tuple[str, int, int, str], ...] = field(init=False, repr=False, compare=False)
    """Axis, size of the group, index in it, its name: plain tuples, which graph mode folds."""

    def __post_init__(self) -> None:
        if self.machine not in HARDWARE:
            raise GraphError(f"machine {self.machine!r} is unknown: use {', '.join(HARDWARE)}")
        object.__setattr__(self, "native", self.machine != "cpu")
        places = [self.place(axis) for axis in COLLECTIVE_AXES]
        object.__setattr__(self, "places", tuple((p.axis, len(p.members), p.position, p.group) for p in places))

    def place(self, axis: str) -> Place:
        """The group of this rank along an axis; GraphError for an axis that has no collectives."""
        if axis not in COLLECTIVE_AXES:
            raise GraphError(f"axis {axis!r} has no collectives: the axes are {', '.join(COLLECTIVE_AXES)}")
        if axis == "stage":
            first = self.plan.coordinates(self.rank)["pp"] * self.plan.stage_ranks
            members = tuple(range(first, first + self.plan.stage_ranks))
        elif axis == "exchange":
            members = (self.rank,) if plan_refusal(self.machine, self.plan) else self.plan.group("ep", self.rank)
        else:
            members = self.plan.group(axis, self.rank)
        # Every group is an arithmetic progression, and axes that mean the same ranks share one group: on Ascend each
        # costs buffers of its own.
        step = members[1] - members[0] if len(members) > 1 else 1
        prefix = "msds_exchange" if axis == "exchange" and len(members) > 1 else "msds"
        group = f"{prefix}_{members[0]}_{len(members)}_{step}"
        return Place(axis, members, members.index(self.rank), group)

    def size(self, axis: str) -> int:
        """How many ranks are along the axis. Usable inside a graph."""
        for name, size, _, _ in self.places:
            if name == axis:
                return size
        return 1

    def index(self, axis: str) -> int:
        """Where this rank is along the axis. Usable inside a graph."""
        for name, _, index, _ in self.places:
            if name == axis:
                return index
        return 0

    def group(self, axis: str) -> str:
        """The name of this rank's group along the axis. Usable inside a graph."""
        for name, _, _, group in self.places:
            if name == axis:
                return group
        return ""


ALONE = Ranks()
"""The one rank of a model that is not cut."""
