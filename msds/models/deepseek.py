"""DeepSeek-V2 and V3 (and R1, V3.1): multi-head latent attention and DeepSeekMoE as pure functions.

Papers: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437). The two `model_type`s differ by fields of
the config only (how experts are scored and grouped, how their weights are scaled, whether there are MTP layers).

T = S * Q tokens, S sequences, Q query tokens per sequence, C context slots, D hidden, H heads, N nope features,
R rope features, V value features, L latent (kv_lora_rank), E experts, K experts per token.

The static arguments (config, plan, num_logits, depth) may be given by name outside compiled code; inside it a call by
name costs one of the six levels of containers that graph mode allows.

Attention is written twice. `forward` and `prefill` expand the latent into keys and values (naive); `decode` and
`mtp` fold the expansion into the query and the output (absorbed) and read the latent as it lies in the cache.
"""

from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from msds.config import DeepseekConfig
from msds.models.cut import cut_mlp, row_linear
from msds.models.ends import Batch, Cache, Outputs, Params, embed, final_hidden, outputs, traced
from msds.models.ends import head as head
from msds.models.rotary import mla_softmax_scale, rotary_constants
from msds.models.specs.deepseek import cache_spec as cache_spec
from msds.models.specs.deepseek import derive as derive
from msds.models.specs.deepseek import derived_spec as derived_spec
from msds.models.specs.deepseek import spec as spec
from msds_graphs.collectives import after, all_gather, all_reduce, reduce_scatter
from msds_graphs.exchange import combine, dispatch, exchange_form
from msds_graphs.plan import Plan
from msds_graphs.ranks import Ranks
from msds_ops.attention import attend, attend_latent, attention_bias, causal_mask
from msds_ops.cache import cache_add, cache_read, cache_write, context_mask, context_slots
from msds_ops.iota import iota
from msds_ops.linear import linear, linear_float32, swiglu_mlp
from msds_ops.moe import (
    count_chosen,
    moe_experts,
    moe_experts_sorted,
    scores_from_logits,
    select_groups,
    top_experts,
)
from msds_ops.norm import rms_norm
from msds_ops.rope import rope_cos_sin, rotate

LATENT_NORM_EPS = 1e-6
"""q_a_layernorm and kv_a_layernorm take their default epsilon in the published code, not config.rms_norm_eps."""

_bmm = ops.BatchMatMul()
_bmm_nt = ops.BatchMatMul(transpose_b=True)


# --- steps ---------------------------------------------------------------------------------------------------


def forward(params: Params, batch: Batch, config: DeepseekConfig, plan: Plan, trace: bool = False) -> Outputs:
    """The definition: teacher-forced, no cache, expanded attention.

    batch: tokens, positions [S, Q], query_lens [S], int32; tokens beyond query_lens are padding.
    Returns logits [S, Q, vocab] float32, hidden [S, Q, D] after the final norm, is_finite [S, Q] bool, and with
    `trace` layers: the residual stream [S, Q, D] after each layer.
    """
    x = embed(params, batch["tokens"], plan.ranks)
    shared = _shared_by_expanded(params, batch, config)
    states: tuple[Tensor, ...] = ()
    for layer in params["layers"]:
        x, _ = _expanded_layer(layer, x, shared, config, plan)
        states = (*states, x)
    return traced(outputs(params, params["norm"], x, batch, 0, config, plan.ranks), states, batch, trace)


def forward_train(params: Params, batch: Batch, config: DeepseekConfig, plan: Plan) -> dict[str, Any]:
    """`forward`, and what only training looks at: the MTP modules teacher-forced, and where tokens were routed.

    logits [S, Q, vocab]. mtp_logits: per depth k [S, Q, vocab], at position i a prediction of the token at i + 2 + k,
    meaningless where that lies beyond the text (DeepSeek-V3, equations 21-23). routing: per MoE layer, MTP layers
    last, scores [S * Q, E] float32 and topk_idx [S * Q, K] int32.
    """
    tokens = batch["tokens"]
    x = embed(params, tokens, plan.ranks)
    shared = _shared_by_expanded(params, batch, config)
    routing: tuple[Params, ...] = ()
    for layer in params["layers"]:
        x, routed = _expanded_layer(layer, x, shared, config, plan)
        routing = routing + routed
    out = outputs(params, params["norm"], x, batch, 0, config, plan.ranks)
    hidden, logits = out["hidden"], out["logits"]
    mtp_logits: tuple[Tensor, ...] = ()
    for layer in params["mtp"]:
        tokens = ops.concat((tokens[:, 1:], tokens[:, :1]), 1)  # the wrapped one is read by its own position only
        ahead_tokens = after(tokens, logits, plan.ranks)
        x = _mtp_input(layer, embed(params, ahead_tokens, plan.ranks), hidden, config)
        x, routed = _expanded_layer(layer, x, shared, config, plan)
        routing = routing + routed
        ahead = outputs(params, layer["shared_head"]["norm"], x, batch, 0, config, plan.ranks)
        hidden, logits = ahead["hidden"], ahead["logits"]
        mtp_logits = (*mtp_logits, logits)
    return {"logits": out["logits"], "mtp_logits": mtp_logits, "routing": routing}


