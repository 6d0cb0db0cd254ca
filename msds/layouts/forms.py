"""How stored tensors and Hugging Face ones are made of each other: permutations of numbers, each with its inverse.

H heads, G key/value heads, D head dim, N nope, R rope, V value dim, L kv_lora. Rows are axis 0: weights [out, in],
biases [out]. Both directions only move raw numbers, so any stored type passes through bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from msds.checkpoint.dtypes import Array
from msds.config import DeepseekConfig, ModelConfig
from msds.layouts.orders import Orders

Arrays = list[Array]
Move = Callable[[Sequence[Array], ModelConfig, Orders], Arrays]


@dataclass(frozen=True)
class Form:
    """`to_hf`: stored arrays to Hugging Face ones; `to_stored`: back. `order`: what has to be known for it.

    Either raises ValueError when the sizes do not fit the config.
    """

    to_hf: Move
    to_stored: Move
    order: str | None = None


def _same(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    return list(arrays)


def _cut(rows: Array, *sizes: int) -> Arrays:
    """Consecutive groups of rows; ValueError unless they are all of them."""
    if sum(sizes) != rows.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows, the config asks for {' + '.join(map(str, sizes))}")
    return np.split(rows, list(np.cumsum(sizes)[:-1]))


def _by_head(rows: Array, heads: int) -> Array:
    return rows.reshape(heads, rows.shape[0] // heads, *rows.shape[1:])


def _flat(by_head: Array) -> Array:
    return by_head.reshape(by_head.shape[0] * by_head.shape[1], *by_head.shape[2:])


def _cut_heads(rows: Array, heads: int, *sizes: int) -> Arrays:
    """Rows of `heads` heads [heads * (a + b + ...)] to all a rows, all b rows, ..."""
    if heads * sum(sizes) != rows.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows, the config asks for {heads} x ({' + '.join(map(str, sizes))})")
    return [_flat(part) for part in np.split(_by_head(rows, heads), list(np.cumsum(sizes)[:-1]), axis=1)]


def _join_heads(parts: Sequence[Array], heads: int) -> Array:
    return _flat(np.concatenate([_by_head(part, heads) for part in parts], axis=1))


def _to_halves(rows: Array, heads: int = 1) -> Array:
    """Within each head rows 0 1 2 3 to 0 2 1 3: pairs (2i, 2i + 1) become first halves, then second ones."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _to_pairs(rows: Array, heads: int = 1) -> Array:
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _heads(config: ModelConfig) -> tuple[int, int, int]:
    """H, G, D of a model with plain attention."""
    if isinstance(config, DeepseekConfig):
        raise ValueError("the config has multi-head latent attention, which has no such tensor")
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


def _mla(config: ModelConfig) -> DeepseekConfig:
    if not isinstance(config, DeepseekConfig):
        raise ValueError(f"a {config.model_type} config has no multi-head latent attention")
    return config


def _qkv_to_hf(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    heads, groups, width = _heads(config)
    if orders.qkv == "contiguous":
        return _cut(arrays[0], heads * width, groups * width, groups * width)
    return _cut_heads(arrays[0], groups, heads // groups * width, width, width)


def _qkv_to_stored(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    return [np.concatenate(arrays) if orders.qkv == "contiguous" else _join_heads(arrays, _heads(config)[1])]


def _gate_up_to_hf(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    (rows,) = arrays
    if rows.shape[0] % 2:
        raise ValueError(f"{rows.shape[0]} rows are not as many of gate as of up")
    return np.split(rows, 2) if orders.gate_up == "contiguous" else [rows[0::2], rows[1::2]]


def _gate_up_to_stored(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    return [np.concatenate(arrays) if orders.gate_up == "contiguous" else _join_heads(arrays, arrays[0].shape[0])]


def _q_split_to_hf(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    nope, rope = arrays
    heads = _mla(config).num_attention_heads
    return [_join_heads([nope, _to_pairs(rope, heads)], heads)]


def _q_split_to_stored(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    c = _mla(config)
    nope, rope = _cut_heads(arrays[0], c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim)
    return [nope, _to_halves(rope, c.num_attention_heads)]


def _kv_split_to_hf(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    latent, rope = arrays
    return [np.concatenate([latent, _to_pairs(rope)])]


def _kv_split_to_stored(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    c = _mla(config)
    latent, rope = _cut(arrays[0], c.kv_lora_rank, c.qk_rope_head_dim)
    return [latent, _to_halves(rope)]


def _q_rope_to_hf(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    c = _mla(config)
    parts = _cut_heads(arrays[0], c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim)
    return list(arrays) if orders.rope == "pairs" else _q_split_to_hf(parts, config, orders)


def _q_rope_to_stored(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    if orders.rope == "pairs":
        return list(arrays)
    return [_join_heads(_q_split_to_stored(arrays, config, orders), _mla(config).num_attention_heads)]


def _kv_rope_to_hf(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    c = _mla(config)
    parts = _cut(arrays[0], c.kv_lora_rank, c.qk_rope_head_dim)
    return list(arrays) if orders.rope == "pairs" else _kv_split_to_hf(parts, config, orders)


def _kv_rope_to_stored(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    return list(arrays) if orders.rope == "pairs" else [np.concatenate(_kv_split_to_stored(arrays, config, orders))]


def _kv_b_to_hf(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    return [_join_heads(arrays, _mla(config).num_attention_heads)]


def _kv_b_to_stored(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    c = _mla(config)
    return _cut_heads(arrays[0], c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim)


def _transposed(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    return [array.T for array in arrays]


def _expert(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    return _transposed(arrays, config, orders) if orders.experts == "in_out" else list(arrays)


def _expert_gate_up_to_hf(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    if arrays[0].shape[1] % 2:
        raise ValueError(f"{arrays[0].shape[1]} columns are not as many of gate as of up")
    return [half.T for half in np.split(arrays[0], 2, axis=1)]


def _expert_gate_up_to_stored(arrays: Sequence[Array], config: ModelConfig, orders: Orders) -> Arrays:
    return [np.concatenate([array.T for array in arrays], axis=1)]


SAME = Form(_same, _same)
QKV = Form(_qkv_to_hf, _qkv_to_stored, "qkv")
GATE_UP = Form(_gate_up_to_hf, _gate_up_to_stored, "gate_up")
Q_SPLIT = Form(_q_split_to_hf, _q_split_to_stored)
KV_SPLIT = Form(_kv_split_to_hf, _kv_split_to_stored)
Q_ROPE = Form(_q_rope_to_hf, _q_rope_to_stored, "rope")
KV_ROPE = Form(_kv_rope_to_hf, _kv_rope_to_stored, "rope")
KV_B = Form(_kv_b_to_hf, _kv_b_to_stored)
EXPERT = Form(_expert, _expert, "experts")
EXPERT_T = Form(_transposed, _transposed)
EXPERT_GATE_UP = Form(_expert_gate_up_to_hf, _expert_gate_up_to_stored)
