"""One rank of a dry run in a process of its own: a job comes as JSON on stdin, the report goes as JSON to stdout.

Nothing else leaves the process, and no value can: see `msds_graphs.dryrun.simulate`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, cast

from msds.config import ModelConfig
from msds.dryrun.job import Job
from msds.dryrun.opinion import BACKWARD, FORWARD, bucket_of
from msds.dryrun.skeleton import layouts_graph
from msds.engine.runner import Runner
from msds.model import Model
from msds.models import model_functions
from msds.models.specs.parts import expert_counts_spec
from msds_graphs.collectives import create_groups
from msds_graphs.dryrun import simulate
from msds_graphs.dryrun.bodies import SOC_VARIABLE
from msds_graphs.dryrun.ir import GraphText
from msds_graphs.errors import GraphError
from msds_graphs.plan import Plan
from msds_graphs.ranks import COLLECTIVE_AXES, Ranks
from msds_graphs.trees import Tree


@dataclass(frozen=True)
class DeclaredModel:
    """What the runner looks at of a model, with weights that are declared and not loaded."""

    config: ModelConfig
    functions: ModuleType
    plan: Plan
    params: Tree
    cache: Tree
    counts: Any
    dtype: str

    @property
    def allowed_vocab(self) -> int:
        """Without a tokenizer every token of the model is allowed."""
        return self.config.vocab_size

    def cache_spec(self, num_blocks: int, block_size: int) -> Tree:
        """The declared cache itself: what is bound already stays as it is."""
        return self.cache

    def expert_counts_spec(self) -> Any:
        """The declared counters, where experts are counted."""
        return self.counts


def compile_job(job: Job) -> dict[str, Any]:
    """Compile what the job says; what `msds.dryrun.ranks.RankReport` reads. Errors of graphs are in it."""
    ranks = job.ranks
    simulate.start()
    steps = list(_layouts(job) if job.layouts else _steps(job, ranks))
    return {
        "rank": job.rank,
        "soc": os.environ[SOC_VARIABLE],
        "groups": {axis: [ranks.group(axis), *ranks.place(axis).members] for axis in COLLECTIVE_AXES},
        "steps": steps,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _steps(job: Job, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """The steps that serving would run on this rank."""
    create_groups(ranks, job.exchange_buffer)
    demand = job.demand
    functions = model_functions(demand.config)
    params = simulate.declare(job.local_weights(), "params")
    cache = simulate.declare(job.local_cache(), "cache")
    counts = None
    if demand.balances:
        counts = simulate.declare_one(expert_counts_spec(demand.config), "cache.expert_counts")
    model = DeclaredModel(demand.config, functions, Plan(ranks=ranks), params, cache, counts, demand.dtype)
    prefill, decode = job.ladders
    runner = Runner(
        cast(Model, model),
        num_blocks=job.num_blocks,
        block_size=demand.engine.block_size,
        prefill_buckets=prefill,
        decode_buckets=decode,
        num_drafts=job.mtp,
        counts_experts=demand.balances,
    )
    for name in job.steps:
        for bucket in job.buckets(name):
            step = runner.steps[name]
            yield _compiled(name, bucket, lambda: simulate.compiled_graph(lambda: step.check(bucket)))  # noqa: B023


def _layouts(job: Job) -> Iterator[dict[str, Any]]:
    """The skeleton under the plan's Layouts."""
    bucket = bucket_of(job)
    yield _compiled(FORWARD, bucket, lambda: layouts_graph(job, bucket, backward=False))
    yield _compiled(BACKWARD, bucket, lambda: layouts_graph(job, bucket, backward=True))


def _compiled(name: str, bucket: dict[str, int], compile_it: Callable[[], GraphText]) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    try:
        graph, error = compile_it(), None
    except GraphError as fault:
        graph, error = GraphText((), {}, 0), str(fault)
    return {
        "name": name,
        "bucket": bucket,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "num_nodes": graph.num_nodes,
        "parameters": {path: [dtype, list(shape)] for path, (dtype, shape) in graph.parameters.items()},
        "collectives": [asdict(call) for call in graph.collectives],
        "error": error,
    }


def main() -> None:
    """Read, compile, write; what libraries print goes to stderr."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    report = compile_job(Job.from_json(json.load(sys.stdin)))
    json.dump(report, answer)
    answer.flush()
    os._exit(0)  # MindSpore's own way out would tear down a device that is not there


if __name__ == "__main__":
    main()
