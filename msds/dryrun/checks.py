"""What has to hold of compiled ranks: they compiled, hold their slices, agree, communicate as the plan says. Host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msds.dryrun.job import Job
from msds.dryrun.ranks import RankReport, StepReport
from msds.planning.collectives import Rule, place_of, rules
from msds_graphs.dryrun.agreement import disagreements
from msds_graphs.dryrun.ir import Collective

MAX_FAULTS = 10
"""Faults of one check that are kept: one wrong place is in every layer."""

_Key = tuple[str, str, str, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Check:
    """One statement about one step and what contradicts it; it holds where nothing does."""

    step: str
    what: str
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.faults


def checks(job: Job, reports: Sequence[RankReport]) -> Iterator[Check]:
    """All checks of all steps. Ranks on which a step did not compile are left out of its other checks."""
    for index, first in enumerate(reports[0].steps):
        steps = [(report, report.steps[index]) for report in reports]
        errors = [f"rank {report.rank}: {step.error}" for report, step in steps if step.error is not None]
        yield _check(first, "compiles", errors)
        compiled = [(report, step) for report, step in steps if step.error is None]
        if not compiled:
            continue
        yield _check(first, "holds its slices of the weights", _slice_faults(job, compiled))
        calls = {report.rank: step.collectives for report, step in compiled}
        axes = {report.rank: report.axes for report, _ in compiled}
        yield _check(first, "all ranks communicate alike", disagreements(calls, axes))
        yield _check(first, "communicates as the plan says", _rule_faults(job, compiled))


def _check(step: StepReport, what: str, faults: Sequence[str] | Iterator[str]) -> Check:
    found = list(faults)
    if len(found) > MAX_FAULTS:
        found = [*found[:MAX_FAULTS], f"and {len(found) - MAX_FAULTS} more"]
    return Check(step.label, what, tuple(found))


def _slice_faults(job: Job, compiled: Sequence[tuple[RankReport, StepReport]]) -> Iterator[str]:
    """Weights whose shape in the graph is not that of the rank's slice."""
    for report, step in compiled:
        held = job.weights(report.rank)
        for path, (_, shape) in step.parameters.items():
            if path not in held or held[path].shape != shape:
                want = list(held[path].shape) if path in held else "nothing"
                yield f"rank {report.rank}: {path} is {list(shape)} in the graph, the plan gives {want}"


def _rule_faults(job: Job, compiled: Sequence[tuple[RankReport, StepReport]]) -> Iterator[str]:
    """Places (a layer, the ends) with other collectives than the rules say."""
    for report, step in compiled:
        wanted: Counter[tuple[_Key, str]] = Counter()
        reasons: dict[_Key, list[Rule]] = {}
        for rule in rules(job.demand, job.shards, step.name, step.bucket):
            if len(report.groups[rule.axis][1]) > 1:
                key = (rule.kind, report.groups[rule.axis][0], rule.dtype, rule.shape, rule.result)
                reasons.setdefault(key, []).append(rule)
                wanted.update({(key, place): rule.count for place in rule.places})
        found = Counter((_key(call), place_of(call.after)) for call in step.collectives)
        for key, place in dict.fromkeys((*wanted, *found)):
            have, want = found[key, place], wanted[key, place]
            if have != want:
                kind, group, dtype, shape, _ = key
                why = ", ".join(rule.what for rule in reasons.get(key, ())) or "no rule"
                yield (
                    f"rank {report.rank}, {place}: {have} {kind} over {report.axes.get(group, group)} of {dtype} "
                    f"{list(shape)}, the plan says {want} ({why})"
                )


def _key(call: Collective) -> _Key:
    return call.kind, call.group, call.dtype, call.shape, call.result
