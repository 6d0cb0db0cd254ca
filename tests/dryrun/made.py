"""Jobs for tiny models, and reports that are made from the rules instead of compiled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from msds.dryrun.job import Job
from msds.dryrun.ranks import RankReport, StepReport
from msds.dryrun.run import DryRunOptions, make_job
from msds.planning.collectives import ENDS, rules
from msds_graphs.dryrun.ir import Collective
from msds_graphs.ranks import COLLECTIVE_AXES, Ranks
from tests.reference.variants import V3


def config_file(folder: Path, config: dict[str, Any] = V3, **changes: Any) -> str:
    """A config.json of a tiny model; no weights are needed."""
    path = folder / "config.json"
    path.write_text(json.dumps(config | changes))
    return str(path)


def tiny_job(model: str, mesh: str, plan: str, **options: Any) -> Job:
    """A job of texts of 64 tokens."""
    return make_job(DryRunOptions(model=model, mesh=mesh, plan=plan, max_model_len=64, **options))


def made_report(job: Job, rank: int) -> RankReport:
    """What a rank would report that compiled exactly what the rules say, layer after layer."""
    ranks = Ranks(job.shards, rank, job.demand.mesh.hardware.kind)
    groups = {axis: (ranks.group(axis), ranks.place(axis).members) for axis in COLLECTIVE_AXES}
    held = {path: (piece.dtype, piece.shape) for path, piece in job.weights(rank).items()}
    steps = []
    for name in job.steps:
        for bucket in job.buckets(name):
            calls = []
            for rule in rules(job.demand, job.shards, name, bucket):
                group, members = groups[rule.axis]
                for place in rule.places if len(members) > 1 else ():
                    after = "params.norm.weight" if place in ENDS else f"params.{place}.self_attn.o_proj.weight"
                    call = Collective(rule.kind, group, rule.dtype, rule.shape, rule.result, after)
                    calls += [call] * rule.count
            steps.append(StepReport(name, bucket, 1.0, 1.0, 100, held, tuple(calls), None))
    return RankReport(rank, "Ascend910B3", groups, tuple(steps), 1 << 30)


def with_step(report: RankReport, index: int, **changes: Any) -> RankReport:
    """The report with one step changed."""
    steps = list(report.steps)
    steps[index] = replace(steps[index], **changes)
    return replace(report, steps=tuple(steps))
