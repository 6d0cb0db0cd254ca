"""Seconds of one step, estimated from bytes, operations and messages. Nothing here was measured on an NPU.

A step of a rank takes the longer of reading its bytes and doing its operations, plus its messages (those that the model
functions really have, by the rules that the dry run checks), plus a fixed time per layer. Peaks come from the mesh, the
shares of them that are reached are:
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msds.config import DeepseekConfig
from msds.planning.collectives import rules
from msds.planning.demand import Demand
from msds.planning.memory import Ledger
from msds_graphs.sharding import ShardPlan, stage_layers
from msds_graphs.specs import ITEM_SIZES

MEMORY_SHARE = 0.6
"""Of the memory bandwidth that streaming weights reaches. Estimate."""
COMPUTE_SHARE = 0.5
"""Of the peak operations that large products reach. Estimate."""
LAYER_SECONDS = 100e-6
"""Launching and small operators of one layer on an NPU. Estimate: with it and MEMORY_SHARE, R1-Distill-Qwen-1.5B comes
near the one single-stream figure that is published for one NPU, so that figure is no test of this model."""
CPU_LAYER_SECONDS = 400e-6
"""The same on two CPU cores. Estimate."""
MTP_ACCEPTED = 0.7
"""Share of draft tokens accepted, each depth on its own; the figure that cann-recipes-infer assumes for one draft."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step by cause: reading memory or operations (the longer of them), messages, launching."""

    memory: float
    compute: float
    links: float
    launch: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute) + self.links + self.launch

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(
            memory=self.memory + other.memory,
            compute=self.compute + other.compute,
            links=self.links + other.links,
            launch=self.launch + other.launch,
        )

    @property
    def causes(self) -> dict[str, float]:
        """What the seconds are made of; of memory and operations only the longer counts."""
        name = "memory" if self.memory >= self.compute else "operations"
        return {name: max(self.memory, self.compute), "links": self.links, "launching": self.launch}


@dataclass(frozen=True)
class Step:
    """texts per replica, query tokens of each, context they see; prefill expands the latent, decode absorbs it."""

    texts: int
    queries: int
    context: int
    is_prefill: bool


