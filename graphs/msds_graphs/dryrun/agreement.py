"""Whether ranks that meet in a group call the same collectives in the same order; else they wait for ever. Host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msds_graphs.dryrun.ir import Collective


def disagreements(calls: Mapping[int, Sequence[Collective]], axes: Mapping[int, Mapping[str, str]]) -> Iterator[str]:
    """What the ranks of one pipeline stage differ in, a sentence for each rank that differs; nothing where all agree.

    calls: rank -> the collectives of one step in order. axes: rank -> name of a group -> the axis it runs along. All
    ranks of a stage are compared with the first one by axis, not by group: a rank that was not compiled has groups with
    ranks that were, and stands for its axis.
    """
    if not calls:
        return
    first, *others = calls
    want = [(axes[first].get(call.group, call.group), call) for call in calls[first]]
    for rank in others:
        have = [(axes[rank].get(call.group, call.group), call) for call in calls[rank]]
        for index in range(max(len(want), len(have))):
            left = want[index] if index < len(want) else None
            right = have[index] if index < len(have) else None
            if left is None or right is None or _key(left) != _key(right):
                yield (
                    f"ranks {first} and {rank} would wait for each other: collective {index + 1} is "
                    f"{_text(left)} on rank {first} and {_text(right)} on rank {rank}"
                )
                break


def _key(item: tuple[str, Collective]) -> tuple[object, ...]:
    return item[0], *item[1].signature


def _text(item: tuple[str, Collective] | None) -> str:
    if item is None:
        return "none"
    axis, call = item
    arrow = "" if call.shape == call.result else f" -> {list(call.result)}"
    where = f" after {call.after}" if call.after else ""
    return f"{call.kind} over {axis} of {call.dtype} {list(call.shape)}{arrow}{where}"
