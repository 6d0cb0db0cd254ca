"""DeepSeek-V3 and -V2 in plain NumPy, from the published papers, configs and checkpoints; no line of msds.

It takes a raw `config.json` dict and a dict of arrays under their Hugging Face names, runs one sequence
without a cache and expands every key and value, so that there is nothing to get wrong but the formulas.
Arithmetic is float64 (rotation angles apart, see numpy_rope), hence a difference to a float32
implementation is that implementation's rounding. Equal scores are ranked by the lower index.

Where the published code and transformers part, this follows the published code:
`scoring_func`, `topk_method`, `moe_layer_freq` are obeyed; weights are normalised only for more than one
expert per token; V2 with `norm_topk_prob` normalises *instead of* scaling, V3 scales always; a missing
`mscale_all_dim` leaves the amplitude at m(mscale). Refused groups get -inf as in V3's later revision.

Dims: T tokens, D hidden, H heads, N nope, R rope, V value, L kv_lora, E experts, K top-k, G groups, W vocab.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.numpy_rope import inverse_frequencies, mscale, rope_settings, rotation

Array = NDArray[Any]
Tensors = dict[str, Array]
Config = dict[str, Any]

LATENT_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm: wired into the published code, not rms_norm_eps


def dequantise(weight: Array, scale: Array, block: tuple[int, int]) -> Array:
    """weight [O, I] times its block's scale; the grid is ceil-divided, trailing blocks are partial."""
    want = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    if scale.shape != want:
        raise ValueError(f"scale grid {scale.shape} for weight {weight.shape} in blocks {block}: want {want}")
    grid: Array = scale.repeat(block[0], axis=0).repeat(block[1], axis=1)
    return weight * grid[: weight.shape[0], : weight.shape[1]]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * weight.astype(np.float64)


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    out: Array = 0.5 * (1 + np.tanh(0.5 * x))
    return out


def linear(x: Array, tensors: Tensors, name: str, bias: bool = False) -> Array:
    y: Array = x @ tensors[f"{name}.weight"].astype(np.float64).T
    return y + tensors[f"{name}.bias"].astype(np.float64) if bias else y


def top(scores: Array, count: int) -> Array:
    """[..., count] indices of the largest, best first, equal ones by the lower index."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count]


def rotate_interleaved(x: Array, cos: Array, sin: Array) -> Array:
    """Turns the pairs (0, 1), (2, 3), ... of x [..., R] by cos, sin that broadcast to [..., R/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)


