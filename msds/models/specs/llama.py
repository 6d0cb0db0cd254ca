"""Parameter and cache trees of Llama and Qwen2 before any array exists. Host code: no MindSpore."""

from typing import Any

from msds.config import LlamaConfig
from msds_graphs.specs import ArraySpec

Params = dict[str, Any]
Cache = dict[str, Any]


def spec(config: LlamaConfig, dtype: str = "float32") -> Params:
    """The parameter tree before any array exists."""
    vocabulary = ("vocab", config.vocab_size), ("embed", config.hidden_size)
    tree: Params = {
        "embed_tokens": _linear_spec(config, dtype, *vocabulary),
        "layers": tuple(_layer_spec(config, dtype) for _ in range(config.num_hidden_layers)),
        "norm": _norm_spec(config, dtype),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = _linear_spec(config, dtype, *vocabulary)
    return tree


def cache_spec(config: LlamaConfig, num_blocks: int, block_size: int, dtype: str = "float32") -> Cache:
    """The paged cache: per layer the rotated keys and the values, one row per key/value head and slot, head first."""
    rows = config.num_key_value_heads * num_blocks * block_size
    page = ArraySpec((rows, config.head_dim), dtype, axes=("kv_heads", None))
    return {"layers": tuple({"k": page, "v": page} for _ in range(config.num_hidden_layers))}


def _linear_spec(
    config: LlamaConfig, dtype: str, out: tuple[str, int], into: tuple[str, int], *, bias: bool = False
) -> Params:
    weight = ArraySpec((out[1], into[1]), dtype, axes=(out[0], into[0]), init=("normal", config.initializer_range))
    if not bias:
        return {"weight": weight}
    return {"weight": weight, "bias": ArraySpec((out[1],), dtype, axes=(out[0],))}


def _norm_spec(config: LlamaConfig, dtype: str) -> Params:
    return {"weight": ArraySpec((config.hidden_size,), dtype, axes=("embed",), init="ones")}


def _layer_spec(config: LlamaConfig, dtype: str) -> Params:
    embed_axis, mlp = ("embed", config.hidden_size), ("mlp", config.intermediate_size)
    q = ("heads", config.num_attention_heads * config.head_dim)
    kv = ("kv_heads", config.num_key_value_heads * config.head_dim)
    return {
        "input_layernorm": _norm_spec(config, dtype),
        "self_attn": {
            "q_proj": _linear_spec(config, dtype, q, embed_axis, bias=config.attention_bias),
            "k_proj": _linear_spec(config, dtype, kv, embed_axis, bias=config.attention_bias),
            "v_proj": _linear_spec(config, dtype, kv, embed_axis, bias=config.attention_bias),
            "o_proj": _linear_spec(config, dtype, embed_axis, q, bias=config.attention_out_bias),
        },
        "post_attention_layernorm": _norm_spec(config, dtype),
        "mlp": {
            "gate_proj": _linear_spec(config, dtype, mlp, embed_axis, bias=config.mlp_bias),
            "up_proj": _linear_spec(config, dtype, mlp, embed_axis, bias=config.mlp_bias),
            "down_proj": _linear_spec(config, dtype, embed_axis, mlp, bias=config.mlp_bias),
        },
    }


derived_spec = spec
"""The tree that the steps take: these models need nothing beside the canonical one."""


def derive(params: Params, *, config: LlamaConfig) -> Params:
    """The canonical tree itself."""
    return params
