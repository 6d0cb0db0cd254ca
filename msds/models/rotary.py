"""Rotary constants of a model, folded into the graph at compile time."""

from typing import Any, TypeAlias

import numpy.typing as npt
from mindspore.ops.primitive import constexpr

from msds.config import DeepseekConfig, ModelConfig, RopeScaling
from msds_ops.rope import (
    default_frequencies,
    linear_frequencies,
    llama3_frequencies,
    yarn_frequencies,
)

Array: TypeAlias = npt.NDArray[Any]


def rotary_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Array, float]:
    """Frequencies [R/2] float32 and the amplitude of cos and sin, as the config's `rope_scaling` asks.

    `dynamic` keeps the unscaled frequencies: it would change them only beyond the original length, which the
    engine refuses because keys already cached could not follow.
    """
    if scaling is None or scaling.rope_type == "dynamic":
        return default_frequencies(rope_dim, theta), 1.0
    if scaling.rope_type == "linear":
        return linear_frequencies(rope_dim, theta, scaling.factor), 1.0
    original = scaling.original_max_position_embeddings
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
    return frequencies, scaling.amplitude


@constexpr  # type: ignore[untyped-decorator]
def rotary_constants(config: ModelConfig, rope_dim: int) -> tuple[tuple[float, ...], float]:
    """`rotary_frequencies` of a config as compile-time constants."""
    frequencies, amplitude = rotary_frequencies(rope_dim, config.rope_theta, config.rope_scaling)
    return tuple(float(f) for f in frequencies), amplitude


@constexpr  # type: ignore[untyped-decorator]
def mla_softmax_scale(config: DeepseekConfig) -> float:
    """(N + R)^-1/2, times m(mscale_all_dim)^2 where YaRN asks for it, as a compile-time constant.

    m enters twice because DeepSeek scales the whole query-key product (rope and nope parts) instead of the rotated
    features alone: modeling_deepseek.py of the published checkpoints.
    """
    scaling = config.rope_scaling
    scale: float = config.qk_head_dim**-0.5 * (scaling.mla_softmax_factor if scaling is not None else 1.0)
    return scale
