"""Llama and Qwen2 in plain NumPy, float64, one sequence, no cache; no line of msds.

Raw `config.json` dict and arrays under their Hugging Face names, as in numpy_deepseek. Pairs are halves:
dim i turns with dim i + C/2. Qwen2 always has biases on q, k, v and never on o.

Dims: T tokens, D hidden, H query heads, K key heads, C head dim, W vocab.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.reference.numpy_deepseek import Array, Config, Tensors, head, linear, rms_norm, sigmoid, softmax
from tests.reference.numpy_rope import inverse_frequencies, mscale, rope_settings, rotation


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def amplitude(config: Config) -> float:
    """What YaRN multiplies cos and sin by: the config's `attention_factor`, else derived from the factor."""
    _, scaling = rope_settings(config)
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if above and below:
        return mscale(scaling["factor"], above) / mscale(scaling["factor"], below)
    return mscale(scaling["factor"], 1.0)


def rotate_halves(x: Array, cos: Array, sin: Array) -> Array:
    """Turns the pairs (i, i + C/2) of x [T, heads, C] by cos, sin [T, C/2]."""
    low, high = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def attention(x: Array, tensors: Tensors, name: str, config: Config, cos_sin: tuple[Array, Array]) -> Array:
    """Grouped-query attention; query head h reads key head h // (H / K). [T, D] -> [T, D]."""
    tokens, size = len(x), head_dim(config)
    is_qwen2 = config["model_type"] == "qwen2"
    in_bias = is_qwen2 or bool(config.get("attention_bias"))
    out_bias = not is_qwen2 and bool(config.get("attention_bias"))
    cos, sin = cos_sin
    q = linear(x, tensors, f"{name}.q_proj", in_bias).reshape(tokens, -1, size)
    k = linear(x, tensors, f"{name}.k_proj", in_bias).reshape(tokens, -1, size)
    v = linear(x, tensors, f"{name}.v_proj", in_bias).reshape(tokens, -1, size)
    q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
    sharing = q.shape[1] // k.shape[1]
    k, v = k.repeat(sharing, axis=1), v.repeat(sharing, axis=1)
    scores = np.einsum("qhc,khc->hqk", q, k) * size**-0.5
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    out = np.einsum("hqk,khc->qhc", softmax(scores), v).reshape(tokens, -1)
    return linear(out, tensors, f"{name}.o_proj", out_bias)


def block(x: Array, tensors: Tensors, layer: int, config: Config, cos_sin: tuple[Array, Array]) -> Array:
    name, eps, bias = f"model.layers.{layer}", config["rms_norm_eps"], bool(config.get("mlp_bias"))
    normed = rms_norm(x, tensors[f"{name}.input_layernorm.weight"], eps)
    x = x + attention(normed, tensors, f"{name}.self_attn", config, cos_sin)
    normed = rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"], eps)
    gated = linear(normed, tensors, f"{name}.mlp.gate_proj", bias)
    gated = gated * sigmoid(gated) * linear(normed, tensors, f"{name}.mlp.up_proj", bias)
    return x + linear(gated, tensors, f"{name}.mlp.down_proj", bias)


def forward(
    tensors: Tensors,
    config: Config,
    token_ids: Any,
    positions: Any = None,
    return_layers: bool = False,
) -> dict[str, Any]:
    """One sequence. token_ids [T]; positions [T], 0..T-1 when None, any integers: they only turn q and k.

    Returns logits [T, W], hidden [T, D] (after the final norm) and, when asked, `layers`: the residual stream
    [T, D] after each layer; all float64.
    """
    token_ids = np.asarray(token_ids)
    positions = np.arange(len(token_ids)) if positions is None else np.asarray(positions)
    theta, scaling = rope_settings(config)
    cos_sin = rotation(positions, inverse_frequencies(head_dim(config), theta, scaling), amplitude(config))
    x = tensors["model.embed_tokens.weight"][token_ids].astype(np.float64)
    layers = []
    for layer in range(config["num_hidden_layers"]):
        x = block(x, tensors, layer, config, cos_sin)
        layers.append(x)
    hidden = rms_norm(x, tensors["model.norm.weight"], config["rms_norm_eps"])
    out: dict[str, Any] = {"logits": head(hidden, tensors, config), "hidden": hidden}
    return {**out, "layers": layers} if return_layers else out
