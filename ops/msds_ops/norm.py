"""RMSNorm (Zhang and Sennrich 2019, equation 4). T tokens, D features."""

from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops

Array: TypeAlias = npt.NDArray[Any]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: [..., D], [D] -> [..., D] in x's dtype.

    The mean is taken in float32 whatever the dtype of x, as the published models do.
    """
    x32 = x.astype(ms.float32)
    scaled = x32 * ops.rsqrt(ops.mean(x32 * x32, -1, True) + eps)
    return scaled.astype(x.dtype) * weight


def rms_norm_numpy(x: Array, weight: Array, eps: float) -> Array:
    """The same in float64."""
    x64 = np.asarray(x, np.float64)
    return np.asarray(x64 / np.sqrt(np.mean(x64 * x64, axis=-1, keepdims=True) + eps) * weight)
