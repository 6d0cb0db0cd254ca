"""A dry run: one process per compiled rank, and what their reports say together. Host code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msds_graphs
import msds_ops
from msds.dryrun.checks import checks
from msds.dryrun.job import Job, check_job
from msds.dryrun.opinion import NUM_LAYERS
from msds.dryrun.ranks import RankReport
from msds.dryrun.report import DryRunReport
from msds.dryrun.roles import roles
from msds.errors import MsdsError, OptionError
from msds.models.specs.rules import is_executed
from msds.planning.collectives import STEPS
from msds.planning.search import rank_plans
from msds.presets import resolve_model
from msds_graphs.dryrun.stubs import SOCS, StubLibraries, stub_libraries
from msds_graphs.mesh import Mesh

_NOISE = ('whl package "te"', "No module named 'te'")
"""MindSpore says on every start that it misses a part of CANN that compiling does not use."""


class DryRunError(MsdsError):
    """A process of a dry run that ended without a report."""


@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
    """What a user may choose. model, mesh, dtype, max_model_len, concurrency: as for the planner.

    plan: "auto": the planner's best that can run. mtp: draft tokens; None: one where the model has an MTP layer.
    steps: names of STEPS; None: those that serving runs. ranks: as `roles`. cache: folder of the stub libraries.
    layouts: ask MindSpore's AutoParallel for a second opinion. eplb_step_interval, num_redundant_experts: as
    `EngineOptions`; where experts are balanced, the steps are those that count them, over tables that place them.
    """

    model: str
    mesh: str
    plan: str = "auto"
    dtype: str = "bf16"
    max_model_len: int | None = None
    concurrency: int | None = None
    mtp: int | None = None
    steps: tuple[str, ...] | None = None
    all_buckets: bool = False
    ranks: str = "auto"
    cache: Path | None = None
    layouts: bool = False
    eplb_step_interval: int = 0
    num_redundant_experts: int = 0


def dry_run(options: DryRunOptions, progress: Callable[[str], None] | None = None) -> DryRunReport:
    """Compile the steps of a model for Ascend, without hardware, on one rank of each role or more.

    progress receives a line per rank. OptionError, ConfigError or GraphError before anything is compiled for what
    cannot be; DryRunError where a process dies. What does not compile, or compiles to something else than the plan
    says, is in the report.
    """
    say = progress or (lambda line: None)
    job = make_job(options)
    found = roles(job, options.ranks)
    say("preparing stub libraries")
    stubs = stub_libraries(options.cache)
    reports = []
    start = time.perf_counter()
    for role in found:
        for rank in role.compiled:
            say(f"compiling {', '.join(job.steps)} for rank {rank} of {job.shards.ranks}")
            reports.append(compile_rank(replace(job, rank=rank), stubs))
    opinions = []
    for rank in sorted({0, job.shards.ranks - 1}) if options.layouts else ():
        say(f"compiling {NUM_LAYERS} dense layers under Layouts for rank {rank}")
        opinions.append(compile_rank(replace(job, rank=rank, layouts=True), stubs))
    return DryRunReport(
        job=job,
        opinions=tuple(opinions),
        roles=found,
        ranks=tuple(reports),
        checks=tuple(checks(job, reports)),
        seconds=time.perf_counter() - start,
    )


def make_job(options: DryRunOptions) -> Job:
    """The checked job for rank 0; raises as `dry_run`."""
    if Mesh.parse(options.mesh).hardware.kind not in SOCS:
        raise OptionError(f"mesh {options.mesh} has no NPU to compile for: use a2:N or a3:N")
    mtp = options.mtp
    if mtp is None:
        mtp = min(1, getattr(resolve_model(options.model), "num_nextn_predict_layers", 0))
    steps = options.steps
    if steps is None:
        steps = tuple(step for step in STEPS if mtp or step != "draft")
    job = Job(
        model=str(Path(options.model).resolve()) if Path(options.model).exists() else options.model,
        mesh=options.mesh,
        plan=options.plan,
        rank=0,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        concurrency=options.concurrency,
        mtp=mtp,
        steps=steps,
        all_buckets=options.all_buckets,
        eplb_step_interval=options.eplb_step_interval,
        num_redundant_experts=options.num_redundant_experts,
    )
    if options.plan == "auto":
        job = replace(job, plan=_best_plan(job))
    check_job(replace(job, layouts=options.layouts))
    return job


def _best_plan(job: Job) -> str:
    """The planner's first plan without pipeline stages whose replicas share the texts evenly, whether it fits or not:
    nothing is allocated here."""
    ranked = rank_plans(job.demand)
    for candidate in ranked:
        is_even = not (job.concurrency or 0) % candidate.plan.dp
        if candidate.status != "illegal" and is_executed(candidate.plan) and is_even:
            return str(candidate.plan)
    raise OptionError(
        f"no plan without pipeline stages cuts {job.model} for mesh {job.mesh}"
        + (f" into replicas that share {job.concurrency} texts evenly" if job.concurrency else "")
        + ": the planner's first is "
        f"{ranked[0].plan} ({ranked[0].status})"
    )


def compile_rank(job: Job, stubs: StubLibraries, child: str = "msds.dryrun.child") -> RankReport:
    """Compile the job in a process of its own, which runs the module `child`."""
    environment = stubs.environment(
        {**os.environ, "GLOG_v": "3", "PYTHONPATH": os.pathsep.join(_roots())},
        soc=SOCS[job.demand.mesh.hardware.kind],
        rank=job.rank,
        ranks=job.shards.ranks,
    )
    command = [sys.executable, "-m", child]
    # MindSpore leaves files where it runs when a graph does not compile
    with tempfile.TemporaryDirectory(prefix="msds-dryrun-") as folder:
        done = subprocess.run(
            command, input=json.dumps(job.to_json()), env=environment, cwd=folder, capture_output=True, text=True
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not any(n in line for n in _NOISE)]
        raise DryRunError(
            f"the process that compiled rank {job.rank} ended with {done.returncode} and no report; it said last: "
            + "\n".join(lines[-20:])
        )
    return RankReport.from_json(json.loads(done.stdout))


def _roots() -> Iterator[str]:
    """Where this process found the packages, so that the child runs the same sources."""
    found = [str(Path(__file__).parents[2])]
    found += [str(Path(module.__path__[0]).parent) for module in (msds_graphs, msds_ops)]
    yield from dict.fromkeys(found)
    if os.environ.get("PYTHONPATH"):
        yield os.environ["PYTHONPATH"]
