"""A second opinion: where MindSpore's AutoParallel, given the plan as Layouts, communicates otherwise. Host code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msds.dryrun.job import Job, bucket_size
from msds.dryrun.ranks import RankReport, StepReport
from msds.planning.collectives import dense_rules, place_of

FORWARD, BACKWARD = "forward under Layouts", "forward and backward under Layouts"
NUM_LAYERS = 3
"""Layers of the skeleton: a first, a last, and one that is neither."""


@dataclass(frozen=True)
class Difference:
    """Collectives that one of the two has more of. place: a layer or `ends`; ours, theirs: how many each has."""

    place: str
    kind: str
    ranks: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    result: tuple[int, ...]
    ours: int
    theirs: int

    @property
    def verdict(self) -> str:
        """Whether MindSpore communicates more or less here."""
        return "more" if self.theirs > self.ours else "less"


def bucket_of(job: Job) -> dict[str, int]:
    """The tokens of the skeleton: the largest prefill step, in every replica."""
    return max(job.ladders[0], key=bucket_size)


def differences(job: Job, report: RankReport, step: StepReport) -> Iterator[Difference]:
    """What the forward graph of a rank has otherwise than the plan's rules for dense layers say."""
    ours: Counter[tuple[str, str, tuple[int, ...], str, tuple[int, ...], tuple[int, ...]]] = Counter()
    layers = tuple(f"layers.{index}" for index in range(NUM_LAYERS))
    for rule in dense_rules(job.demand, job.shards, bucket_of(job), layers):
        members = report.groups[rule.axis][1]
        if len(members) > 1:
            for place in rule.places:
                ours[place, rule.kind, members, rule.dtype, rule.shape, rule.result] += rule.count
    names = group_members(job, report)
    theirs = Counter(
        (place_of(call.after), call.kind, names.get(call.group, ()), call.dtype, call.shape, call.result)
        for call in step.collectives
    )
    for key in dict.fromkeys((*ours, *theirs)):
        if ours[key] != theirs[key]:
            yield Difference(*key, ours=ours[key], theirs=theirs[key])


def totals(job: Job, report: RankReport, step: StepReport) -> Mapping[tuple[str, tuple[int, ...]], tuple[int, int]]:
    """(kind, ranks) -> (how many, bytes in all) of a graph, in order of first use."""
    names = group_members(job, report)
    found: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for call in step.collectives:
        key = call.kind, names.get(call.group, ())
        count, nbytes = found.get(key, (0, 0))
        found[key] = count + 1, nbytes + call.nbytes
    return found


def group_members(job: Job, report: RankReport) -> dict[str, tuple[int, ...]]:
    """Group -> its ranks, as far as MindSpore says: it writes them where it cuts, not where it differentiates."""
    found = {"hccl_world_group": tuple(range(job.shards.ranks))}
    for step in report.steps:
        found.update({call.group: call.members for call in step.collectives if call.members})
    return found
