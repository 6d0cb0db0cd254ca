"""Bytes of one rank: exact for weights and cache (the specs say them), estimates for everything else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from msds.config import DeepseekConfig, max_context
from msds.errors import OptionError
from msds.models.specs.parts import check_redundant, moe_layers
from msds.models.specs.rules import check_plan
from msds.planning.collectives import exchange_buffer_bytes
from msds.planning.cpu_graphs import PROCESS_BYTES, collectives_bytes, graphs_bytes
from msds.planning.demand import Demand, num_experts
from msds.planning.links import Links
from msds_graphs.exchange_limits import plan_refusal
from msds_graphs.sharding import PlacedLeaf, ShardPlan, held_leaves, shard, stage_layers
from msds_graphs.specs import ITEM_SIZES, ArraySpec

GRAPH_BYTES = 64 << 20
"""Of one compiled shape on an NPU: code, constants and operator workspace. Estimate."""
RUNTIME_BYTES = 1 << 30
"""CANN runtime and MindSpore's context on an NPU. Estimate."""
DOMAIN_BYTES = 400 << 20
"""Of one HCCL communication domain: a send and a receive buffer of HCCL_BUFFSIZE, whose default is 200 MB."""

_PARTS = (
    ("mtp", re.compile(r"mtp\..*")),
    ("embedding", re.compile(r"embed_tokens\..*")),
    ("head", re.compile(r"lm_head\..*")),
    ("absorbed", re.compile(r".*\.self_attn\.absorbed\..*")),
    ("norms", re.compile(r"(.*\.)?\w*norm\.weight")),
    ("attention", re.compile(r".*\.self_attn\..*")),
    ("router", re.compile(r".*\.mlp\.gate\..*")),
    ("routed_experts", re.compile(r".*\.mlp\.experts\..*")),
    ("shared_experts", re.compile(r".*\.mlp\.shared_experts\..*")),
    ("dense_mlp", re.compile(r".*\.mlp\..*")),
    ("cache", re.compile(r"layers\.\d+\.(latent|k|v)")),
)
BALANCING = "balancing"
"""The part of the weights that is no weight: where experts are, and how often they were chosen."""
PARTS = (*(name for name, _ in _PARTS if name != "cache"), BALANCING)


