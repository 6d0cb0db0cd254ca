"""What the model tests compare and how: texts, far positions, differences relative to the scale of the logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference.variants import VARIANTS

Array = npt.NDArray[Any]

TOLERANCE = 1e-4
"""Of float32 logits, relative to the largest logit of what is compared."""

IDS = np.random.default_rng(11).integers(0, 512, 64)
"""A text without meaning: every id of the tiny vocabularies may come."""


def far_positions(name: str, count: int) -> Array:
    """Ascending positions with gaps: beyond DeepSeek's original 4096, or a dense family's stretched 64."""
    first, step = (9000, 300) if VARIANTS[name].family.startswith("deepseek") else (900, 23)
    half = count // 2
    return np.concatenate([np.arange(half), first + step * np.arange(count - half)])


def difference(got: Array, want: Array) -> float:
    """Largest absolute difference over the largest absolute value of `want`; infinite if anything is not finite."""
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want).max())


def log_softmax(logits: Array) -> Array:
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(-1, keepdims=True)
    normal: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normal


def full_distribution(top: Sequence[tuple[int, float]]) -> Array:
    """The log-probabilities [V] of one position from its complete `top` list."""
    out = np.empty(len(top))
    for token, value in top:
        out[token] = value
    return out


def edited(folder: Path, into: Path, **fields: Any) -> Path:
    """A copy of a checkpoint with other values in its config.json."""
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, **fields}))
    return into
