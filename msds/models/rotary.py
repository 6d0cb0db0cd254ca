"""Rotary constants of a model, folded into the graph at compile time."""

import math
from typing import Any

import numpy as np
from mindspore.ops.primitive import constexpr

from msds.config import DeepseekConfig, ModelConfig
from msds_ops.rope import (
    default_frequencies,
    linear_frequencies,
    llama3_frequencies,
    yarn_frequencies,
    yarn_mscale,
)


def rotary_frequencies(rope_dim: int, theta: float, scaling: Any, max_positions: int) -> tuple[np.ndarray, float]:
    """Frequencies [R/2] float32 and the amplitude of cos and sin, as the config's `rope_scaling` asks.

    `dynamic` keeps the unscaled frequencies: it would change them only beyond the original length, which the
    engine refuses because keys already cached could not follow.
    """
    if scaling is None or scaling.rope_type in ("default", "dynamic"):
        return default_frequencies(rope_dim, theta), 1.0
    if scaling.rope_type == "linear":
        return linear_frequencies(rope_dim, theta, scaling.factor), 1.0
    original = scaling.original_max_position_embeddings or max_positions
    if scaling.rope_type == "llama3":
        frequencies = llama3_frequencies(
            rope_dim,
            theta,
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=original,
        )
        return frequencies, 1.0
    frequencies = yarn_frequencies(
        rope_dim,
        theta,
        factor=scaling.factor,
        original_max_position_embeddings=original,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        truncate=scaling.truncate,
    )
    return frequencies, yarn_amplitude(scaling)


def yarn_amplitude(scaling: Any) -> float:
    """What YaRN multiplies cos and sin by: m(mscale) / m(mscale_all_dim) where both are given, else m(1)."""
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def attention_scale(query_dim: int, scaling: Any) -> float:
    """Softmax scale query_dim^-1/2, times m(mscale_all_dim)^2 where DeepSeek's YaRN asks for it.

    m enters twice because DeepSeek scales the whole query-key product (rope and nope parts) instead of the rotated
    features alone: modeling_deepseek.py of the published checkpoints.
    """
    scale = 1.0 / math.sqrt(query_dim)
    if scaling is not None and scaling.rope_type == "yarn" and scaling.mscale_all_dim:
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


@constexpr
def rotary_constants(config: ModelConfig, rope_dim: int) -> tuple[tuple[float, ...], float]:
    """`rotary_frequencies` of a config as compile-time constants."""
    frequencies, amplitude = rotary_frequencies(
        rope_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
    )
    return tuple(float(f) for f in frequencies), amplitude


@constexpr
def deepseek_attention_scale(config: DeepseekConfig) -> float:
    """`attention_scale` of a DeepSeek config as a compile-time constant."""
    return attention_scale(config.qk_head_dim, config.rope_scaling)
