"""What compiled shapes keep on a CPU. Measured on MindSpore 2.10, and the largest part of what a small model takes.

A kernel keeps tables for its shapes as long as its graph lives, most of all where it repeats one operand for the
other: 16 bytes for every element that a sum, product or masked fill with operands of two shapes gives, 8 for every
element that is transposed (comparisons, concatenations, gathers and sums of one shape: nothing). So a shape keeps bytes
for every token it is made for, in each layer, whether it runs or not. (By growth of the allocator's bytes in use over
graphs of twenty equal operators.)

T tokens, D hidden, H heads, G key/value heads, C context slots, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msds.config import DeepseekConfig, LlamaConfig
from msds.planning.collectives import Rule, rules
from msds.planning.demand import Demand
from msds_graphs.sharding import ShardPlan

PROCESS_BYTES = 515 << 20
"""Interpreter, MindSpore and its libraries when imported: 405 MiB; its first compilation: 110 more. Measured."""
SHAPE_BYTES = 10 << 20
"""Of a compiled shape, whatever it is of. Measured."""
DENSE_LAYER_BYTES = 5 << 19
"""Of a dense layer in a compiled shape, whatever its size: code, kernels. Measured: 1.8 to 4.5 MiB."""
EXPERT_LAYER_BYTES = 7 << 20
"""The same of a layer with experts. Measured: 5.5 to 10 MiB."""
REPEATED = 16
"""Bytes kept per element of an operator that repeats an operand."""
TRANSPOSED = 8
"""Bytes kept per transposed element."""
SELECTED = 24
"""Bytes kept per element of a selection between operands that are repeated. Measured."""
COMMUNICATION_BYTES = 40 << 20
"""Of a process that is one of several: MindSpore's communication, and the team. Measured."""
GATHER_BYTES = 3 << 18
"""Of one gathering in a compiled shape, whatever its size: its kernels. Fitted on tiny-r1 over 2 and 4 processes."""
BESIDE_BYTES = 460 << 20
"""Of the processes beside the ranks, which launch them and let them find each other. Measured."""
CONSTANT = 4
"""Bytes of an element of a constant."""


def graphs_bytes(demand: Demand, plan: ShardPlan, texts: int, max_model_len: int) -> int:
    """All shapes that serving compiles, on one rank. texts: decoded together by a replica."""
    engine, config = demand.engine, demand.config
    prefill, decode = demand.ladders(max_model_len, texts)
    total = sum(_pass_bytes(demand, plan, bucket, is_prefill=True) for bucket in prefill)
    total += sum(_pass_bytes(demand, plan, bucket, is_prefill=False) for bucket in decode)
    if isinstance(config, DeepseekConfig) and demand.mtp:
        for bucket in decode:
            if bucket["Q"] == 1:
                layer = _deepseek_layer(config, plan, bucket, engine.block_size, is_prefill=False, has_experts=True)
                total += SHAPE_BYTES + demand.mtp * (EXPERT_LAYER_BYTES + layer)
    return total + SHAPE_BYTES  # the head's one shape


def collectives_bytes(demand: Demand, plan: ShardPlan, texts: int, max_model_len: int) -> int:
    """What being one of several ranks adds: collectives are sums here, of parts that are selected between zeros, as
    large as their results. texts: decoded together by a replica."""
    if plan.ranks == 1:
        return 0
    prefill, decode = demand.ladders(max_model_len, texts)
    steps = [("prefill", bucket) for bucket in prefill] + [("decode", bucket) for bucket in decode]
    steps += [("draft", bucket) for bucket in decode if demand.mtp and bucket["Q"] == 1]
    return COMMUNICATION_BYTES + sum(
        rule.count * len(rule.places) * _rule_bytes(rule, plan)
        for step, bucket in steps
        for rule in rules(demand, plan, step, bucket)
    )


def _rule_bytes(rule: Rule, plan: ShardPlan) -> int:
    """Kept by one collective: gathered parts are selected, and joined along the second dim of logits; so are a rank's
    rows of the embedding."""
    if plan.sizes()[rule.axis] == 1:
        return 0
    elements = math.prod(rule.result)
    if rule.kind == "all_gather":
        return GATHER_BYTES + elements * (SELECTED + (TRANSPOSED if rule.axis == "tp" else 0))
    return elements * SELECTED if rule.what.startswith("embedding") else 0


def _pass_bytes(demand: Demand, plan: ShardPlan, bucket: Mapping[str, int], *, is_prefill: bool) -> int:
    """Embedding, layers and head of one shape."""
    config, block_size = demand.config, demand.engine.block_size
    tokens, context = bucket["S"] * bucket["Q"], bucket["B"] * block_size
    ends = (
        SHAPE_BYTES + REPEATED * (2 * tokens * config.hidden_size + bucket["S"] * context) + CONSTANT * tokens * context
    )
    if not isinstance(config, DeepseekConfig):
        each = DENSE_LAYER_BYTES + _llama_layer(config, plan, tokens)
        return ends + config.num_hidden_layers * each
    for index in range(config.num_hidden_layers):
        has_experts = config.n_routed_experts > 0 and config.is_moe_layer(index)
        ends += EXPERT_LAYER_BYTES if has_experts else DENSE_LAYER_BYTES
        ends += _deepseek_layer(config, plan, bucket, block_size, is_prefill=is_prefill, has_experts=has_experts)
    return ends


def _llama_layer(config: LlamaConfig, plan: ShardPlan, tokens: int) -> int:
    """Two norms, biases, rotation of queries and keys; queries, keys, values and results transposed."""
    queries = config.num_attention_heads // plan.tp * config.head_dim
    keys = config.num_key_value_heads // plan.tp * config.head_dim
    repeated = 4 * config.hidden_size + 2 * (queries + keys)
    if config.attention_bias:
        repeated += queries + 2 * keys
    return tokens * (REPEATED * repeated + TRANSPOSED * 2 * (queries + keys) + CONSTANT * 2 * keys)


def _deepseek_layer(
    config: DeepseekConfig,
    plan: ShardPlan,
    bucket: Mapping[str, int],
    block_size: int,
    *,
    is_prefill: bool,
    has_experts: bool,
) -> int:
    """Norms and rotations; what attention transposes, in prefill all the context that it expands; routing."""
    tokens, heads = bucket["S"] * bucket["Q"], config.num_attention_heads // plan.tp
    latent, rope, value = config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim
    repeated = tokens * (4 * config.hidden_size + 2 * ((config.q_lora_rank or 0) + latent) + 2 * (heads + 1) * rope)
    if is_prefill:
        context = bucket["S"] * bucket["B"] * block_size
        transposed = tokens * heads * (config.qk_head_dim + value)
        transposed += context * heads * (config.qk_nope_head_dim + value)
    else:
        transposed = tokens * heads * (config.qk_head_dim + 2 * latent + value)
    constant, selected = tokens * (latent + rope), 0
    if has_experts:
        experts, chosen = config.n_routed_experts, config.num_experts_per_tok
        # ranking the experts, picking K of them, and their outputs times their weights
        pairs = plan.dp * tokens * chosen
        repeated += tokens * (2 * experts + 2 * chosen * experts) + pairs * config.hidden_size
        repeated += pairs * experts // plan.ep  # finding each pair its row
        constant += tokens * experts
        if plan.stage_ranks > 1:  # the outputs of a rank's own experts, between zeros for those of others
            selected = pairs * config.hidden_size
    return REPEATED * repeated + TRANSPOSED * transposed + CONSTANT * constant + SELECTED * selected
