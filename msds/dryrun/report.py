"""A dry run as data, as JSON and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from msds.dryrun.checks import Check
from msds.dryrun.job import Job
from msds.dryrun.opinion import FORWARD, NUM_LAYERS, differences, totals
from msds.dryrun.ranks import RankReport, StepReport
from msds.dryrun.roles import Role
from msds.planning.collectives import place_of, rules
from msds.planning.search import evaluate
from msds_graphs.dryrun.ir import Collective

LABEL = "compiled for Ascend without hardware"
MEANING = (
    "MindSpore's front end compiled these graphs for the Ascend target: shapes, number types, slices and collectives "
    "are checked. No operator was chosen or run: nothing here says anything about values, memory or speed on an NPU"
)
_LAYER = re.compile(r"^(layers|mtp)\.\d+")


@dataclass(frozen=True, kw_only=True)
class DryRunReport:
    """What a dry run found. roles: every rank of the plan; ranks: those compiled. seconds: of all processes."""

    job: Job
    roles: tuple[Role, ...]
    ranks: tuple[RankReport, ...]
    checks: tuple[Check, ...]
    opinions: tuple[RankReport, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every graph compiled on every chosen rank and every check holds. An opinion that differs is none."""
        opinions = [step for rank in self.opinions for step in rank.steps]
        return all(check.passed for check in self.checks) and all(step.error is None for step in opinions)

    def to_json(self) -> dict[str, Any]:
        """JSON types.

        label: what this is; passed; model, mesh, plan {dp, tp, ep, pp}, dtype, max_model_len, mtp, soc, seconds,
            eplb_step_interval, num_redundant_experts
        roles: [{ranks, compiled}]: ranks of equal slices, and those of them that were compiled
        checks: [{step, what, passed, faults: [text]}]
        ranks: [{rank, groups {axis: [ranks]}, peak_bytes, steps: [{name, bucket, seconds, cpu_seconds, num_nodes,
            error, collectives: [{kind, axis, ranks, dtype, shape, result, bytes, count, places {place: count}}]}]}];
            bytes: of one of them, the larger of what goes in and comes out
        layouts: [{rank, steps: [{name, bucket, seconds, error, collectives: [{kind, ranks, count, bytes in all}]}],
            differences: [{place, verdict: more | less, kind, ranks, dtype, shape, result, ours, theirs}]}]: forward
        slices: [{ranks: of a role, weights {path: {dtype, shape, whole}}}], layers of equal slices under one path (*)
        """
        job = self.job
        return {
            "label": LABEL,
            "passed": self.passed,
            "model": job.demand.model,
            "mesh": job.mesh,
            "plan": job.shards.to_json(),
            "dtype": job.demand.dtype,
            "max_model_len": job.demand.max_model_len,
            "mtp": job.mtp,
            "eplb_step_interval": job.eplb_step_interval,
            "num_redundant_experts": job.num_redundant_experts,
            "soc": self.ranks[0].soc,
            "seconds": self.seconds,
            "roles": [{"ranks": list(role.ranks), "compiled": list(role.compiled)} for role in self.roles],
            "checks": [
                {"step": check.step, "what": check.what, "passed": check.passed, "faults": list(check.faults)}
                for check in self.checks
            ],
            "ranks": [_rank_json(rank) for rank in self.ranks],
            "layouts": [_opinion_json(job, rank) for rank in self.opinions],
            "slices": [
                {
                    "ranks": list(role.ranks),
                    "weights": {
                        path: {"dtype": dtype, "shape": list(shape), "whole": list(whole)}
                        for path, dtype, shape, whole in _slices(self.job, role.ranks[0])
                    },
                }
                for role in self.roles
            ],
        }

    def render(self) -> str:
        """The report as lines of text for a terminal, without a final line break."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        job = self.job
        balanced = f", experts balanced with {job.num_redundant_experts} replicas" if job.demand.balances else ""
        yield f"{job.demand.model} on {job.mesh}, plan {job.shards}, {job.demand.dtype}{balanced}: {LABEL}"
        yield ""
        yield from self._rank_lines()
        yield ""
        for step in self.ranks[0].steps:
            yield from _step_lines(job, self.ranks[0], step)
        for role in self.roles:
            yield f"slices of ranks {_ranges(role.ranks)}"
            for path, dtype, shape, whole in _slices(job, role.ranks[0]):
                of = "" if shape == whole else f" of {list(whole)}"
                yield f"  {path:<44} {dtype:<9} {list(shape)}{of}"
        yield ""
        yield from self._opinion_lines()
        for check in self.checks:
            yield f"{'ok  ' if check.passed else 'FAIL'} {check.step}: {check.what}"
            yield from (f"     {fault}" for fault in check.faults)
        yield ""
        yield f"- {MEANING}"
        planned = evaluate(job.demand, job.shards).memory
        if planned is not None:
            size = f"{planned.needed / 2**30:.1f} GiB of {planned.budget / 2**30:.1f} on the fullest rank"
            yield f"- the planner's estimate of memory: {size}, it {'fits' if planned.fits else 'DOES NOT FIT'}"
        if job.exchange_buffer:
            size = f"{job.exchange_buffer / 2**20:.0f} MiB"
            yield f"- tokens go to their experts by operators of Ascend, whose group wants two buffers of {size}"
        uncompiled = job.shards.ranks - len(self.ranks)
        if uncompiled:
            yield f"- {uncompiled} of {job.shards.ranks} ranks were not compiled: their slices are like those above"

    def _rank_lines(self) -> Iterator[str]:
        head = f"{'seconds':>8}{'of CPU':>8}{'nodes':>8}{'collectives':>13}{'GB of process':>15}"
        yield f"  {'rank':>4}  {'step':<34}{head}"
        for rank in self.ranks:
            for step in rank.steps:
                peak = f"{rank.peak_bytes / 1e9:.1f}" if step is rank.steps[-1] else ""
                what = (
                    f"{step.num_nodes:>8}{len(step.collectives):>13}"
                    if step.error is None
                    else f"{'did not compile':>21}"
                )
                yield f"  {rank.rank:>4}  {step.label:<34}{step.seconds:>8.1f}{step.cpu_seconds:>8.1f}{what}{peak:>15}"

    def _opinion_lines(self) -> Iterator[str]:
        """MindSpore's AutoParallel on the dense skeleton."""
        if not self.opinions:
            return
        yield f"second opinion: {NUM_LAYERS} dense layers under MindSpore's AutoParallel, Layouts of the same plan"
        for rank in self.opinions:
            for step in rank.steps:
                if step.error is not None:
                    yield f"  FAIL rank {rank.rank}, {step.name}: {step.error}"
                    continue
                yield f"  rank {rank.rank}, {step.name}: {step.seconds:.1f} s"
                for (kind, ranks), (count, nbytes) in totals(self.job, rank, step).items():
                    yield f"    {count:>4} x {kind} over ranks {_ranges(ranks)}, {nbytes / 2**20:.1f} MiB in all"
                if step.name == FORWARD:
                    found = list(differences(self.job, rank, step))
                    yield "    as our plan communicates" if not found else "    otherwise than our plan:"
                    for item in found:
                        yield (
                            f"      {item.verdict} at {item.place}: {item.theirs} for our {item.ours} {item.kind} over "
                            f"ranks {_ranges(item.ranks)} of {item.dtype} {list(item.shape)}"
                        )
        yield "  AutoParallel makes its result whole on every rank: an all_gather over replicas at the end is that"
        yield ""


