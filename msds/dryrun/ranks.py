"""What the process of one rank reports. Host code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msds_graphs.dryrun.ir import Collective

Parameters = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class StepReport:
    """One compiled shape of a step. parameters: path -> (dtype, shape) of the weights that its graph holds.

    error: why it did not compile, in which case it has nothing else.
    """

    name: str
    bucket: Mapping[str, int]
    seconds: float
    cpu_seconds: float
    num_nodes: int
    parameters: Parameters
    collectives: tuple[Collective, ...]
    error: str | None

    @property
    def label(self) -> str:
        """Name and shape."""
        return f"{self.name} [{' '.join(f'{name}={size}' for name, size in self.bucket.items())}]"


@dataclass(frozen=True)
class RankReport:
    """groups: axis -> (name of this rank's group, its members). peak_bytes: the largest memory the process had."""

    rank: int
    soc: str
    groups: Mapping[str, tuple[str, tuple[int, ...]]]
    steps: tuple[StepReport, ...]
    peak_bytes: int

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankReport:
        """From what `msds.dryrun.child` prints."""
        groups = {axis: (name, tuple(members)) for axis, (name, *members) in fields["groups"].items()}
        steps = tuple(_step(step) for step in fields["steps"])
        return cls(fields["rank"], fields["soc"], groups, steps, fields["peak_bytes"])

    @property
    def axes(self) -> dict[str, str]:
        """Name of a group -> the first axis that means it; axes of one plan may share a group."""
        found: dict[str, str] = {}
        for axis, (name, _) in self.groups.items():
            found.setdefault(name, axis)
        return found

    def members(self, group: str) -> tuple[int, ...]:
        """The ranks of a group; none where it is not one of this rank."""
        return next((members for name, members in self.groups.values() if name == group), ())


def _step(fields: dict[str, Any]) -> StepReport:
    collectives = tuple(
        Collective(
            **{
                **call,
                "shape": tuple(call["shape"]),
                "result": tuple(call["result"]),
                "source": tuple(call["source"]),
                "members": tuple(call["members"]),
            }
        )
        for call in fields["collectives"]
    )
    parameters = {
        path.removeprefix("params."): (dtype, tuple(shape))
        for path, (dtype, shape) in fields["parameters"].items()
        if path.startswith("params.")
    }
    return StepReport(
        fields["name"],
        fields["bucket"],
        fields["seconds"],
        fields["cpu_seconds"],
        fields["num_nodes"],
        parameters,
        collectives,
        fields["error"],
    )
