"""What a plan says about communication: which collectives each layer of each step has, before anything is compiled.

The one account of it: the dry run holds compiled graphs against it, the planner's speeds are made of it. Host code.
T = S * Q tokens of a replica's step, D hidden, V vocabulary; padded to equal parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msds.config import DeepseekConfig
from msds.errors import OptionError
from msds.planning.demand import Demand
from msds_graphs.sharding import ShardPlan
from msds_graphs.specs import ITEM_SIZES

STEPS = ("prefill", "decode", "draft", "head")

ENDS = ("ends",)
"""Before the first layer and after the last."""
_LAYER = re.compile(r"^(?:params\.|stack\.)?((?:layers|mtp)\.\d+)\.")


def place_of(parameter: str) -> str:
    """Where a collective is, by the Parameter that was used last before it: `layers.3`, `mtp.0` or `ends`."""
    match = _LAYER.match(parameter)
    return match[1] if match else ENDS[0]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`count` collectives of one kind at each of `places`. shape: what goes in on each rank; result: what comes out."""

    what: str
    kind: str
    axis: str
    dtype: str
    shape: tuple[int, ...]
    result: tuple[int, ...]
    places: tuple[str, ...]
    count: int = 1

    @property
    def nbytes(self) -> tuple[int, int]:
        """What goes in and what comes out on each rank."""
        item = ITEM_SIZES[self.dtype]
        return math.prod(self.shape) * item, math.prod(self.result) * item


def rules(demand: Demand, plan: ShardPlan, step: str, bucket: Mapping[str, int]) -> tuple[Rule, ...]:
    """The collectives of a step, those of groups of one rank included; OptionError for a step without rules."""
    if step == "draft":
        passes = [_pass(demand, plan, bucket, ("mtp.0",), rows=1, with_entries=False) for _ in range(demand.mtp)]
        drafts = _result(plan, "drafts", "int32", (bucket["S"], demand.mtp))
        return (*(rule for one in passes for rule in one), drafts)
    if step not in STEPS:
        raise OptionError(f"step {step!r} has no rules of communication: write them in {__name__}")
    if step == "head":
        return (_logits(demand, plan, bucket["T"]),)
    layers = tuple(f"layers.{index}" for index in range(demand.config.num_hidden_layers))
    rows = 1 if step == "prefill" else bucket["Q"]
    passed = _pass(demand, plan, bucket, layers, rows=rows, with_entries=demand.mtp > 0)
    return (*passed, *_results(demand, plan, bucket, rows))


def dense_rules(
    demand: Demand, plan: ShardPlan, bucket: Mapping[str, int], layers: tuple[str, ...]
) -> tuple[Rule, ...]:
    """Two sums per layer: the ranks of a replica have cut heads and MLP widths, and each has a share of every token."""
    return tuple(_sum(demand, plan, bucket, what, layers) for what in ("heads", "MLP"))


def _pass(
    demand: Demand,
    plan: ShardPlan,
    bucket: Mapping[str, int],
    layers: tuple[str, ...],
    *,
    rows: int,
    with_entries: bool,
) -> Iterator[Rule]:
    """Embedding, layers and head. rows: of logits per sequence. with_entries: the MTP layer's cache is written too."""
    yield _sum(demand, plan, bucket, "embedding", ENDS)  # each rank has some rows of the table
    if with_entries:
        yield _sum(demand, plan, bucket, "embedding of MTP entries", ENDS)
    experts = tuple(layer for layer in layers if _is_moe(demand, layer))
    yield from dense_rules(demand, plan, bucket, layers)
    if experts:
        yield from _expert_rules(demand, plan, bucket, experts)
    yield _logits(demand, plan, bucket["S"] * min(rows, bucket["Q"]))


def _results(demand: Demand, plan: ShardPlan, bucket: Mapping[str, int], rows: int) -> Iterator[Rule]:
    """What a step gives for each replica; rank 0 samples for all."""
    config, tokens = demand.config, (bucket["S"], bucket["Q"])
    logits = (bucket["S"], min(rows, bucket["Q"]), config.vocab_size)
    yield _result(plan, "logits of replicas", "float32", logits)
    yield _result(plan, "states of replicas", demand.dtype, (*tokens, config.hidden_size))
    yield _result(plan, "whether they are finite", "int8", tokens)


def _result(plan: ShardPlan, what: str, dtype: str, shape: tuple[int, ...]) -> Rule:
    whole = (plan.dp, *shape)
    return Rule(what=what, kind="all_gather", axis="dp", dtype=dtype, shape=(1, *shape), result=whole, places=ENDS)


def _logits(demand: Demand, plan: ShardPlan, rows: int) -> Rule:
    """Each rank of a replica has a part of the vocabulary, and all need the whole."""
    part = -(-demand.config.vocab_size // plan.tp)
    return Rule(
        what="logits of the vocabulary",
        kind="all_gather",
        axis="tp",
        dtype="float32",
        shape=(part, rows),
        result=(part * plan.tp, rows),
        places=ENDS,
    )


def _expert_rules(
    demand: Demand, plan: ShardPlan, bucket: Mapping[str, int], layers: tuple[str, ...]
) -> Iterator[Rule]:
    """Replicas share experts: all see the tokens of all, and each gets the sums of its own back.

    What the ranks of a replica add up to is the layer's sum over tp, shared experts included.
    """
    config, dp, tokens = demand.config, plan.dp, bucket["S"] * bucket["Q"]
    assert isinstance(config, DeepseekConfig)
    own, whole = (tokens, config.hidden_size), (dp * tokens, config.hidden_size)
    chosen = 2 * config.num_experts_per_tok  # ids and weights, side by side

    def rule(what: str, kind: str, dtype: str, shape: tuple[int, int], result: tuple[int, int]) -> Rule:
        return Rule(what=what, kind=kind, axis="dp", dtype=dtype, shape=shape, result=result, places=layers)

    yield rule("tokens to experts", "all_gather", demand.dtype, own, whole)
    yield rule("their routing", "all_gather", "float32", (tokens, chosen), (dp * tokens, chosen))
    yield rule("experts to tokens", "reduce_scatter", demand.dtype, whole, own)
    if demand.balances:
        chosen = config.num_experts_per_tok
        yield rule("choices to count", "all_gather", "int32", (tokens, chosen), (dp * tokens, chosen))


def _sum(demand: Demand, plan: ShardPlan, bucket: Mapping[str, int], what: str, places: tuple[str, ...]) -> Rule:
    """A sum over the ranks of a replica, of every token."""
    shape = (bucket["S"] * bucket["Q"], demand.config.hidden_size)
    return Rule(what=what, kind="all_reduce", axis="tp", dtype=demand.dtype, shape=shape, result=shape, places=places)


def _is_moe(demand: Demand, layer: str) -> bool:
    config = demand.config
    if not isinstance(config, DeepseekConfig):
        return False
    kind, _, index = layer.partition(".")
    return config.n_routed_experts > 0 if kind == "mtp" else config.is_moe_layer(int(index))
