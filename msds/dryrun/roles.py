"""Which ranks stand for all others: those of equal slices compile equal graphs but for their place. Host code."""

from __future__ import annotations

from dataclasses import dataclass

from msds.dryrun.job import Job
from msds.errors import OptionError


@dataclass(frozen=True)
class Role:
    """Ranks whose slices have the same shapes, of which `compiled` are compiled."""

    ranks: tuple[int, ...]
    compiled: tuple[int, ...]


def roles(job: Job, chosen: str) -> tuple[Role, ...]:
    """Every rank of the plan in one role each.

    chosen: "auto", the first and the last rank of each role, which differ in their place on every axis; "all"; or ranks
    separated by commas. OptionError for anything else, and for ranks outside the plan.
    """
    wanted = _wanted(chosen, job.shards.ranks)
    alike: dict[tuple[tuple[str, tuple[int, ...]], ...], list[int]] = {}
    for rank in range(job.shards.ranks):
        shapes = tuple((path, piece.shape) for path, piece in job.weights(rank).items())
        alike.setdefault(shapes, []).append(rank)
    found = []
    for ranks in alike.values():
        compiled = sorted({ranks[0], ranks[-1]}) if wanted is None else [rank for rank in ranks if rank in wanted]
        found.append(Role(tuple(ranks), tuple(compiled)))
    return tuple(found)


def _wanted(chosen: str, ranks: int) -> set[int] | None:
    if chosen == "auto":
        return None
    if chosen == "all":
        return set(range(ranks))
    try:
        wanted = {int(part) for part in chosen.split(",")}
    except ValueError:
        raise OptionError(f"ranks is {chosen!r}: use auto, all, or ranks such as 0,5,15") from None
    outside = sorted(rank for rank in wanted if not 0 <= rank < ranks)
    if outside:
        raise OptionError(
            f"ranks {', '.join(map(str, outside))} are outside the plan, which has ranks 0 to {ranks - 1}"
        )
    return wanted
