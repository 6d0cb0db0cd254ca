"""Tokens to their experts and back between four ranks: what is put in, and what NumPy says comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan

RANKS, FEATURES = 4, 3
SHAPES = {"few": (5, 3, 1), "many": (2, 3, 4), "lonely": (1, 2, 2)}
"""Name -> tokens of each rank, slots that each chooses, slots of each rank."""
Arrays = dict[str, npt.NDArray[Any]]


def inputs(name: str, rank: int) -> Arrays:
    """x [T, D] with an infinity, slots [T, K], weights [T, K]; rank 2 sends all tokens to the same slots."""
    tokens, chosen, held = SHAPES[name]
    generator = np.random.default_rng([len(name), rank])
    x = generator.standard_normal((tokens, FEATURES)).astype(np.float32)
    x[0, 0] = np.inf if rank == 1 else x[0, 0]
    slots = np.stack([generator.permutation(RANKS * held)[:chosen] for _ in range(tokens)])
    slots = np.broadcast_to(np.arange(chosen), slots.shape) if rank == 2 else slots
    return {"x": x, "slots": slots.astype(np.int32), "weights": generator.random((tokens, chosen)).astype(np.float32)}


def expected(name: str, rank: int) -> Arrays:
    """Rows by slot, then by sender and token, and how many of each slot; and each token's weighted sum of its rows, a
    row having been multiplied by 1 + its slot."""
    held = SHAPES[name][2]
    given = [inputs(name, sender) for sender in range(RANKS)]
    rows, counts = [], []
    for slot in range(rank * held, (rank + 1) * held):
        arrived = [x for g in given for x, wanted in zip(g["x"], g["slots"], strict=True) if slot in wanted]
        rows += arrived
        counts.append(len(arrived))
    mine = given[rank]
    back = (mine["x"][:, None] * (1 + mine["slots"])[..., None] * mine["weights"][..., None]).sum(1)
    return {"rows": np.array(rows).reshape(-1, FEATURES), "counts": np.array(counts), "back": back}


def run(rank: int) -> Arrays:
    """What this rank's graphs return: one graph per shape."""
    from msds_graphs.collectives import create_groups
    from msds_graphs.compile import compile

    ranks = Ranks(ShardPlan(dp=RANKS, ep=RANKS), rank)
    create_groups(ranks)
    out: Arrays = {}
    for name in SHAPES:
        batch = inputs(name, rank)
        values = compile(_step(ranks, SHAPES[name][2]), bound=(), batch=batch, name=f"exchange of {name}")(batch)
        out |= dict(zip((f"{name}.rows", f"{name}.counts", f"{name}.back"), values, strict=True))
    return out


def _step(ranks: Ranks, held: int) -> Any:
    from msds_graphs.exchange import combine, dispatch
    from msds_ops.moe import expert_of_rows

    def step(bound, donated, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        x, slots, weights = batch["x"], batch["slots"], batch["weights"]
        rows, counts, way_back = dispatch(x, slots, weights, held, ranks, "emulated")
        factor = 1 + expert_of_rows(counts, rows.shape[0]) + ranks.index("ep") * held
        made = rows * factor.astype(rows.dtype).expand_dims(-1)
        return (rows, counts, combine(made, slots, weights, held, way_back, ranks, "emulated")), donated

    return step