def prefill(
    params: Params,
    cache: Cache,
    batch: Batch,
    config: DeepseekConfig,
    plan: Plan,
    num_logits: int,
    block_size: int,
    trace: bool = False,
) -> tuple[Outputs, Cache]:
    """A chunk of new tokens per sequence over what is already cached; expanded attention.

    batch: tokens, positions, slot_mapping [S, Q], block_tables [S, B], query_lens, context_lens [S], int32.
    Returns logits [S, num_logits, vocab] float32 of the last `num_logits` tokens of each sequence (0: all), hidden
    [S, Q, D] and is_finite [S, Q] of all its new tokens, layers with `trace` (see `forward`), and the written cache.

    With `prev_hidden` [S, D] in the batch, the state (after the final norm) of the token before the chunk, the first
    MTP layer's cache is written too, so that `mtp` and `draft` find it complete. That needs neither its attention nor
    its experts: an entry depends on one token and the state before it.

    With `expert_counts` [M, E] int32 in the cache, M MoE layers, those of `mtp` last, every step adds how many new
    tokens chose each routed expert of the layers it runs.
    """
    return _cached_step(params, cache, batch, _attend_expanded, config, plan, num_logits, block_size, trace)


def decode(
    params: Params,
    cache: Cache,
    batch: Batch,
    config: DeepseekConfig,
    plan: Plan,
    num_logits: int,
    block_size: int,
    trace: bool = False,
) -> tuple[Outputs, Cache]:
    """One or a few new tokens per sequence; absorbed attention over the latent cache. Shapes as `prefill`.

    `params` is the derived tree (`derive`).
    """
    return _cached_step(params, cache, batch, _attend_absorbed, config, plan, num_logits, block_size, trace)


def mtp(
    params: Params,
    cache: Cache,
    batch: Batch,
    config: DeepseekConfig,
    plan: Plan,
    num_logits: int,
    block_size: int,
    depth: int = 0,
) -> tuple[Outputs, Cache]:
    """One multi-token-prediction step (DeepSeek-V3, section 2.2) with its own cache layer; absorbed attention.

    batch as `prefill` plus `hidden` [S, Q, D]: with the token at position j the state of position j - 1 - depth that
    the main model (after its final norm) or the previous depth returned. Logits predict the token at j + 1. The entry
    of a token lies in the token's own slot, so what a block holds depends on the tokens up to its end alone; the
    first depth + 1 tokens have none, and theirs are not read. `params` is the derived tree.
    """
    layer, page = params["mtp"][depth], cache["mtp"][depth]
    x = _mtp_input(layer, embed(params, batch["tokens"], plan.ranks), batch["hidden"], config)
    shared = _shared_by_layers(params, cache, batch, config, block_size, depth + 1)
    x, page, counts = _cached_layer(layer, page, x, shared, _attend_absorbed, config, plan)
    out = outputs(params, layer["shared_head"]["norm"], x, batch, num_logits, config, plan.ranks)
    pages = (*cache["mtp"][:depth], page, *cache["mtp"][depth + 1 :])
    return out, _written(cache, cache["layers"], pages, counts, depth - len(cache["mtp"]), plan)


