"""Rotary position embedding as the published configs describe it, in plain NumPy.

Dims: T tokens, R rotated dims (even). A frequency turns one pair of dims; which two dims make a pair is the
model's business (interleaved for DeepSeek, halves for Llama and Qwen2).

Frequencies are worked out in float64 and rounded once to float32, and the angle is their float32 product
with the position: that is the arithmetic of every published implementation, and far positions feel it
(position 160000 times a frequency of 0.1 is off by 1e-3 rad in float32). All else here is float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Scaling = dict[str, Any]


def rope_settings(config: dict[str, Any]) -> tuple[float, Scaling | None]:
    """(theta, scaling) from a raw config, hub style (`rope_theta`, `rope_scaling`) or transformers 5 style.

    scaling is None for plain rotation, else a dict with `rope_type` and `original_max_position_embeddings`.
    """
    merged = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(merged.get("rope_theta", config.get("rope_theta", 10000.0)))
    rope_type = merged.get("rope_type", merged.get("type", "default"))
    if rope_type == "default":
        return theta, None
    original = merged.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return theta, {**merged, "rope_type": rope_type, "original_max_position_embeddings": original}


def mscale(factor: float, weight: float) -> float:
    """YaRN's attention temperature 0.1 * weight * ln(factor) + 1; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def inverse_frequencies(dim: int, theta: float, scaling: Scaling | None) -> Array:
    """[R/2] float32 radians per position."""
    if dim % 2:
        raise ValueError(f"rotated dims come in pairs, so {dim} cannot be rotated")
    plain: Array = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return plain.astype(np.float32)
    kind = scaling["rope_type"]
    if kind == "dynamic":  # plain up to max_position_embeddings; beyond it keys already cached would change
        return plain.astype(np.float32)
    if kind == "linear":
        return (plain / scaling["factor"]).astype(np.float32)
    if kind == "llama3":
        return _llama3(plain, scaling).astype(np.float32)
    if kind == "yarn":
        return _yarn(plain, theta, scaling).astype(np.float32)
    raise ValueError(f"unknown rope type {kind!r}")


def _llama3(plain: Array, scaling: Scaling) -> Array:
    """Long waves are divided by the factor, short ones are kept, and those between are blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the original context
    kept: Array = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling["factor"]


def _yarn(plain: Array, theta: float, scaling: Scaling) -> Array:
    """Dims that turn often are kept, dims that turn rarely are divided by the factor, a ramp lies between."""
    dim, original = 2 * len(plain), scaling["original_max_position_embeddings"]

    def dim_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_that_turns(scaling.get("beta_fast") or 32)), 0)
    high = min(math.ceil(dim_that_turns(scaling.get("beta_slow") or 1)), dim - 1)
    width = high - low if high != low else 0.001  # as published: no division by zero
    stretched: Array = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return stretched * plain / scaling["factor"] + (1 - stretched) * plain


def rotation(positions: Array, inv_freq: Array, amplitude: float) -> tuple[Array, Array]:
    """cos and sin [T, R/2] of the float32 angles, times the amplitude."""
    angle = positions.astype(np.float32)[:, None] * inv_freq[None, :]
    angle = angle.astype(np.float64)
    return np.cos(angle) * amplitude, np.sin(angle) * amplitude