@lru_cache(maxsize=1 << 16)
def part_of(path: str) -> str:
    """Which part of the weights a leaf is counted under."""
    return next(name for name, pattern in _PARTS if pattern.fullmatch(path))


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank of a stage.

    weights: by part, with tables and counters of balanced experts. block_bytes: of one cache block. num_blocks: planned
    cache blocks, the reserved one included.
    activations: the largest step's. runtime: graphs and workspace. communication: buffers. counted: whether these
    three are inside the budget, as on NPUs; the engine's CPU budget leaves them to the memory outside it.
    """

    stage: int
    weights: Mapping[str, int]
    block_bytes: int
    num_blocks: int
    activations: int
    runtime: int
    communication: int
    budget: int
    counted: bool

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def cache_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def other_bytes(self) -> int:
        """What is estimated: activations, graphs and workspace, buffers."""
        return self.activations + self.runtime + self.communication

    @property
    def needed(self) -> int:
        """What is compared with the budget."""
        return self.weight_bytes + self.cache_bytes + (self.other_bytes if self.counted else 0)

    @property
    def fits(self) -> bool:
        return self.needed <= self.budget


class Ledger:
    """The memory of one plan of a demand: per pipeline stage, for any length and number of texts.

    GraphError where the plan does not cut the model or does not fill the mesh.
    """

    def __init__(self, demand: Demand, plan: ShardPlan) -> None:
        plan.check_mesh(demand.mesh)
        check_plan(demand.config, plan)
        if demand.balances:
            check_redundant(demand.config, plan, demand.engine.num_redundant_experts)
        self.demand = demand
        self.plan = plan

    @cached_property
    def links(self) -> Links:
        """What the messages of the plan's ranks go over."""
        return Links(self.demand.mesh, self.plan)

    @cached_property
    def stage_weights(self) -> tuple[Mapping[str, int], ...]:
        """Bytes by part of one rank, for each stage."""
        return tuple(
            _bytes_by_part(self.demand, self.demand.weights, self.plan, stage) | self._balancing_bytes(stage)
            for stage in range(self.plan.pp)
        )

    def _balancing_bytes(self, stage: int) -> dict[str, int]:
        """Tables and counters of the MoE layers of a stage, where experts are balanced."""
        demand, plan = self.demand, self.plan
        if not demand.balances:
            return {}
        held, is_last = stage_layers(demand.config.num_hidden_layers, plan, stage), stage == plan.pp - 1
        layers = sum(number in held if name == "layers" else is_last for name, number in moe_layers(demand.config))
        replicas = min(plan.ep, 1 + demand.engine.num_redundant_experts)  # of one expert, at most
        return {BALANCING: layers * num_experts(demand.config) * (replicas + 2) * ITEM_SIZES["int32"]}

    @cached_property
    def stage_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one cache block on one rank, for each stage."""
        return tuple(
            sum(_bytes_by_part(self.demand, self.demand.block, self.plan, stage).values())
            for stage in range(self.plan.pp)
        )

    def stage(self, stage: int, texts: int, max_model_len: int) -> RankMemory:
        """A rank of a stage with `texts` texts of full length in its replica."""
        demand = self.demand
        # shapes are compiled for what is decoded together, whether there is room for as many full texts or not
        together = texts if demand.concurrency is not None else max(texts, self.plan.replica_share(demand.texts))
        return RankMemory(
            stage=stage,
            weights=self.stage_weights[stage],
            block_bytes=self.stage_block_bytes[stage],
            num_blocks=1 + texts * demand.engine.blocks_per_text(max_model_len),
            activations=activation_bytes(demand, self.plan, texts, max_model_len),
            runtime=runtime_bytes(demand, self.plan, together, max_model_len),
            communication=communication_bytes(demand, self.plan, together, max_model_len),
            budget=demand.budget_bytes,
            counted=not demand.is_cpu,
        )

    def fullest(self, texts: int, max_model_len: int) -> RankMemory:
        """The rank that needs most."""
        stages = [self.stage(stage, texts, max_model_len) for stage in range(self.plan.pp)]
        return max(stages, key=lambda memory: memory.needed)

    def planned(self) -> RankMemory:
        """The rank that needs most, for what the demand asks: all texts if a number was given, else as many as fit, at
        least one per replica and at most the engine's default."""
        demand = self.demand
        wanted = self.plan.replica_share(demand.texts)
        memory = self.fullest(wanted, demand.max_model_len)
        if demand.concurrency is not None:
            return memory
        if not memory.fits:
            memory = self.fullest(1, demand.max_model_len)
        # the engine's own arithmetic: what is left goes to the cache, in blocks and not in whole texts
        engine = replace(demand.engine, max_num_seqs=wanted, memory_fraction=demand.memory_fraction)
        try:
            blocks = engine.plan_blocks(
                max_model_len=demand.max_model_len,
                block_bytes=memory.block_bytes,
                weight_bytes=memory.needed - memory.cache_bytes,
                free_bytes=demand.memory_bytes,
            )
        except OptionError:
            return memory  # not one text fits, and its `needed` says by how much
        return replace(memory, num_blocks=blocks)

    def most_texts(self, *, whole: bool = False) -> int:
        """Texts of full length that fit together, over all replicas; 0 if not one does. whole: also what is not counted
        fits, into the memory outside the budget."""
        length = self.demand.max_model_len
        return self.plan.dp * _largest(lambda texts: self._holds(texts, length, whole), 1 << 20)

    def longest_text(self, texts: int = 1, *, whole: bool = False) -> int:
        """Tokens that fit of each text, with so many per replica, at most the model's context; 0 if none does."""
        return _largest(lambda length: self._holds(texts, length, whole), max_context(self.demand.config))

    def _holds(self, texts: int, max_model_len: int, whole: bool) -> bool:
        memory = self.fullest(texts, max_model_len)
        outside = self.demand.memory_bytes - memory.budget
        return memory.fits and (memory.counted or not whole or memory.other_bytes <= outside)

    def total_bytes(self, num_blocks: int) -> dict[str, int]:
        """Weights and cache of all ranks together, with so many blocks on each."""
        per_stage = zip(self.stage_weights, self.stage_block_bytes, strict=True)
        sizes = [(sum(weights.values()), num_blocks * block) for weights, block in per_stage]
        weights, cache = (self.plan.stage_ranks * sum(column) for column in zip(*sizes, strict=True))
        return {"weights": weights, "cache": cache}


def _bytes_by_part(demand: Demand, leaves: Sequence[PlacedLeaf], plan: ShardPlan, stage: int) -> dict[str, int]:
    """Bytes of one rank of a stage; every rank of a stage holds as much, since parts are padded to one size."""
    rank = stage * plan.stage_ranks
    known: dict[ArraySpec, int] = {}  # most layers are alike
    total: Counter[str] = Counter()
    for leaf in held_leaves(leaves, plan, stage):
        if leaf.spec not in known:
            known[leaf.spec] = shard(leaf.path, leaf.spec, demand.rules, plan, rank).nbytes
        total[part_of(leaf.path)] += known[leaf.spec]
    return dict(total)


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest n of 1..limit with holds(n), for a condition that once false stays false; 0 if there is none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def runtime_bytes(demand: Demand, plan: ShardPlan, texts: int, max_model_len: int) -> int:
    """Compiled shapes with their workspace, and the runtime itself. texts: decoded together by a replica. Estimate."""
    if demand.is_cpu:
        return PROCESS_BYTES + graphs_bytes(demand, plan, texts, max_model_len)
    prefill, decode = demand.ladders(max_model_len, texts)
    drafting = [bucket for bucket in decode if demand.mtp and bucket["Q"] == 1]  # one graph more for each
    return (len(prefill) + len(decode) + len(drafting)) * GRAPH_BYTES + RUNTIME_BYTES


