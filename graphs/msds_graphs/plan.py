"""Plan: which implementation each op uses, and on which rank of a ShardPlan. A value, visible at the call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msds_graphs.errors import GraphError
from msds_graphs.ranks import ALONE, Ranks

IMPLEMENTATIONS = ("reference", "portable", "primitive", "ascendc", "cpu")
"""reference: the plain definition; portable: MindSpore ops everywhere; primitive: a fused op of the wheel;
ascendc: a kernel of this project for Ascend; cpu: a native CPU kernel of this project."""


@dataclass(frozen=True)
class Plan:
    """impl: op name -> implementation, as a mapping or pairs; ops that are not named use "portable".

    ranks: which rank of which ShardPlan computes; by default one rank alone.

    Frozen and hashable, and plain enough to be closed over by a compiled function. GraphError for an
    implementation that does not exist; whether an op has it is for the op to say.
    """

    impl: tuple[tuple[str, str], ...] = ()
    ranks: Ranks = ALONE

    def __init__(self, impl: Mapping[str, str] | Iterable[tuple[str, str]] = (), ranks: Ranks = ALONE) -> None:
        pairs = tuple(sorted(impl.items() if isinstance(impl, Mapping) else impl))
        for op, name in pairs:
            if name not in IMPLEMENTATIONS:
                raise GraphError(f"implementation {name!r} of op {op!r} is unknown: use {', '.join(IMPLEMENTATIONS)}")
        names = [op for op, _ in pairs]
        if len(set(names)) != len(names):
            raise GraphError(f"an op has two implementations in {pairs}: name each op once")
        object.__setattr__(self, "impl", pairs)
        object.__setattr__(self, "ranks", ranks)

    def implementation(self, op: str) -> str:
        """The implementation of `op`: "portable" unless the plan says otherwise. Usable inside a graph."""
        for name, implementation in self.impl:
            if name == op:
                return implementation
        return "portable"
