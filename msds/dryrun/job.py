"""What one process of a dry run compiles: a model, a plan, one rank of it, and which steps. Host code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

from msds.config import DeepseekConfig
from msds.engine.runner import HEAD_ROWS
from msds.errors import OptionError
from msds.models.specs import model_specs
from msds.models.specs.parts import local_specs, rank_parts
from msds.models.specs.rules import check_plan, is_executed
from msds.planning.collectives import STEPS, exchange_buffer_bytes
from msds.planning.demand import DTYPES, Demand, make_demand
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import Shard, ShardPlan, rank_shards
from msds_graphs.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Job:
    """model: folder, config.json or preset; mesh, plan: as typed; rank: the one that is compiled.

    dtype: a key of DTYPES. max_model_len, concurrency: as for the planner. mtp: draft tokens. steps: names of STEPS.
    all_buckets: every shape that serving would compile, not only the largest of each step. layouts: not the steps, but
    the dense skeleton under MindSpore's AutoParallel.
    """

    model: str
    mesh: str
    plan: str
    rank: int
    dtype: str
    max_model_len: int | None
    concurrency: int | None
    mtp: int
    steps: tuple[str, ...]
    all_buckets: bool
    layouts: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Job:
        """The inverse of `to_json`."""
        return cls(**{**fields, "steps": tuple(fields["steps"])})

    @cached_property
    def demand(self) -> Demand:
        """The question to the planner; raises as `make_demand`."""
        return make_demand(
            self.model,
            self.mesh,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            concurrency=self.concurrency,
            mtp=self.mtp,
        )

    @cached_property
    def shards(self) -> ShardPlan:
        """The plan; GraphError where it does not fill the mesh or cut the model."""
        plan = ShardPlan.parse(self.plan)
        plan.check_mesh(self.demand.mesh)
        check_plan(self.demand.config, plan)
        return plan

    @property
    def ranks(self) -> Ranks:
        """The rank that is compiled, on the mesh's hardware."""
        return Ranks(self.shards, self.rank, self.demand.mesh.hardware.kind)

    @property
    def exchange_buffer(self) -> int:
        """Bytes of each buffer of the group that exchanges tokens, for all shapes that serving compiles."""
        prefill, decode = self.ladders
        return exchange_buffer_bytes(self.demand, self.shards, (*prefill, *decode))

    @property
    def texts(self) -> int:
        """Sequences of one replica's decode step."""
        return -(-self.demand.texts // self.shards.dp)

    @property
    def num_blocks(self) -> int:
        """Cache blocks of a replica: texts of full length, and the reserved block."""
        return 1 + self.texts * self.demand.engine.blocks_per_text(self.demand.max_model_len)

    @property
    def ladders(self) -> tuple[tuple[dict[str, int], ...], tuple[dict[str, int], ...]]:
        """The shapes that serving compiles: (prefill, decode), ascending."""
        return self.demand.ladders(self.demand.max_model_len, self.texts)

    def buckets(self, step: str) -> tuple[dict[str, int], ...]:
        """Those of a step that this job compiles: the largest, or all."""
        prefill, decode = self.ladders
        found = {
            "prefill": prefill,
            "decode": decode,
            "draft": tuple(bucket for bucket in decode if bucket["Q"] == 1),
            "head": ({"T": HEAD_ROWS},),
        }[step]
        return found if self.all_buckets else (max(found, key=bucket_size),)

    def weights(self, rank: int) -> dict[str, Shard]:
        """Path -> slice of the derived tree that the plan gives a rank."""
        return _planned_slices(self, rank)

    def local_weights(self) -> Tree:
        """The derived spec tree with the shapes that this rank loads."""
        demand = self.demand
        return self._local(model_specs(demand.config).derived_spec(demand.config, demand.dtype))

    def local_cache(self) -> Tree:
        """The cache's spec tree with the shapes that this rank allocates."""
        demand = self.demand
        specs = model_specs(demand.config)
        return self._local(specs.cache_spec(demand.config, self.num_blocks, demand.engine.block_size, demand.dtype))

    def _local(self, tree: Tree) -> Tree:
        return local_specs(tree, rank_parts(tree, self.demand.config, self.ranks))


@lru_cache(maxsize=16)
def _planned_slices(job: Job, rank: int) -> dict[str, Shard]:
    tree = model_specs(job.demand.config).derived_spec(job.demand.config, job.demand.dtype)
    return rank_shards(tree, job.demand.rules, job.shards, rank)


def bucket_size(bucket: Mapping[str, int]) -> tuple[int, ...]:
    """Tokens of a bucket, then blocks of context."""
    return bucket.get("T", 0) or bucket["S"] * bucket["Q"], bucket.get("B", 0)


def check_job(job: Job) -> None:
    """OptionError or GraphError for a plan that cannot run and for steps that do not exist."""
    for step in job.steps:
        if step not in STEPS:
            raise OptionError(f"step {step!r} does not exist: the steps are {', '.join(map(repr, STEPS))}")
    if "draft" in job.steps and not job.mtp:
        raise OptionError(f"step 'draft' needs draft tokens: mtp is 0, or {job.model} has no MTP layer")
    if job.dtype not in DTYPES:
        raise OptionError(f"dtype is {job.dtype!r}: use one of {', '.join(DTYPES)}")
    if job.layouts and not isinstance(job.demand.config, DeepseekConfig):
        raise OptionError(
            f"layouts: the skeleton is of DeepSeek's layers, and {job.model} is {job.demand.config.model_type}"
        )
    if not is_executed(job.shards):
        raise OptionError(
            f"plan {job.shards} has {job.shards.pp} pipeline stages, which the model functions do not run yet: "
            "use a plan without pp"
        )
