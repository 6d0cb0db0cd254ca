"""Rotary position embedding (Su et al. 2021) and the schemes that stretch it.

T tokens, H heads, R rotated features (even).

The frequency functions are host code in float32, the precision the models were trained with; the device only
multiplies positions by them. Interleaved pairs (2i, 2i+1) are DeepSeek's layout, half split (i, i + R/2) that of
Llama and Qwen: the checkpoint decides, not the scheme.
"""

import math
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops
from mindspore.ops.primitive import constexpr

Array: TypeAlias = npt.NDArray[Any]

_matmul = ops.MatMul()


def default_frequencies(rope_dim: int, theta: float) -> Array:
    """theta^(-2i/R): [R/2] float32."""
    exponents = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
    return (np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32)


def linear_frequencies(rope_dim: int, theta: float, factor: float) -> Array:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`; [R/2] float32."""
    return default_frequencies(rope_dim, theta) / np.float32(factor)


def llama3_frequencies(
    rope_dim: int,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Array:
    """Llama 3.1's scheme: long waves divided by `factor`, short waves kept, a linear ramp between; [R/2] float32."""
    inv_freq = default_frequencies(rope_dim, theta).astype(np.float64)
    wavelength = 2 * math.pi / inv_freq
    ramp = (original_max_position_embeddings / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = np.clip(ramp, 0.0, 1.0)
    frequencies: Array = (inv_freq * (kept + (1 - kept) / factor)).astype(np.float32)
    return frequencies


def yarn_frequencies(
    rope_dim: int,
    theta: float,
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool = True,
) -> Array:
    """YaRN (Peng et al. 2023, section 3.2), NTK by parts; [R/2] float32.

    Features that turn more than `beta_fast` times within the original context keep their frequency, those that
    turn less than `beta_slow` times are divided by `factor`, a linear ramp over the feature index between. The
    ramp's ends are rounded outwards to whole features where `truncate` is set, as DeepSeek's code always does.
    """
    inv_freq = default_frequencies(rope_dim, theta).astype(np.float64)

    def feature_of(rotations: float) -> float:
        turns = original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low, high = feature_of(beta_fast), feature_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero; the reference code does the same
    stretched = np.clip((np.arange(rope_dim // 2) - low) / (high - low), 0.0, 1.0)
    return (inv_freq * (1 - stretched + stretched / factor)).astype(np.float32)


def rope_cos_sin(
    positions: Tensor, inv_freq: tuple[float, ...], amplitude: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, times `amplitude`: [T] int32 -> two [T, 1, R] float32.

    Each frequency stands at both features of its pair: neighbours when `interleaved`, else half of R apart.
    """
    angles = positions.astype(ms.float32).reshape(-1, 1) * Tensor(inv_freq, ms.float32).reshape(1, -1)
    if interleaved:
        angles = ops.stack((angles, angles), -1).reshape(angles.shape[0], 1, -1)
    else:
        angles = ops.concat((angles, angles), -1).expand_dims(1)
    cos, sin = ops.cos(angles), ops.sin(angles)
    if amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    return cos, sin


@constexpr  # type: ignore[untyped-decorator]
def quarter_turn(rope_dim: int, interleaved: bool) -> Tensor:
    """The matrix [R, R] that turns every pair (a, b) of a row vector into (-b, a)."""
    first = np.arange(0, rope_dim, 2) if interleaved else np.arange(rope_dim // 2)
    second = first + (1 if interleaved else rope_dim // 2)
    turn = np.zeros((rope_dim, rope_dim), np.float32)
    turn[second, first] = -1.0
    turn[first, second] = 1.0
    return Tensor(turn)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate every pair of features: [T, H, R] with cos, sin [T, 1, R] -> [T, H, R], components in place.

    x cos + (x turned by 90 degrees) sin. The turn is a product with a matrix of one +-1 per row, which is exact, and
    on a CPU six times as fast as picking every other feature apart.
    """
    rope_dim = x.shape[-1]
    turned = _matmul(x.reshape(-1, rope_dim), quarter_turn(rope_dim, interleaved).astype(x.dtype)).reshape(x.shape)
    return (x * cos + turned * sin).astype(x.dtype)


def rotate_numpy(x: Array, positions: Array, inv_freq: Array, interleaved: bool) -> Array:
    """Either rotation in float64, pair by pair as complex numbers: [T, H, R] -> [T, H, R]."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    angles = np.asarray(positions, np.float64)[:, None, None] * np.asarray(inv_freq, np.float64)
    turned = (first + 1j * second) * np.exp(1j * angles)
    if interleaved:
        return np.asarray(np.stack((turned.real, turned.imag), axis=-1).reshape(x.shape))
    return np.concatenate((turned.real, turned.imag), axis=-1)
