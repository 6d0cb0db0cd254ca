"""What a plan says about communication: which collectives each layer of each step has, before anything is compiled.

The one account of it: the dry run holds compiled graphs against it, the planner's speeds are made of it. Host code.
T = S * Q tokens of a replica's step, D hidden, V vocabulary; padded to equal parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from msds.config import DeepseekConfig
from msds.errors import OptionError
from msds.planning.demand import Demand, num_experts
from msds_graphs.exchange_limits import buffer_bytes, plan_refusal, received_rows, step_refusal
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
    """`count` collectives of one kind at each of `places`. shape: what goes in on each rank; result: what comes out.

    sent: bytes that each rank sends, its own part included, where these do not say it: of an exchange the rows of
    chosen pairs, one per expert of a token, which even routing deals alike to all ranks. They are as many in any
    routing; what a rank receives may be up to `result`.
    """

    what: str
    kind: str
    axis: str
    dtype: str
    shape: tuple[int, ...]
    result: tuple[int, ...]
    places: tuple[str, ...]
    count: int = 1
    sent: int = 0

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


def exchange_refusal(demand: Demand, plan: ShardPlan, bucket: Mapping[str, int]) -> str:
    """Why the experts of a step are not reached by Ascend's operators; "" if they are."""
    config, machine = demand.config, demand.mesh.hardware.kind
    assert isinstance(config, DeepseekConfig)
    sizes = config.hidden_size, config.num_experts_per_tok, _slots(demand)
    return plan_refusal(machine, plan) or step_refusal(machine, plan.ep, _tokens(bucket), *sizes, demand.dtype)


def exchange_buffer_bytes(demand: Demand, plan: ShardPlan, buckets: Iterable[Mapping[str, int]]) -> int:
    """What steps of these buckets want of each buffer of the group that exchanges tokens; 0 if none does."""
    config = demand.config
    if not isinstance(config, DeepseekConfig) or not config.n_routed_experts:
        return 0
    tokens = [_tokens(bucket) for bucket in buckets if not exchange_refusal(demand, plan, bucket)]
    if not tokens:
        return 0
    sizes = config.hidden_size, config.num_experts_per_tok, _slots(demand)
    return buffer_bytes(demand.mesh.hardware.kind, plan.ep, max(tokens), *sizes)


def _expert_rules(
    demand: Demand, plan: ShardPlan, bucket: Mapping[str, int], layers: tuple[str, ...]
) -> Iterator[Rule]:
    """Replicas share experts: tokens go to the ranks of their experts and back, where Ascend's operators may be used;
    else all see the tokens of all, and each gets the sums of its own back.

    What the ranks of a replica add up to is the layer's sum over tp, shared experts included.
    """
    config, dp, tokens = demand.config, plan.dp, _tokens(bucket)
    assert isinstance(config, DeepseekConfig)
    hidden, chosen = config.hidden_size, config.num_experts_per_tok
    own, whole = (tokens, hidden), (dp * tokens, hidden)
    routing = 2 * chosen  # ids and weights, side by side

    def rule(
        what: str,
        kind: str,
        dtype: str,
        shape: tuple[int, int],
        result: tuple[int, int],
        axis: str = "dp",
        sent: int = 0,
    ) -> Rule:
        return Rule(what=what, kind=kind, axis=axis, dtype=dtype, shape=shape, result=result, places=layers, sent=sent)

    if not exchange_refusal(demand, plan, bucket):
        rows = received_rows(plan.ep, tokens, chosen, _slots(demand)), hidden
        sent = tokens * chosen * hidden * ITEM_SIZES[demand.dtype]
        yield rule("tokens to their experts", "dispatch", demand.dtype, own, rows, "exchange", sent)
        yield rule("experts to tokens", "combine", demand.dtype, rows, own, "exchange", sent)
    else:
        yield rule("tokens to experts", "all_gather", demand.dtype, own, whole)
        yield rule("their routing", "all_gather", "float32", (tokens, routing), (dp * tokens, routing))
        yield rule("experts to tokens", "reduce_scatter", demand.dtype, whole, own)
    if demand.balances:
        yield rule("choices to count", "all_gather", "int32", (tokens, chosen), (dp * tokens, chosen))


def _slots(demand: Demand) -> int:
    """Places for experts of all ranks."""
    return num_experts(demand.config) + demand.engine.num_redundant_experts


def _tokens(bucket: Mapping[str, int]) -> int:
    """Of a replica's step."""
    return bucket["S"] * bucket["Q"]


def _sum(demand: Demand, plan: ShardPlan, bucket: Mapping[str, int], what: str, places: tuple[str, ...]) -> Rule:
    """A sum over the ranks of a replica, of every token."""
    shape = (_tokens(bucket), demand.config.hidden_size)
    return Rule(what=what, kind="all_reduce", axis="tp", dtype=demand.dtype, shape=shape, result=shape, places=places)


def _is_moe(demand: Demand, layer: str) -> bool:
    config = demand.config
    if not isinstance(config, DeepseekConfig):
        return False
    kind, _, index = layer.partition(".")
    return config.n_routed_experts > 0 if kind == "mtp" else config.is_moe_layer(int(index))
