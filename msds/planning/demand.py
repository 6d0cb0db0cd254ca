"""What a plan is asked for: a model, a mesh, number types, lengths. Checked here, before any arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from msds.config import DeepseekConfig, ModelConfig
from msds.engine.ladder import step_ladders
from msds.errors import OptionError
from msds.models.specs import model_specs
from msds.models.specs.parts import with_slots
from msds.models.specs.rules import sharding_rules
from msds.options import CPU_DTYPES, MAX_SPECULATIVE_TOKENS, EngineOptions, free_memory_bytes
from msds.planning.quantised import SCHEMES, quantised_spec
from msds.presets import resolve_model
from msds.weights import without_mtp
from msds_graphs.mesh import Mesh
from msds_graphs.sharding import PlacedLeaf, Rules, place_leaves

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

NPU_MEMORY_FRACTION = 0.9
"""Of an NPU's memory; the rest is left to the driver, the runtime's own allocations and fragmentation. Estimate."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """One question to the planner.

    model: what the user called it. config: without MTP layers where mtp is 0. dtype: of weights and cache.
    quant: a scheme of SCHEMES. concurrency: texts of full length, decoded together by all replicas, that must fit;
    None: as many of the engine's default as do, at least one per replica. mtp: draft tokens per step. memory_bytes: of
    one rank, before memory_fraction. engine: what the engine would be given, whether and with how many replicas it
    balances experts included.
    """

    model: str
    config: ModelConfig
    mesh: Mesh
    dtype: str
    quant: str
    max_model_len: int
    concurrency: int | None
    mtp: int
    memory_bytes: int
    memory_fraction: float
    engine: EngineOptions

    @cached_property
    def rules(self) -> Rules:
        """Which mesh axis cuts which axis of a tree."""
        return sharding_rules(self.config)

    @cached_property
    def weights(self) -> tuple[PlacedLeaf, ...]:
        """The arrays that ranks keep, quantised where the scheme says, with the slots of redundant experts."""
        tree = model_specs(self.config).derived_spec(self.config, self.dtype)
        tree = with_slots(tree, self.engine.num_redundant_experts)
        return place_leaves(quantised_spec(tree, self.quant), self.rules)

    @cached_property
    def block(self) -> tuple[PlacedLeaf, ...]:
        """The arrays of one cache block."""
        tree = model_specs(self.config).cache_spec(self.config, 1, self.engine.block_size, self.dtype)
        return place_leaves(tree, self.rules)

    def ladders(self, max_model_len: int, texts: int) -> tuple[tuple[dict[str, int], ...], tuple[dict[str, int], ...]]:
        """The shapes that serving compiles: (prefill, decode), ascending. texts: decoded together by a replica."""
        return step_ladders(
            max_model_len=max_model_len,
            max_num_seqs=texts,
            prefill_chunk=self.engine.prefill_chunk,
            block_size=self.engine.block_size,
            num_drafts=self.mtp,
        )

    @property
    def balances(self) -> bool:
        """Whether experts are counted and moved."""
        return self.engine.eplb_step_interval > 0

    @property
    def num_slots(self) -> int:
        """Slots for routed experts per MoE layer over all ranks, 0 for dense models."""
        experts = num_experts(self.config)
        return experts + self.engine.num_redundant_experts if experts else 0

    @property
    def is_cpu(self) -> bool:
        """Whether the ranks are processes of this machine."""
        return self.mesh.hardware.kind == "cpu"

    @property
    def budget_bytes(self) -> int:
        """Bytes of one rank that may be planned with."""
        return int(self.memory_bytes * self.memory_fraction)

    @property
    def texts(self) -> int:
        """Texts of full length that are planned for, over all replicas."""
        return self.concurrency if self.concurrency is not None else self.engine.max_num_seqs


def make_demand(
    model: str,
    mesh: str,
    *,
    dtype: str | None = None,
    quant: str = "none",
    max_model_len: int | None = None,
    concurrency: int | None = None,
    mtp: int = 0,
    eplb_step_interval: int = 0,
    num_redundant_experts: int = 0,
) -> Demand:
    """A demand from what a user types. ConfigError, OptionError or GraphError name what is wrong, and what is legal."""
    # Nine parameters: the options of a command, by keyword.
    config = resolve_model(model)
    parsed = Mesh.parse(mesh)
    is_cpu = parsed.hardware.kind == "cpu"
    if concurrency is not None and concurrency < 1:
        raise OptionError(f"concurrency is {concurrency}: it must be at least 1")
    if quant not in SCHEMES:
        raise OptionError(f"quant is {quant!r}: use one of {', '.join(SCHEMES)}")
    if is_cpu and quant != "none":
        raise OptionError(f"quant is {quant!r}: on a CPU the engine keeps plain float32 weights; use none, or a2 or a3")
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}: use one of {', '.join(DTYPES)}")
    number_type = DTYPES[dtype] if dtype is not None else "float32" if is_cpu else "bfloat16"
    if is_cpu and number_type not in CPU_DTYPES:
        names = ", ".join(name for name, long in DTYPES.items() if long in CPU_DTYPES)
        raise OptionError(
            f"dtype is {dtype!r}: on a CPU the engine keeps float32 (MindSpore has no bfloat16 matrix product there, "
            f"and its float16 one is six times slower); use {names}, or a2 or a3"
        )
    # the engine's own checks and defaults
    engine = EngineOptions(
        max_model_len=max_model_len,
        eplb_step_interval=eplb_step_interval,
        num_redundant_experts=num_redundant_experts,
    )
    if not 0 <= mtp <= MAX_SPECULATIVE_TOKENS:
        raise OptionError(
            f"mtp is {mtp}: it must be 0 (no speculation) or the number of draft tokens, at most "
            f"{MAX_SPECULATIVE_TOKENS}"
        )
    if mtp and not getattr(config, "num_nextn_predict_layers", 0):
        raise OptionError(f"mtp is {mtp}, but {model} has no MTP layer: use 0")
    memory = free_memory_bytes() // parsed.ranks if is_cpu else parsed.hardware.memory_bytes
    assert memory is not None
    return Demand(
        model=model,
        config=config if mtp else without_mtp(config),
        mesh=parsed,
        dtype=number_type,
        quant=quant,
        max_model_len=engine.resolve_max_model_len(config),
        concurrency=concurrency,
        mtp=mtp,
        memory_bytes=memory,
        memory_fraction=engine.memory_fraction if is_cpu else NPU_MEMORY_FRACTION,
        engine=engine,
    )


def num_experts(config: ModelConfig) -> int:
    """Routed experts per MoE layer, 0 for dense models."""
    return config.n_routed_experts if isinstance(config, DeepseekConfig) else 0
