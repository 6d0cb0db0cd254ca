"""Llama and Qwen2 decoders (the R1-Distill models): grouped-query attention and SwiGLU as pure functions.

The two `model_type`s differ by biases only. T = S * Q tokens, S sequences, Q query tokens per sequence, C context
slots, D hidden, H query heads, G key/value heads, K head features.
"""

from typing import Any

from mindspore import Tensor

from msds.config import LlamaConfig
from msds.models.cut import cut_mlp, row_linear
from msds.models.ends import Batch, Cache, Outputs, Params, embed, outputs, traced
from msds.models.rotary import rotary_constants
from msds.models.specs.llama import cache_spec as cache_spec
from msds.models.specs.llama import derive as derive
from msds.models.specs.llama import derived_spec as derived_spec
from msds.models.specs.llama import spec as spec
from msds_graphs.plan import Plan
from msds_ops.attention import attend, attention_bias, causal_mask
from msds_ops.cache import cache_read, cache_write, context_mask, context_slots, head_rows
from msds_ops.linear import linear
from msds_ops.norm import rms_norm
from msds_ops.rope import rope_cos_sin, rotate

# --- steps ---------------------------------------------------------------------------------------------------


def forward(params: Params, batch: Batch, config: LlamaConfig, plan: Plan, trace: bool = False) -> Outputs:
    """The definition: teacher-forced, no cache.

    batch: tokens, positions [S, Q], query_lens [S], int32; tokens beyond query_lens are padding.
    Returns logits [S, Q, vocab] float32, hidden [S, Q, D] after the final norm, is_finite [S, Q] bool, and with
    `trace` layers: the residual stream [S, Q, D] after each layer.
    """
    x = embed(params, batch["tokens"], plan.ranks)
    rope = _rope(config, batch["positions"])
    bias = attention_bias(causal_mask(batch["positions"], batch["query_lens"]), _num_heads(params, "q_proj", config))
    states: tuple[Tensor, ...] = ()
    for layer in params["layers"]:
        q, k, v = _project(layer, x, batch, rope, config)
        x = x + _attend(layer["self_attn"], q, k, v, bias, config, plan)
        x = x + _mlp(layer, x, config, plan)
        states = (*states, x)
    return traced(outputs(params, params["norm"], x, batch, 0, config, plan.ranks), states, batch, trace)


def forward_train(params: Params, batch: Batch, config: LlamaConfig, plan: Plan) -> dict[str, Any]:
    """`forward` in the form that training asks of every family: these models have neither MTP layers nor routing."""
    return {"logits": forward(params, batch, config, plan)["logits"], "mtp_logits": (), "routing": ()}


def prefill(
    params: Params,
    cache: Cache,
    batch: Batch,
    config: LlamaConfig,
    plan: Plan,
    num_logits: int,
    block_size: int,
    trace: bool = False,
) -> tuple[Outputs, Cache]:
    """New tokens per sequence over what is already cached.

    batch: tokens, positions, slot_mapping [S, Q], block_tables [S, B], query_lens, context_lens [S], int32.
    Returns logits [S, num_logits, vocab] float32 of the last `num_logits` tokens of each sequence (0: all), hidden
    likewise, is_finite [S, Q] of its new tokens, layers with `trace` (see `forward`), and the written cache.
    """
    x = embed(params, batch["tokens"], plan.ranks)
    rope = _rope(config, batch["positions"])
    heads = _num_heads(params, "k_proj", config)
    num_slots = cache["layers"][0]["k"].shape[0] // heads
    slots = context_slots(batch["block_tables"], block_size)  # [S, C]
    context_rows = head_rows(slots, heads, num_slots)  # [S, G, C]
    new_rows = head_rows(batch["slot_mapping"], heads, num_slots)  # [S, G, Q]
    bias = attention_bias(context_mask(batch["positions"], slots.shape[1]), _num_heads(params, "q_proj", config))
    impl = plan.implementation("cache_write")
    pages: tuple[Params, ...] = ()
    states: tuple[Tensor, ...] = ()
    for layer, page in zip(params["layers"], cache["layers"]):  # noqa: B905  (graph mode has no strict=)
        q, k, v = _project(layer, x, batch, rope, config)
        page_k, page_v = cache_write(page["k"], k, new_rows, impl), cache_write(page["v"], v, new_rows, impl)
        context_k, context_v = cache_read(page_k, context_rows), cache_read(page_v, context_rows)
        x = x + _attend(layer["self_attn"], q, context_k, context_v, bias, config, plan)
        x = x + _mlp(layer, x, config, plan)
        pages, states = (*pages, {"k": page_k, "v": page_v}), (*states, x)
    return traced(outputs(params, params["norm"], x, batch, num_logits, config, plan.ranks), states, batch, trace), {
        "layers": pages
    }


decode = prefill
"""One or a few new tokens per sequence: with keys and values in the cache, the same mathematics as a chunk."""


def _num_heads(params: Params, name: str, config: LlamaConfig) -> int:
    """Query ("q_proj") or key/value ("k_proj") heads of this rank, as its slice of the weights says."""
    return int(params["layers"][0]["self_attn"][name]["weight"].shape[0] // config.head_dim)


def _rope(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    inv_freq, amplitude = rotary_constants(config, config.head_dim)
    return rope_cos_sin(positions.reshape(-1), inv_freq, amplitude, False)


def _project(layer: Params, x: Tensor, batch: Batch, rope: Any, config: LlamaConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[T, D] -> rotated q [S, Q, H, K], rotated k [S, G, Q, K], v [S, G, Q, K]."""
    params = layer["self_attn"]
    sequences, queries = batch["tokens"].shape
    x = rms_norm(x, layer["input_layernorm"]["weight"], config.rms_norm_eps)
    q = linear(params["q_proj"], x).reshape(x.shape[0], -1, config.head_dim)
    k = linear(params["k_proj"], x).reshape(x.shape[0], -1, config.head_dim)
    v = linear(params["v_proj"], x).reshape(sequences, queries, -1, config.head_dim)
    q = rotate(q, rope[0], rope[1], False).reshape(sequences, queries, -1, config.head_dim)
    k = rotate(k, rope[0], rope[1], False).reshape(sequences, queries, -1, config.head_dim)
    return q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _attend(params: Params, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, config: LlamaConfig, plan: Plan) -> Tensor:
    """q [S, Q, H, K], k and v [S, G, C, K], bias [S, H, Q, C] -> [T, D]."""
    out = attend(q, k, v, bias, config.head_dim**-0.5)
    return row_linear(params["o_proj"], out.reshape(q.shape[0] * q.shape[1], -1), plan.ranks)


def _mlp(layer: Params, x: Tensor, config: LlamaConfig, plan: Plan) -> Tensor:
    x = rms_norm(x, layer["post_attention_layernorm"]["weight"], config.rms_norm_eps)
    return cut_mlp(layer["mlp"], x, plan.ranks)
