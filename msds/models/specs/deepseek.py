"""Parameter and cache trees of DeepSeek-V2 and V3 before any array exists. Host code: no MindSpore.

H heads, N nope features, V value features, L latent (kv_lora_rank), E experts.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from msds.config import DeepseekConfig
from msds_graphs.specs import ArraySpec

Params = dict[str, Any]
Cache = dict[str, Any]


def spec(config: DeepseekConfig, dtype: str = "float32") -> Params:
    """The parameter tree before any array exists; gates and their biases are float32 whatever `dtype`."""
    tree: Params = {
        "embed_tokens": {"weight": _weight(config, dtype, ("vocab", config.vocab_size), ("embed", config.hidden_size))},
        "layers": tuple(_layer_spec(config, dtype, config.is_moe_layer(i)) for i in range(config.num_hidden_layers)),
        "norm": _norm_spec(config.hidden_size, dtype),
    }
    if not config.tie_word_embeddings:
        head = _weight(config, dtype, ("vocab", config.vocab_size), ("embed", config.hidden_size))
        tree["lm_head"] = {"weight": head}
    tree["mtp"] = tuple(_mtp_spec(config, dtype) for _ in range(config.num_nextn_predict_layers))
    return tree


def cache_spec(config: DeepseekConfig, num_blocks: int, block_size: int, dtype: str = "float32") -> Cache:
    """The paged cache, flat over slots: per layer the normed latent and the rotated rope key of each token."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    page = ArraySpec((num_blocks * block_size, width), dtype, axes=("slots", "kv_lora"))
    return {
        "layers": tuple({"latent": page} for _ in range(config.num_hidden_layers)),
        "mtp": tuple({"latent": page} for _ in range(config.num_nextn_predict_layers)),
    }


def _weight(config: DeepseekConfig, dtype: str, *dims: tuple[str | None, int]) -> ArraySpec:
    axes, shape = zip(*dims, strict=True)
    return ArraySpec(shape, dtype, axes=axes, init=("normal", config.initializer_range))


def _norm_spec(features: int, dtype: str, axis: str = "embed") -> Params:
    return {"weight": ArraySpec((features,), dtype, axes=(axis,), init="ones")}


def _mtp_spec(config: DeepseekConfig, dtype: str) -> Params:
    hidden = config.hidden_size
    return _layer_spec(config, dtype, config.n_routed_experts > 0) | {
        "enorm": _norm_spec(hidden, dtype),
        "hnorm": _norm_spec(hidden, dtype),
        "eh_proj": {"weight": _weight(config, dtype, ("embed", hidden), (None, 2 * hidden))},
        "shared_head": {"norm": _norm_spec(hidden, dtype)},
    }


def _layer_spec(config: DeepseekConfig, dtype: str, is_moe: bool) -> Params:
    return {
        "input_layernorm": _norm_spec(config.hidden_size, dtype),
        "self_attn": _attention_spec(config, dtype),
        "post_attention_layernorm": _norm_spec(config.hidden_size, dtype),
        "mlp": _moe_spec(config, dtype) if is_moe else _mlp_spec(config, dtype, config.intermediate_size),
    }


def _attention_spec(config: DeepseekConfig, dtype: str) -> Params:
    embed, heads = ("embed", config.hidden_size), config.num_attention_heads
    query = ("heads", heads * config.qk_head_dim)
    latent_and_rope = config.kv_lora_rank + config.qk_rope_head_dim
    expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)

    def biased(weight: ArraySpec) -> Params:
        if not config.attention_bias:
            return {"weight": weight}
        return {"weight": weight, "bias": ArraySpec(weight.shape[:1], dtype, axes=weight.axes[:1])}

    tree: Params = {}
    if config.q_lora_rank is None:
        tree["q_proj"] = {"weight": _weight(config, dtype, query, embed)}
    else:
        q_lora = ("q_lora", config.q_lora_rank)
        tree["q_a_proj"] = biased(_weight(config, dtype, q_lora, embed))
        tree["q_a_layernorm"] = _norm_spec(config.q_lora_rank, dtype, "q_lora")
        tree["q_b_proj"] = {"weight": _weight(config, dtype, query, q_lora)}
    kv_lora = ("kv_lora", config.kv_lora_rank)
    tree["kv_a_proj_with_mqa"] = biased(_weight(config, dtype, ("kv_lora", latent_and_rope), embed))
    tree["kv_a_layernorm"] = _norm_spec(config.kv_lora_rank, dtype, "kv_lora")
    tree["kv_b_proj"] = {"weight": _weight(config, dtype, ("heads", expanded), kv_lora)}
    tree["o_proj"] = biased(_weight(config, dtype, embed, ("heads", heads * config.v_head_dim)))
    return tree