def _opinion_json(job: Job, rank: RankReport) -> dict[str, Any]:
    forward = [step for step in rank.steps if step.name == FORWARD and step.error is None]
    return {
        "rank": rank.rank,
        "steps": [
            {
                "name": step.name,
                "bucket": dict(step.bucket),
                "seconds": step.seconds,
                "error": step.error,
                "collectives": [
                    {"kind": kind, "ranks": list(ranks), "count": count, "bytes": nbytes}
                    for (kind, ranks), (count, nbytes) in totals(job, rank, step).items()
                ],
            }
            for step in rank.steps
        ],
        "differences": [
            {**asdict(item), "verdict": item.verdict} for step in forward for item in differences(job, rank, step)
        ],
    }


def _step_lines(job: Job, rank: RankReport, step: StepReport) -> Iterator[str]:
    if step.error is not None:
        return
    reasons: dict[tuple[Any, ...], list[str]] = {}
    for rule in rules(job.demand, job.shards, step.name, step.bucket):
        key = rule.kind, rank.groups[rule.axis][1], rule.dtype, rule.shape, rule.result
        sent = f", {rule.sent / 2**20:.3f} MiB sent" if rule.sent else ""
        reasons.setdefault(key, []).append(rule.what + sent)
    yield f"{step.label}, rank {rank.rank}: {len(step.collectives)} collectives"
    for item in _grouped(rank, step):
        places = _places_text(item["places"])
        arrow = "" if item["shape"] == item["result"] else f" -> {item['result']}"
        size = f"{item['bytes'] / 2**20:.3f} MiB"
        key = item["kind"], tuple(item["ranks"]), item["dtype"], tuple(item["shape"]), tuple(item["result"])
        why = ", ".join(dict.fromkeys(reasons.get(key, ["not in the plan"])))
        yield (
            f"  {item['count']:>4} x {item['kind']} over {item['axis']} ({_ranges(item['ranks'])}) of {item['dtype']} "
            f"{item['shape']}{arrow}, {size}: {places} ({why})"
        )
    yield ""


