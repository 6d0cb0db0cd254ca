"""What a plan says about communication: which collectives each layer of each step has, before anything is compiled.

Host code. T = S * Q tokens of a replica's step, D hidden, V vocabulary; padded to equal parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from msds.dryrun.job import Job

_LAYER = re.compile(r"^(?:params\.|stack\.)?((?:layers|mtp)\.\d+)\.")


def place_of(parameter: str) -> str:
    """Where a collective is, by the Parameter that was read last before it: `layers.3`, `mtp.0` or `ends`."""
    match = _LAYER.match(parameter)
    return match[1] if match else "ends"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`count` collectives of one kind at each of `places`. shape: what goes in on each rank; result: what comes out."""

    what: str
    kind: str
    axis: str
    dtype: str
    shape: tuple[int, ...]
    result: tuple[int, ...]
    places: tuple[str, ...]
    count: int = 1


def dense_rules(job: Job, bucket: Mapping[str, int], layers: tuple[str, ...]) -> tuple[Rule, ...]:
    """Two sums per layer: the ranks of a replica have cut heads and MLP widths, and each has a share of every token."""
    shape = (bucket["S"] * bucket["Q"], job.demand.config.hidden_size)
    return tuple(
        Rule(what=what, kind="all_reduce", axis="tp", dtype=job.demand.dtype, shape=shape, result=shape, places=layers)
        for what in ("sum of the heads", "sum of the MLP")
    )


def rules(job: Job, step: str, bucket: Mapping[str, int]) -> tuple[Rule, ...]:
    """The collectives of a step, those of groups of one rank included."""
    return ()