def _mlp_spec(config: DeepseekConfig, dtype: str, width: int) -> Params:
    embed, mlp = ("embed", config.hidden_size), ("mlp", width)
    return {
        "gate_proj": {"weight": _weight(config, dtype, mlp, embed)},
        "up_proj": {"weight": _weight(config, dtype, mlp, embed)},
        "down_proj": {"weight": _weight(config, dtype, embed, mlp)},
    }


def _moe_spec(config: DeepseekConfig, dtype: str) -> Params:
    embed, experts = ("embed", config.hidden_size), ("experts", config.n_routed_experts)
    width = ("expert_mlp", config.moe_intermediate_size)
    # every rank scores every expert, so the router's rows have a name of their own
    gate: Params = {"weight": _weight(config, "float32", ("router", config.n_routed_experts), embed)}
    if config.topk_method == "noaux_tc":
        gate["e_score_correction_bias"] = ArraySpec((config.n_routed_experts,), "float32", axes=("router",))
    tree: Params = {
        "gate": gate,
        "experts": {
            "gate_proj": _weight(config, dtype, experts, width, embed),
            "up_proj": _weight(config, dtype, experts, width, embed),
            "down_proj": _weight(config, dtype, experts, embed, width),
        },
    }
    if config.n_shared_experts:
        tree["shared_experts"] = _mlp_spec(config, dtype, config.n_shared_experts * config.moe_intermediate_size)
    return tree


# --- derived weights -----------------------------------------------------------------------------------------


def derived_spec(config: DeepseekConfig, dtype: str = "float32") -> Params:
    """The canonical tree plus what `decode` and `mtp` want beside it: kv_b_proj cut into its two absorbed halves.

    Per attention `absorbed`: `w_uk` [H, N, L] (keys from the latent) and `w_uv` [H, V, L] (values from it).
    """
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    axes = ("heads", None, "kv_lora")
    absorbed = {
        "w_uk": ArraySpec((heads, config.qk_nope_head_dim, latent), dtype, axes=axes),
        "w_uv": ArraySpec((heads, config.v_head_dim, latent), dtype, axes=axes),
    }
    return _with_absorbed(spec(config, dtype), lambda kv_b: absorbed)


def derive(params: Params, *, config: DeepseekConfig) -> Params:
    """The tree of `derived_spec` from the canonical one: copies of the final, already dequantised kv_b_proj.

    NumPy arrays in, NumPy arrays out.
    """

    def absorbed(kv_b: Any) -> Params:
        # the heads of this rank: all, or its slice
        kv_b = kv_b.reshape(-1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)  # [H, N + V, L]
        return {
            "w_uk": np.ascontiguousarray(kv_b[:, : config.qk_nope_head_dim]),
            "w_uv": np.ascontiguousarray(kv_b[:, config.qk_nope_head_dim :]),
        }

    return _with_absorbed(params, absorbed)


def _with_absorbed(tree: Params, absorbed: Callable[[Any], Params]) -> Params:
    """The tree with `absorbed` of its kv_b_proj weight in every attention."""

    def extended(layer: Params) -> Params:
        attention = layer["self_attn"]
        return layer | {"self_attn": attention | {"absorbed": absorbed(attention["kv_b_proj"]["weight"])}}

    return tree | {
        "layers": tuple(extended(layer) for layer in tree["layers"]),
        "mtp": tuple(extended(layer) for layer in tree["mtp"]),
    }