def _rank_json(rank: RankReport) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "groups": {axis: list(members) for axis, (_, members) in rank.groups.items()},
        "peak_bytes": rank.peak_bytes,
        "steps": [
            {
                "name": step.name,
                "bucket": dict(step.bucket),
                "seconds": step.seconds,
                "cpu_seconds": step.cpu_seconds,
                "num_nodes": step.num_nodes,
                "error": step.error,
                "collectives": _grouped(rank, step),
            }
            for step in rank.steps
        ],
    }


def _grouped(rank: RankReport, step: StepReport) -> list[dict[str, Any]]:
    """Equal collectives once, with their number and where they are, in order of first use."""
    found: dict[tuple[Any, ...], list[Collective]] = {}
    for call in step.collectives:
        found.setdefault((call.group, call.signature), []).append(call)
    return [
        {
            "kind": calls[0].kind,
            "axis": rank.axes.get(calls[0].group, calls[0].group),
            "ranks": list(rank.members(calls[0].group)),
            "dtype": calls[0].dtype,
            "shape": list(calls[0].shape),
            "result": list(calls[0].result),
            "bytes": calls[0].nbytes,
            "count": len(calls),
            "places": dict(Counter(place_of(call.after) for call in calls)),
        }
        for calls in found.values()
    ]


def _places_text(places: dict[str, int]) -> str:
    """`2 in each of 61 layers, 1 at the ends`."""
    text = []
    by_count: dict[tuple[str, int], list[str]] = {}
    for place, count in places.items():
        match = _LAYER.match(place)
        by_count.setdefault((match[1] if match else place, count), []).append(place)
    for (kind, count), found in by_count.items():
        if kind not in ("layers", "mtp"):
            text.append(f"{count} at the {kind}")
        elif len(found) == 1:
            text.append(f"{count} in {found[0]}")
        else:
            text.append(f"{count} in each of {len(found)} {kind}")
    return ", ".join(text)


def _slices(job: Job, rank: int) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    """(path, dtype, slice, whole) of a rank's weights, equal layers together."""
    whole = {leaf.path: leaf.spec.shape for leaf in job.demand.weights}
    found: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], None] = {}
    for path, piece in job.weights(rank).items():
        shape = tuple(int(dim) for dim in whole.get(path, piece.shape))  # every rank has the tables of placements
        found[_LAYER.sub(r"\1.*", path), piece.dtype, piece.shape, shape] = None
    return list(found)


def _ranges(ranks: tuple[int, ...] | list[int]) -> str:
    """`0-15`, `0,16` or `0-30 by 2`."""
    if len(ranks) < 3:
        return ",".join(map(str, ranks))
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) > 1:
        return ",".join(map(str, ranks))
    step = steps.pop()
    return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f" by {step}")