def draft(
    params: Params,
    cache: Cache,
    batch: Batch,
    config: DeepseekConfig,
    plan: Plan,
    num_drafts: int,
    allowed_vocab: int,
    block_size: int,
) -> tuple[Outputs, Cache]:
    """The tokens that the first MTP layer expects next, each from the one before it (greedy, ids < allowed_vocab).

    batch: tokens (the last of each sequence), positions [S, 1], block_tables [S, B], query_lens, context_lens [S],
    prev_hidden [S, D] (the main model's state of the token before), draft_slots [S, num_drafts]: where the entries of
    the last token and of the drafts but the last are written. Those of drafts stand on the layer's own states; a step
    that computes these positions writes them anew. Returns drafts [S, num_drafts] int32. `params` is the derived tree.
    """
    tokens, hidden = batch["tokens"], batch["prev_hidden"].expand_dims(1)
    drafts: tuple[Tensor, ...] = ()
    for step in range(num_drafts):
        ahead = {
            "tokens": tokens,
            "positions": batch["positions"] + step,
            "slot_mapping": batch["draft_slots"][:, step : step + 1],
            "block_tables": batch["block_tables"],
            "query_lens": batch["query_lens"],
            "context_lens": batch["context_lens"],
            "hidden": hidden,
        }
        out, cache = mtp(params, cache, ahead, config, plan, 0, block_size)
        hidden = out["hidden"]
        tokens = ops.argmax(out["logits"][:, :, :allowed_vocab], -1).astype(ms.int32)  # [S, 1], the first of equals
        drafts = (*drafts, tokens)
    return {"drafts": ops.concat(drafts, 1)}, cache


def _write_mtp_entries(
    params: Params,
    pages: tuple[Params, ...],
    batch: Batch,
    tokens: Tensor,
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    config: DeepseekConfig,
    plan: Plan,
) -> tuple[Params, ...]:
    """The MTP pages with the first layer's entries of `tokens` [S, Q]; hidden [S, Q, D] are their own states."""
    layer = params["mtp"][0]
    before = batch["prev_hidden"].expand_dims(1).astype(hidden.dtype)
    if hidden.shape[1] > 1:
        before = ops.concat((before, hidden[:, :-1]), 1)
    x = _mtp_input(layer, embed(params, tokens, plan.ranks), before, config)
    normed = rms_norm(x, layer["input_layernorm"]["weight"], config.rms_norm_eps)
    new = _latent(layer["self_attn"], normed, rope, config)
    latent = cache_write(pages[0]["latent"], new, batch["slot_mapping"], plan.implementation("cache_write"))
    return ({"latent": latent}, *pages[1:])


def _mtp_input(layer: Params, embedded: Tensor, hidden: Tensor, config: DeepseekConfig) -> Tensor:
    """What an MTP layer starts from: [T, D] embeddings of the next tokens and as many hidden states -> [T, D]."""
    embedded = rms_norm(embedded, layer["enorm"]["weight"], config.rms_norm_eps)
    hidden = hidden.reshape(embedded.shape).astype(embedded.dtype)  # states travel between steps in float32
    hidden = rms_norm(hidden, layer["hnorm"]["weight"], config.rms_norm_eps)
    return linear(layer["eh_proj"], ops.concat((embedded, hidden), -1))


def _shared_by_expanded(params: Params, batch: Batch, config: DeepseekConfig) -> dict[str, Any]:
    """What every layer of a teacher-forced pass needs of the batch."""
    mask = causal_mask(batch["positions"], batch["query_lens"])
    return {
        "rope": _rope(config, batch["positions"]),
        "bias": attention_bias(mask, _num_heads(params, config)),
        "is_real": _is_real(batch),
    }


def _is_real(batch: Batch) -> Tensor:
    """Which tokens [T] are no padding."""
    index = iota(batch["tokens"].shape[1]).expand_dims(0)
    return (index < batch["query_lens"].expand_dims(1)).reshape(-1)


def _expanded_layer(
    layer: Params, x: Tensor, shared: dict[str, Any], config: DeepseekConfig, plan: Plan
) -> tuple[Tensor, tuple[Params, ...]]:
    """[T, D] through one layer without a cache; the routing of a MoE layer, or nothing."""
    attention, rope = layer["self_attn"], shared["rope"]
    normed = rms_norm(x, layer["input_layernorm"]["weight"], config.rms_norm_eps)
    q_nope, q_pe = _queries(attention, normed, rope, config)
    sequences, _, queries, _ = shared["bias"].shape
    latent = _latent(attention, normed, rope, config).reshape(sequences, queries, -1)
    x = x + _attend_expanded(attention, q_nope, q_pe, latent, shared["bias"], config, plan)
    y, routing = _mlp_with_routing(layer, x, shared["is_real"], config, plan)
    return x + y, routing