def decode_time(ledger: Ledger, texts: int, context: int) -> StepTime:
    """From one token of a text to its next, with `texts` texts over all replicas, each seeing `context` tokens.

    Pipeline stages work side by side on as many shares of the texts, and a text passes through all of them.
    """
    share = -(-ledger.plan.replica_share(texts) // ledger.plan.pp)
    parts = _stage_times(ledger, Step(share, 1 + ledger.demand.mtp, context, False))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def prefill_time(ledger: Ledger, context: int) -> StepTime:
    """From one chunk of a prompt to the next, in every replica, at `context` tokens: the slowest stage decides."""
    chunk = min(ledger.demand.engine.prefill_chunk, context)
    return max(_stage_times(ledger, Step(1, chunk, context, True)), key=lambda part: part.seconds)


def tokens_per_step(mtp: int) -> float:
    """Tokens that a decode step gives a text: one, and the drafts accepted in a row."""
    return sum(MTP_ACCEPTED**depth for depth in range(mtp + 1))


def _stage_times(ledger: Ledger, step: Step) -> list[StepTime]:
    messages = _messages(ledger, step)
    return [_stage_time(ledger, stage, step, messages) for stage in range(ledger.plan.pp)]


def _stage_time(ledger: Ledger, stage: int, step: Step, messages: Mapping[str, float]) -> StepTime:
    demand, hardware = ledger.demand, ledger.demand.mesh.hardware
    nbytes = _bytes_read(ledger, stage, step)
    plain, quantised = _operations(ledger, stage, step)
    rate = hardware.flops.get(demand.dtype, hardware.flops["float32"])
    fast = hardware.flops["int8"] if demand.quant == "w8a8" else rate
    layers = len(stage_layers(demand.config.num_hidden_layers, ledger.plan, stage))
    layers += demand.mtp if stage == ledger.plan.pp - 1 else 0
    launch = CPU_LAYER_SECONDS if demand.is_cpu else LAYER_SECONDS
    return StepTime(
        memory=nbytes / (hardware.memory_bandwidth * MEMORY_SHARE),
        compute=(plain / rate + quantised / fast) / COMPUTE_SHARE,
        links=_stage_messages(ledger, stage, step, messages),
        launch=layers * launch,
    )


def _touched(demand: Demand, plan: ShardPlan, step: Step) -> float:
    """Expected share of the expert slots that at least one token of the step chooses, routing being even."""
    if not demand.num_slots:
        return 0.0
    assert isinstance(demand.config, DeepseekConfig)
    tokens = plan.dp * step.texts * step.queries
    return 1.0 - (1.0 - demand.config.num_experts_per_tok / demand.num_slots) ** tokens


def _read_weights(ledger: Ledger, stage: int, step: Step) -> dict[str, float]:
    """Bytes of weights that a step reads, by part. Decode reads the absorbed copies, which stand for kv_b_proj."""
    demand, weights = ledger.demand, dict(ledger.stage_weights[stage])
    read: dict[str, float] = {part: float(size) for part, size in weights.items() if part != "embedding"}
    if step.is_prefill:
        read.pop("absorbed", None)
        read.pop("mtp", None)
    elif "absorbed" in read:
        # kv_b_proj has as many elements as its absorbed copies and is not read
        item = ITEM_SIZES["int8"] if demand.quant != "none" else ITEM_SIZES[demand.dtype]
        read["attention"] -= read["absorbed"] / ITEM_SIZES[demand.dtype] * item
    if demand.config.tie_word_embeddings and stage == ledger.plan.pp - 1:
        read["head"] = float(weights["embedding"])
    touched = _touched(demand, ledger.plan, step)
    if "routed_experts" in read:
        read["routed_experts"] *= touched
    if "mtp" in read:  # nearly all of an MTP layer is experts; each draft runs one layer
        layers = getattr(demand.config, "num_nextn_predict_layers", 0) or 1
        read["mtp"] *= demand.mtp / layers * (touched or 1.0)
    return read


def _bytes_read(ledger: Ledger, stage: int, step: Step) -> float:
    cache = step.texts * step.context * ledger.stage_block_bytes[stage] / ledger.demand.engine.block_size
    return sum(_read_weights(ledger, stage, step).values()) + cache


def _operations(ledger: Ledger, stage: int, step: Step) -> tuple[float, float]:
    """(in the number type, in the type of quantised products): two per weight and token, and attention's own."""
    demand, plan, config = ledger.demand, ledger.plan, ledger.demand.config
    tokens = step.texts * step.queries
    item = ITEM_SIZES[demand.dtype]
    weight_item = 1 if demand.quant != "none" else item
    read = _read_weights(ledger, stage, step)
    quantised = 2.0 * tokens * sum(read.get(part, 0) for part in ("attention", "dense_mlp", "shared_experts"))
    quantised /= weight_item
    plain = 2.0 * tokens * (read.get("absorbed", 0) / item + read.get("router", 0) / 4)
    plain += 2.0 * (step.texts if step.is_prefill else tokens) * read.get("head", 0) / item
    if demand.num_slots and isinstance(config, DeepseekConfig):
        # each token's K experts lie on any rank: the mean load is K / slots of the local weights, for every token
        share = plan.dp * tokens * config.num_experts_per_tok / demand.num_slots
        local = ledger.stage_weights[stage].get("routed_experts", 0) / weight_item
        quantised += 2.0 * share * local
        drafts = ledger.stage_weights[stage].get("mtp", 0) / weight_item
        quantised += 0.0 if step.is_prefill else 2.0 * share * drafts * demand.mtp
    layers = len(stage_layers(config.num_hidden_layers, plan, stage))
    heads = config.num_attention_heads // plan.tp
    if isinstance(config, DeepseekConfig):
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        width = config.qk_head_dim + config.v_head_dim if step.is_prefill else latent + config.kv_lora_rank
    else:
        width = 2 * config.head_dim
    plain += 2.0 * layers * tokens * step.context * heads * width
    if step.is_prefill and "absorbed" in ledger.stage_weights[stage]:  # expand the context behind the chunk
        expand = ledger.stage_weights[stage]["absorbed"] / item
        quantised += 2.0 * step.texts * (step.context - step.queries) * expand
    return plain, quantised


def _messages(ledger: Ledger, step: Step) -> dict[str, float]:
    """Place (a layer, the ends) -> seconds of the collectives that the functions have there."""
    bucket = {"S": step.texts, "Q": step.queries}
    found = rules(ledger.demand, ledger.plan, "prefill" if step.is_prefill else "decode", bucket)
    if ledger.demand.mtp and not step.is_prefill:
        found += rules(ledger.demand, ledger.plan, "draft", {"S": step.texts, "Q": 1})
    seconds: dict[str, float] = {}
    for rule in found:
        each = rule.count * ledger.links.seconds(rule)
        for place in rule.places:
            seconds[place] = seconds.get(place, 0.0) + each
    return seconds


def _stage_messages(ledger: Ledger, stage: int, step: Step, messages: Mapping[str, float]) -> float:
    """Those of a stage's layers; what is not of a layer is counted with the last stage, which has the logits.

    The residual stream goes to the next stage, a part from each rank of a replica.
    """
    plan, config = ledger.plan, ledger.demand.config
    held = {f"layers.{index}" for index in stage_layers(config.num_hidden_layers, plan, stage)}
    if stage == plan.pp - 1:
        held |= {place for place in messages if not place.startswith("layers.")}
    seconds = sum(each for place, each in messages.items() if place in held)
    if plan.pp > 1:
        tokens = step.texts * step.queries
        seconds += ledger.links.hand_over(tokens * config.hidden_size * ITEM_SIZES[ledger.demand.dtype] / plan.tp)
    return seconds
