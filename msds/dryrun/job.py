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
from msds.models.specs.parts import (
    check_redundant,
    local_specs,
    rank_parts,
    spread_experts,
    with_slots,
    with_tables,
)
from msds.models.specs.placement import ExpertPlacement
from msds.models.specs.rules import check_plan, is_executed
from msds.planning.collectives import STEPS, exchange_buffer_bytes
from msds.planning.demand import DTYPES, Demand, make_demand
from msds.weights import held_spec
from msds_graphs.plan import Plan
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import Shard, ShardPlan, rank_shards
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import Tree, tree_map


@dataclass(frozen=True, kw_only=True)
class Job:
    """model: folder, config.json or preset; mesh, plan: as typed; rank: the one that is compiled.

    dtype: a key of DTYPES. max_model_len, concurrency: as for the planner. mtp: draft tokens. steps: names of STEPS.
    all_buckets: every shape that serving would compile, not only the largest of each step. layouts: not the steps, but
    the dense skeleton under MindSpore's AutoParallel. eplb_step_interval, num_redundant_experts: as for the planner.
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
    eplb_step_interval: int = 0
    num_redundant_experts: int = 0

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
            eplb_step_interval=self.eplb_step_interval,
            num_redundant_experts=self.num_redundant_experts,
        )

    @cached_property
    def shards(self) -> ShardPlan:
        """The plan; GraphError where it does not fill the mesh or cut the model."""
        plan = ShardPlan.parse(self.plan)
        plan.check_mesh(self.demand.mesh)
        check_plan(self.demand.config, plan)
        if self.demand.balances:
            check_redundant(self.demand.config, plan, self.num_redundant_experts)
        return plan

    @cached_property
    def placements(self) -> tuple[ExpertPlacement, ...]:
        """Where experts are at first, where they are balanced."""
        if not self.demand.balances:
            return ()
        nodes = self.demand.mesh.nodes
        return spread_experts(self.demand.config, self.shards, self.num_redundant_experts, nodes=nodes)

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
        return self.shards.replica_share(self.demand.texts)

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
        """The specs of what this rank binds: the shapes that it loads, and the tables of placements."""
        plan = Plan(ranks=self.ranks)
        return _as_specs(held_spec(self.demand.config, self.demand.dtype, plan, self.placements))

    def local_cache(self) -> Tree:
        """The cache's spec tree with the shapes that this rank allocates, counters of experts apart."""
        demand = self.demand
        specs = model_specs(demand.config)
        tree = specs.cache_spec(demand.config, self.num_blocks, demand.engine.block_size, demand.dtype)
        return local_specs(tree, rank_parts(tree, demand.config, self.ranks))


@lru_cache(maxsize=16)
def _planned_slices(job: Job, rank: int) -> dict[str, Shard]:
    demand = job.demand
    tree = with_slots(model_specs(demand.config).derived_spec(demand.config, demand.dtype), job.num_redundant_experts)
    tree = _as_specs(with_tables(tree, demand.config, job.placements))
    return rank_shards(tree, demand.rules, job.shards, rank)


def _as_specs(tree: Tree) -> Tree:
    """Specs in the place of arrays, which tables of placements are."""
    return tree_map(lambda leaf: leaf if isinstance(leaf, ArraySpec) else ArraySpec(leaf.shape, str(leaf.dtype)), tree)


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
    check_texts(job)
    if job.layouts and not isinstance(job.demand.config, DeepseekConfig):
        raise OptionError(
            f"layouts: the skeleton is of DeepSeek's layers, and {job.model} is {job.demand.config.model_type}"
        )
    if not is_executed(job.shards):
        raise OptionError(
            f"plan {job.shards} has {job.shards.pp} pipeline stages, which the model functions do not run yet: "
            "use a plan without pp"
        )


def check_texts(job: Job) -> None:
    """OptionError for texts that replicas cannot share evenly, which serving would refuse."""
    if job.concurrency is not None and job.concurrency % job.shards.dp:
        above = job.texts * job.shards.dp
        near = [count for count in (above - job.shards.dp, above) if count]
        raise OptionError(
            f"concurrency is {job.concurrency}, and the {job.shards.dp} replicas of plan {job.shards} decode as many "
            f"texts each: use {' or '.join(map(str, near))}"
        )