def _cached_step(
    params: Params,
    cache: Cache,
    batch: Batch,
    attention: Any,
    config: DeepseekConfig,
    plan: Plan,
    num_logits: int,
    block_size: int,
    trace: bool,
) -> tuple[Outputs, Cache]:
    x = embed(params, batch["tokens"], plan.ranks)
    shared = _shared_by_layers(params, cache, batch, config, block_size, 0)
    pages: tuple[Params, ...] = ()
    states: tuple[Tensor, ...] = ()
    counts: tuple[Tensor, ...] = ()
    for layer, page in zip(params["layers"], cache["layers"]):  # noqa: B905  (graph mode has no strict=)
        x, page, counted = _cached_layer(layer, page, x, shared, attention, config, plan)
        pages, states, counts = (*pages, page), (*states, x), counts + counted
    ahead = cache["mtp"]
    if "prev_hidden" in batch:
        hidden = final_hidden(params["norm"], x, batch, config)
        tokens = after(batch["tokens"], x, plan.ranks)
        ahead = _write_mtp_entries(params, ahead, batch, tokens, hidden, shared["rope"], config, plan)
        x = after(x, ahead[0]["latent"], plan.ranks)  # logits come of every collective
    out = traced(outputs(params, params["norm"], x, batch, num_logits, config, plan.ranks), states, batch, trace)
    return out, _written(cache, pages, ahead, counts, 0, plan)


def _shared_by_layers(
    params: Params, cache: Cache, batch: Batch, config: DeepseekConfig, block_size: int, first: int
) -> dict[str, Any]:
    """What every layer of a step needs of the batch, computed once. first: the first position that has an entry."""
    slots = context_slots(batch["block_tables"], block_size)  # [S, C]
    mask = context_mask(batch["positions"], slots.shape[1], first)
    shared = {
        "rope": _rope(config, batch["positions"]),
        "new_slots": batch["slot_mapping"],
        "context_slots": slots,
        "bias": attention_bias(mask, _num_heads(params, config)),
        "is_real": _is_real(batch),
    }
    if "expert_counts" in cache:
        shared["counts_experts"] = True
    return shared


def _written(
    cache: Cache, layers: Any, ahead: Any, counts: tuple[Tensor, ...], first: int, plan: Plan
) -> dict[str, Any]:
    """The cache with these pages and, where experts are counted, the counts of MoE layers added from row `first` on.

    A negative row counts from the end.
    """
    if "expert_counts" not in cache:
        return {"layers": layers, "mtp": ahead}
    total = cache["expert_counts"]
    if len(counts) > 0:
        first = first if first >= 0 else total.shape[0] + first
        total = cache_add(total, ops.stack(counts), first, plan.implementation("cache_write"))
    return {"layers": layers, "mtp": ahead, "expert_counts": total}


def _cached_layer(
    layer: Params,
    page: Params,
    x: Tensor,
    shared: dict[str, Any],
    attention: Any,
    config: DeepseekConfig,
    plan: Plan,
) -> tuple[Tensor, Params, tuple[Tensor, ...]]:
    """[T, D] through one layer: write the new latents first, then attend over what the write returned.

    Also the written page, and how often each expert was chosen [E], of a MoE layer whose experts are counted.
    """
    params = layer["self_attn"]
    normed = rms_norm(x, layer["input_layernorm"]["weight"], config.rms_norm_eps)
    q_nope, q_pe = _queries(params, normed, shared["rope"], config)
    new = _latent(params, normed, shared["rope"], config)
    latent = cache_write(page["latent"], new, shared["new_slots"], plan.implementation("cache_write"))
    context = cache_read(latent, shared["context_slots"])  # [S, C, L + R]
    x = x + attention(params, q_nope, q_pe, context, shared["bias"], config, plan)
    if "counts_experts" in shared:
        y, counts = _mlp_counted(layer, x, shared["is_real"], config, plan)
        return x + y, {"latent": latent}, counts
    return x + _mlp(layer, x, shared["is_real"], config, plan), {"latent": latent}, ()


# --- attention -----------------------------------------------------------------------------------------------