def softmax_scale(config: Config) -> float:
    """(N + R)^-0.5, times m(mscale_all_dim)^2 whenever the context is stretched, at every length."""
    scale = float(config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    _, scaling = rope_settings(config)
    if scaling is None or not scaling.get("mscale_all_dim"):
        return scale
    return scale * mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2


def rope(config: Config, positions: Array) -> tuple[Array, Array]:
    """cos and sin [T, R/2] with YaRN's amplitude m(mscale) / m(mscale_all_dim)."""
    theta, scaling = rope_settings(config)
    amplitude = 1.0
    if scaling is not None and scaling["rope_type"] == "yarn":
        above, below = scaling.get("mscale", 1.0), scaling.get("mscale_all_dim", 0.0)
        amplitude = mscale(scaling["factor"], above) / mscale(scaling["factor"], below)
    return rotation(positions, inverse_frequencies(config["qk_rope_head_dim"], theta, scaling), amplitude)


def attention(x: Array, tensors: Tensors, name: str, config: Config, cos_sin: tuple[Array, Array]) -> Array:
    """Multi-head latent attention, keys and values expanded, causal by row. [T, D] -> [T, D]."""
    tokens, heads, has_bias = len(x), config["num_attention_heads"], bool(config.get("attention_bias"))
    nope, rank, value = config["qk_nope_head_dim"], config["kv_lora_rank"], config["v_head_dim"]
    cos, sin = cos_sin
    if config.get("q_lora_rank") is None:
        q = linear(x, tensors, f"{name}.q_proj")
    else:
        q_latent = linear(x, tensors, f"{name}.q_a_proj", has_bias)
        q_latent = rms_norm(q_latent, tensors[f"{name}.q_a_layernorm.weight"], LATENT_EPS)
        q = linear(q_latent, tensors, f"{name}.q_b_proj")
    q = q.reshape(tokens, heads, -1)
    q_nope, q_pe = q[..., :nope], rotate_interleaved(q[..., nope:], cos[:, None], sin[:, None])

    kv = linear(x, tensors, f"{name}.kv_a_proj_with_mqa", has_bias)
    k_pe = rotate_interleaved(kv[:, rank:], cos, sin)  # [T, R], one for all heads
    kv_latent = rms_norm(kv[:, :rank], tensors[f"{name}.kv_a_layernorm.weight"], LATENT_EPS)
    kv = linear(kv_latent, tensors, f"{name}.kv_b_proj").reshape(tokens, heads, nope + value)
    k_nope, v = kv[..., :nope], kv[..., nope:]

    scores = np.einsum("qhn,khn->hqk", q_nope, k_nope) + np.einsum("qhr,kr->hqk", q_pe, k_pe)
    scores = np.where(np.tri(tokens, dtype=bool), scores * softmax_scale(config), -np.inf)
    out = np.einsum("hqk,khv->qhv", softmax(scores), v).reshape(tokens, heads * value)
    return linear(out, tensors, f"{name}.o_proj", has_bias)


def gate(scores: Array, bias: Array | None, config: Config) -> tuple[Array, Array]:
    """Experts and mixing weights, both [T, K], from scores [T, E] after the scoring function.

    The bias ranks groups and experts and never enters a weight.
    """
    is_v2 = config["model_type"] == "deepseek_v2"
    method = config.get("topk_method", "greedy" if is_v2 else "noaux_tc")
    ranking = scores if bias is None else scores + bias
    if method in ("noaux_tc", "group_limited_greedy"):
        groups = ranking.reshape(len(scores), config["n_group"], -1)  # [T, G, E/G]
        best = np.sort(groups, axis=-1)[..., -2:] if method == "noaux_tc" else groups.max(-1, keepdims=True)
        is_kept = np.zeros(groups.shape[:2], dtype=bool)
        np.put_along_axis(is_kept, top(best.sum(-1), config["topk_group"]), True, axis=1)
        ranking = np.where(is_kept[..., None], groups, -np.inf).reshape(scores.shape)
    elif method != "greedy":
        raise ValueError(f"unknown topk_method {method!r}")
    topk_idx = top(ranking, config["num_experts_per_tok"])
    weights = np.take_along_axis(scores, topk_idx, axis=-1)
    is_normalised = bool(config.get("norm_topk_prob")) and weights.shape[1] > 1
    if is_normalised:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    if not (is_v2 and is_normalised):
        weights = weights * config["routed_scaling_factor"]
    return topk_idx, weights


def mlp(x: Array, tensors: Tensors, name: str) -> Array:
    gated = linear(x, tensors, f"{name}.gate_proj")
    return linear(gated * sigmoid(gated) * linear(x, tensors, f"{name}.up_proj"), tensors, f"{name}.down_proj")


def moe(x: Array, tensors: Tensors, name: str, config: Config) -> Array:
    """Routed experts, weighted, plus the shared ones. [T, D] -> [T, D]."""
    router = linear(x, tensors, f"{name}.gate")
    is_v2 = config["model_type"] == "deepseek_v2"
    kind = config.get("scoring_func", "softmax" if is_v2 else "sigmoid")
    scores = {"softmax": softmax, "sigmoid": sigmoid}[kind](router)
    bias = None
    if config.get("topk_method", "greedy" if is_v2 else "noaux_tc") == "noaux_tc":
        bias = tensors[f"{name}.gate.e_score_correction_bias"].astype(np.float64)
    topk_idx, weights = gate(scores, bias, config)
    out = np.zeros_like(x)
    for expert in range(config["n_routed_experts"]):
        rows, slots = np.nonzero(topk_idx == expert)
        out[rows] += weights[rows, slots, None] * mlp(x[rows], tensors, f"{name}.experts.{expert}")
    if config.get("n_shared_experts"):
        out += mlp(x, tensors, f"{name}.shared_experts")
    return out


def is_moe_layer(config: Config, layer: int) -> bool:
    return (
        bool(config.get("n_routed_experts"))
        and layer >= config.get("first_k_dense_replace", 0)
        and layer % config.get("moe_layer_freq", 1) == 0
    )


def block(x: Array, tensors: Tensors, layer: int, config: Config, cos_sin: tuple[Array, Array]) -> Array:
    name, eps = f"model.layers.{layer}", config["rms_norm_eps"]
    normed = rms_norm(x, tensors[f"{name}.input_layernorm.weight"], eps)
    x = x + attention(normed, tensors, f"{name}.self_attn", config, cos_sin)
    normed = rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"], eps)
    if is_moe_layer(config, layer):
        return x + moe(normed, tensors, f"{name}.mlp", config)
    return x + mlp(normed, tensors, f"{name}.mlp")


def head(hidden: Array, tensors: Tensors, config: Config) -> Array:
    name = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return linear(hidden, tensors, name)


def forward(
    tensors: Tensors,
    config: Config,
    token_ids: Any,
    positions: Any = None,
    return_layers: bool = False,
) -> dict[str, Any]:
    """One sequence. token_ids [T]; positions [T], 0..T-1 when None, any integers: they only turn q and k.

    Returns logits [T, W] and hidden [T, D] (after the final norm), and as `layers` the residual stream [T, D]
    after each layer when asked; all float64.
    """
    token_ids = np.asarray(token_ids)
    positions = np.arange(len(token_ids)) if positions is None else np.asarray(positions)
    cos_sin = rope(config, positions)
    x = tensors["model.embed_tokens.weight"][token_ids].astype(np.float64)
    layers = []
    for layer in range(config["num_hidden_layers"]):
        x = block(x, tensors, layer, config, cos_sin)
        layers.append(x)
    hidden = rms_norm(x, tensors["model.norm.weight"], config["rms_norm_eps"])
    out: dict[str, Any] = {"logits": head(hidden, tensors, config), "hidden": hidden}
    return {**out, "layers": layers} if return_layers else out


def mtp(
    tensors: Tensors, config: Config, hidden: Array, next_ids: Any, positions: Any, depth: int = 0
) -> dict[str, Array]:
    """Multi-token prediction: row i joins hidden[i] [D] with the token that follows it by depth + 1.

    hidden [T, D]: the main model's for depth 0, else the previous depth's `hidden`; next_ids, positions [T]
    belong to the tokens that are joined, positions 1..T for depth 0. Embedding and head are the main model's.
    Returns logits [T, W] and hidden [T, D] (after shared_head.norm).
    """
    layer, eps = config["num_hidden_layers"] + depth, config["rms_norm_eps"]
    name = f"model.layers.{layer}"
    embedded = tensors["model.embed_tokens.weight"][np.asarray(next_ids)].astype(np.float64)
    joined = np.concatenate(
        [
            rms_norm(embedded, tensors[f"{name}.enorm.weight"], eps),
            rms_norm(hidden, tensors[f"{name}.hnorm.weight"], eps),
        ],
        axis=-1,
    )
    x = linear(joined, tensors, f"{name}.eh_proj")
    x = block(x, tensors, layer, config, rope(config, np.asarray(positions)))
    x = rms_norm(x, tensors[f"{name}.shared_head.norm.weight"], eps)
    return {"logits": head(x, tensors, config), "hidden": x}