def communication_bytes(demand: Demand, plan: ShardPlan, texts: int, max_model_len: int) -> int:
    """Buffers of a rank's communication domains: the world's, one per axis of several ranks (a guess: axes with the
    same ranks share one, and all ranks of a stage may have one more), and that of tokens that go to their experts, as
    large as steps of up to `texts` texts want it. On a CPU what compiled collectives keep. Estimate."""
    if demand.is_cpu:
        return collectives_bytes(demand, plan, texts, max_model_len)
    if demand.mesh.ranks == 1:
        return 0
    sizes = plan.sizes()
    axes = [sizes["tp"], sizes["dp"], plan.pp]
    exchange = 0
    if num_experts(demand.config):
        axes += [sizes["ep"], sizes["ep_rest"]]
        if not plan_refusal(demand.mesh.hardware.kind, plan):
            prefill, decode = demand.ladders(max_model_len, texts)
            exchange = max(DOMAIN_BYTES, 2 * exchange_buffer_bytes(demand, plan, (*prefill, *decode)))
    return DOMAIN_BYTES * (1 + sum(size > 1 for size in axes)) + exchange


def activation_bytes(demand: Demand, plan: ShardPlan, texts: int, max_model_len: int) -> int:
    """The larger of a prefill chunk and a decode step, at full context. Estimate.

    On a CPU as the portable operators work, which write scores and copy the chosen experts; on an NPU as fused
    attention and grouped products would, which this project does not have yet.
    """
    chunk = min(demand.engine.prefill_chunk, max_model_len)
    prefill = _step_bytes(demand, plan, 1, chunk, max_model_len, is_prefill=True)
    return max(prefill, _step_bytes(demand, plan, texts, 1 + demand.mtp, max_model_len, is_prefill=False))


def _step_bytes(demand: Demand, plan: ShardPlan, texts: int, queries: int, context: int, *, is_prefill: bool) -> int:
    """texts S, queries Q, context C; residual stream, queries, what attention reads, MLP and logits, all at once."""
    config, item = demand.config, ITEM_SIZES[demand.dtype]
    tokens, heads = texts * queries, config.num_attention_heads // plan.tp
    stream = 4 * tokens * config.hidden_size * item
    logits = texts * config.vocab_size * 4
    scores = 3 * texts * heads * queries * context * 4 if demand.is_cpu else 0
    if isinstance(config, DeepseekConfig):
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        read = texts * context * latent * item if is_prefill or demand.is_cpu else 0
        wide = config.qk_head_dim if is_prefill else latent
        if is_prefill:  # keys and values of every head, expanded from the latent
            read += texts * context * heads * (config.qk_head_dim + config.v_head_dim) * item
        inner = config.intermediate_size // plan.tp
        widest = max(3 * tokens * inner * item, _expert_bytes(demand, config, plan, tokens))
        return stream + logits + scores + read + 3 * tokens * heads * wide * item + widest
    groups = config.num_key_value_heads // plan.tp
    read = 2 * texts * context * groups * config.head_dim * item if demand.is_cpu else 0
    attention = 3 * tokens * heads * config.head_dim * item
    return stream + logits + scores + read + attention + 3 * tokens * (config.intermediate_size // plan.tp) * item


def _expert_bytes(demand: Demand, config: DeepseekConfig, plan: ShardPlan, tokens: int) -> int:
    """The tokens of all replicas, gathered, and their pairs with experts, all of which may be one rank's; on a CPU also
    the copies of experts, one for each block of pairs."""
    if not config.n_routed_experts:
        return 0
    item, hidden = ITEM_SIZES[demand.dtype], config.hidden_size
    width = config.moe_intermediate_size // plan.sizes()["ep_rest"]
    pairs = plan.dp * tokens * config.num_experts_per_tok
    gathered = 2 * plan.dp * tokens * hidden if plan.dp > 1 else 0
    copied = 3 * hidden * width * min(pairs, 2 * config.n_routed_experts) if demand.is_cpu else 0
    return item * (gathered + pairs * (2 * hidden + 3 * width) + copied)