def _num_heads(params: Params, config: DeepseekConfig) -> int:
    """Heads of this rank, as its slice of the weights says."""
    return int(params["layers"][0]["self_attn"]["o_proj"]["weight"].shape[1] // config.v_head_dim)


def _rope(config: DeepseekConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    inv_freq, amplitude = rotary_constants(config, config.qk_rope_head_dim)
    return rope_cos_sin(positions.reshape(-1), inv_freq, amplitude, True)


def _queries(params: Params, x: Tensor, rope: Any, config: DeepseekConfig) -> tuple[Tensor, Tensor]:
    """[T, D] -> q_nope [T, H, N], q_pe [T, H, R] rotated."""
    if config.q_lora_rank is None:
        q = linear(params["q_proj"], x)
    else:
        q_latent = linear(params["q_a_proj"], x)
        q = linear(params["q_b_proj"], rms_norm(q_latent, params["q_a_layernorm"]["weight"], LATENT_NORM_EPS))
    q = q.reshape(x.shape[0], -1, config.qk_head_dim)
    q_nope, q_pe = q[:, :, : config.qk_nope_head_dim], q[:, :, config.qk_nope_head_dim :]
    return q_nope, rotate(q_pe, rope[0], rope[1], True)


def _latent(params: Params, x: Tensor, rope: Any, config: DeepseekConfig) -> Tensor:
    """What the cache holds of a token: the normed latent, then its rotated rope key: [T, D] -> [T, L + R]."""
    compressed = linear(params["kv_a_proj_with_mqa"], x)
    kv_latent = compressed[:, : config.kv_lora_rank]
    k_pe = compressed[:, config.kv_lora_rank :].expand_dims(1)  # [T, 1, R], shared by all heads
    kv_latent = rms_norm(kv_latent, params["kv_a_layernorm"]["weight"], LATENT_NORM_EPS)
    return ops.concat((kv_latent, rotate(k_pe, rope[0], rope[1], True)[:, 0]), -1)


def _attend_expanded(
    params: Params, q_nope: Tensor, q_pe: Tensor, latent: Tensor, bias: Tensor, config: DeepseekConfig, plan: Plan
) -> Tensor:
    """Naive MLA: expand every context latent into keys and values of every head.

    q_nope [T, H, N], q_pe [T, H, R], latent [S, C, L + R], bias [S, H, Q, C] -> [T, D].
    """
    sequences, heads, queries, context = bias.shape
    nope = config.qk_nope_head_dim
    kv_latent, k_pe = latent[:, :, : config.kv_lora_rank], latent[:, :, config.kv_lora_rank :]
    kv = linear(params["kv_b_proj"], kv_latent.reshape(sequences * context, -1))
    kv = kv.reshape(sequences, context, heads, nope + config.v_head_dim).transpose(0, 2, 1, 3)  # [S, H, C, N + V]
    k_pe = ops.broadcast_to(k_pe.expand_dims(1), (sequences, heads, context, config.qk_rope_head_dim))
    k = ops.concat((kv[:, :, :, :nope], k_pe), -1)  # [S, H, C, N + R]
    q = ops.concat((q_nope, q_pe), -1).reshape(sequences, queries, heads, config.qk_head_dim)
    out = attend(q, k, kv[:, :, :, nope:], bias, mla_softmax_scale(config))
    return row_linear(params["o_proj"], out.reshape(sequences * queries, -1), plan.ranks)


def _attend_absorbed(
    params: Params, q_nope: Tensor, q_pe: Tensor, latent: Tensor, bias: Tensor, config: DeepseekConfig, plan: Plan
) -> Tensor:
    """MLA in the latent space: q W_UK against the latent itself, W_UV after the softmax. Shapes as the naive one."""
    sequences, heads, queries, _ = bias.shape
    w_uk, w_uv = params["absorbed"]["w_uk"], params["absorbed"]["w_uv"]
    q_latent = _bmm(q_nope.transpose(1, 0, 2), w_uk).reshape(heads, sequences, queries, -1)  # [H, S, Q, L]
    q_pe = q_pe.reshape(sequences, queries, heads, -1).transpose(0, 2, 1, 3)
    q = ops.concat((q_latent.transpose(1, 0, 2, 3), q_pe), -1)  # [S, H, Q, L + R]
    out = attend_latent(q, latent, bias, mla_softmax_scale(config))[:, :, :, : config.kv_lora_rank]
    out = out.transpose(1, 0, 2, 3).reshape(heads, sequences * queries, -1)  # [H, T, L]
    out = _bmm_nt(out, w_uv).transpose(1, 0, 2)  # [T, H, V]
    return row_linear(params["o_proj"], out.reshape(sequences * queries, -1), plan.ranks)


# --- feed-forward --------------------------------------------------------------------------------------------


def _mlp(layer: Params, x: Tensor, is_real: Tensor, config: DeepseekConfig, plan: Plan) -> Tensor:
    """The feed-forward half of a layer, norm included: [T, D], [T] -> [T, D]."""
    params = layer["mlp"]
    x = rms_norm(x, layer["post_attention_layernorm"]["weight"], config.rms_norm_eps)
    if "gate" not in params:
        return cut_mlp(params, x, plan.ranks)
    return _moe(params, x, is_real, _scores(params, x, config), config, plan)[0]


def _mlp_with_routing(
    layer: Params, x: Tensor, is_real: Tensor, config: DeepseekConfig, plan: Plan
) -> tuple[Tensor, tuple[Params, ...]]:
    """`_mlp`, and the routing of a MoE layer. A function of its own: MindSpore warns of side effects in steps that
    write a cache beside a routing that nobody reads."""
    params = layer["mlp"]
    x = rms_norm(x, layer["post_attention_layernorm"]["weight"], config.rms_norm_eps)
    if "gate" not in params:
        return cut_mlp(params, x, plan.ranks), ()
    scores = _scores(params, x, config)
    y, topk_idx = _moe(params, x, is_real, scores, config, plan)
    return y, ({"scores": scores, "topk_idx": topk_idx},)


def _mlp_counted(
    layer: Params, x: Tensor, is_real: Tensor, config: DeepseekConfig, plan: Plan
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`_mlp`, and how often each expert was chosen [E] by the tokens that are real, of all replicas; nothing of a dense
    layer."""
    params = layer["mlp"]
    x = rms_norm(x, layer["post_attention_layernorm"]["weight"], config.rms_norm_eps)
    if "gate" not in params:
        return cut_mlp(params, x, plan.ranks), ()
    y, topk_idx = _moe(params, x, is_real, _scores(params, x, config), config, plan)
    chosen = ops.where(is_real.expand_dims(-1), topk_idx, ops.full_like(topk_idx, config.n_routed_experts))
    chosen = all_gather(after(chosen, y, plan.ranks), "dp", 0, plan.ranks)
    return after(y, chosen, plan.ranks), (count_chosen(chosen, config.n_routed_experts),)


def _scores(params: Params, x: Tensor, config: DeepseekConfig) -> Tensor:
    return scores_from_logits(linear_float32(params["gate"]["weight"], x), config.scoring_func)


def _moe(
    params: Params, x: Tensor, is_real: Tensor, scores: Tensor, config: DeepseekConfig, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Routed and shared experts: [T, D], [T], [T, E] -> [T, D], and the experts that were chosen [T, K]."""
    topk_idx, weights = route(params["gate"], scores, config)
    y = _routed(params["experts"], x, is_real, topk_idx, weights, plan)
    if config.n_shared_experts:
        y = y + swiglu_mlp(params["shared_experts"], x)
    return all_reduce(y, "tp", plan.ranks), topk_idx


def _routed(experts: Params, x: Tensor, is_real: Tensor, topk_idx: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """The chosen experts of each token: [T, D], [T], two [T, K] -> [T, D]; its sum over tp where the model is cut.

    Where ranks are many, either tokens go to the ranks of their experts (`_exchanged`), or the tokens of all replicas
    come together, each rank computes the pairs of its experts, and a replica gets back the sums of its own tokens.
    """
    ranks, impl = plan.ranks, plan.implementation("moe_experts")
    if ranks.size("stage") == 1:
        return moe_experts(x, topk_idx, weights, experts, impl)
    chosen, slots = topk_idx.shape[1], experts["gate_proj"].shape[0] * ranks.size("ep")
    exchange, size = plan.implementation("exchange"), ranks.size("exchange")
    form = exchange_form(exchange, ranks.machine, size, x.shape[0], x.shape[1], chosen, slots, x.dtype)
    if form != "gathered":
        return _exchanged(experts, x, is_real, topk_idx, weights, plan, form)
    x = all_gather(x, "dp", 0, ranks)
    if ranks.size("dp") > 1:
        routing = ops.concat((topk_idx.astype(ms.float32), weights.astype(ms.float32)), 1)
        routing = all_gather(after(routing, x, ranks), "dp", 0, ranks)
        topk_idx, weights = routing[:, :chosen].astype(ms.int32), routing[:, chosen:]
    slots = local_slots(topk_idx, experts, ranks)
    y = moe_experts(x, slots, weights, experts, impl, True)
    return reduce_scatter(y, "dp", 0, ranks)


def _exchanged(
    experts: Params, x: Tensor, is_real: Tensor, topk_idx: Tensor, weights: Tensor, plan: Plan, form: str
) -> Tensor:
    """`_routed` by sending each token to the ranks that hold its experts; by default grouped products follow Ascend's
    operators."""
    ranks, held, impl = plan.ranks, experts["gate_proj"].shape[0], plan.implementation("moe_experts")
    impl = "primitive" if form == "operators" and impl == "portable" else impl
    slots = sent_slots(topk_idx, is_real, experts, ranks)
    weights = weights.astype(ms.float32)
    rows, counts, way_back = dispatch(x, slots, weights, held, ranks, form)
    rows = moe_experts_sorted(rows, counts, experts, impl)
    return combine(rows, slots, weights, held, way_back, ranks, form)


def sent_slots(topk_idx: Tensor, is_real: Tensor, experts: Params, ranks: Ranks) -> Tensor:
    """Which slots, counted over all ranks, each token of this replica goes to: [T, K], [T] -> [T, K], all int32.

    Padding goes along, since nothing masks it, but to the slots of its own rank, and the next ones where these are
    fewer than K. What comes of it is not read; sent where it asks, all of it would ask for the same experts.
    """
    held = experts["gate_proj"].shape[0]
    slots = _slots(topk_idx, experts, ranks.index("dp") * topk_idx.shape[0])
    at_home = (iota(topk_idx.shape[1]) + ranks.index("ep") * held) % (held * ranks.size("ep"))
    return ops.where(is_real.expand_dims(-1), slots, at_home.expand_dims(0))


def local_slots(topk_idx: Tensor, experts: Params, ranks: Ranks) -> Tensor:
    """Where this rank holds the chosen experts: [T, K] int32 -> [T, K] int32, as many as it holds for those of others.

    topk_idx: of all replicas, so that T counts tokens over all.
    """
    held = experts["gate_proj"].shape[0]
    slot = _slots(topk_idx, experts, 0) - ranks.index("ep") * held
    is_here = ops.logical_and(slot >= 0, slot < held)
    return ops.where(is_here, slot, ops.full_like(slot, held))


def _slots(topk_idx: Tensor, experts: Params, first: int) -> Tensor:
    """The slots of the chosen experts, counted over all ranks of ep: [T, K] int32 -> [T, K] int32.

    Without a placement rank r of ep holds the r-th run of experts. With one (`slot_table`, `num_replicas`), an
    expert's pairs are dealt to its replicas by token; `first` is the number of the first token.
    """
    if "slot_table" not in experts:
        return topk_idx
    table, flat = experts["slot_table"], topk_idx.reshape(-1)  # [E, R]
    token = iota(flat.shape[0]) // topk_idx.shape[1] + first
    count = ops.gather(experts["num_replicas"], flat, 0)
    replica = token - token // count * count
    return ops.gather(table.reshape(-1), flat * table.shape[1] + replica, 0).reshape(topk_idx.shape)


def route(gate: Params, scores: Tensor, config: DeepseekConfig) -> tuple[Tensor, Tensor]:
    """Which experts and how much of each: scores [T, E] float32 -> topk_idx [T, K] int32, weights [T, K] float32.

    The correction bias only ranks; the mixture uses the plain scores (DeepSeek-V3, equations 12-16). As in the
    published code a single expert's weight is never normalised, and V2 scales only what it does not normalise.
    """
    choice = scores
    if config.topk_method == "noaux_tc":
        choice = choice + gate["e_score_correction_bias"]
    if config.topk_method != "greedy" and config.n_group > 1:
        by_top2 = config.topk_method == "noaux_tc"
        choice = select_groups(choice, config.n_group, config.topk_group, by_top2=by_top2)
    topk_idx, weights = top_experts(choice, scores, config.num_experts_per_tok)
    if config.norm_topk_prob and config.num_experts_per_tok > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        if config.model_type == "deepseek_v2":
            return topk_idx, weights
    return topk_idx, weights * config.routed_scaling_factor
