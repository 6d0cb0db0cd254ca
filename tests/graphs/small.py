"""A model that is not ours: a little attention pool with running statistics, in graph mode and in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import ops

from msds_graphs.specs import ArraySpec

WIDTH = 3
BUCKETS = [{"S": 2, "Q": 4}, {"S": 4, "Q": 8}]
BATCH = {"x": ArraySpec(("S", "Q", WIDTH), "float32"), "lens": (ArraySpec(("S",), "int32"),)}
OUTPUTS = {"pooled": ("S",), "details": ({"scores": ("S", "Q")}, ())}


def weights(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "layers": [{"w": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)} for _ in range(2)],
        "query": rng.normal(size=WIDTH).astype(np.float32),
    }


def state() -> dict[str, Any]:
    return {"calls": np.zeros((), np.int32), "seen": (np.zeros((), np.float32),)}


def pool(bound: Any, donated: Any, batch: Any) -> Any:
    """x [S, Q, W], lens [S] -> pooled [S, W], scores [S, Q], total []."""
    hidden = batch["x"]
    for layer in bound["layers"]:
        hidden = ops.tanh(ops.matmul(hidden, layer["w"]))
    lens = batch["lens"][0]
    inside = ops.arange(hidden.shape[1])[None, :] < lens[:, None]  # [S, Q]
    logits = ops.where(inside, (hidden * bound["query"]).sum(-1), ops.full_like(hidden[..., 0], -1e9))
    scores = ops.softmax(logits, -1)
    pooled = (scores[..., None] * hidden).sum(1)
    total = lens.astype(hidden.dtype).sum()
    outputs = {"pooled": pooled, "details": ({"scores": scores}, total)}
    return outputs, {"calls": donated["calls"] + 1, "seen": (donated["seen"][0] + total,)}


def pool_numpy(tree: Any, x: np.ndarray[Any, Any], lens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The pooled output, one sequence at a time."""
    rows = []
    for row, length in zip(x, lens, strict=True):
        hidden = row[:length]
        for layer in tree["layers"]:
            hidden = np.tanh(hidden @ layer["w"])
        logits = hidden @ tree["query"]
        scores = np.exp(logits - logits.max())
        rows.append((scores / scores.sum()) @ hidden)
    return np.stack(rows)


def batch_of(sequences: int, queries: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(sequences, queries, WIDTH)).astype(np.float32),
        "lens": (rng.integers(1, queries + 1, sequences).astype(np.int32),),
    }
