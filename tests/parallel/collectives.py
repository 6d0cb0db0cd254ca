"""Every collective along every axis of several plans, on four ranks: what is put in, and what NumPy says comes out."""

from __future__ import annotations

from typing import Any

import numpy as np

from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan

AXES = ("tp", "dp", "ep", "ep_rest", "stage")
PLANS = ("dp2.tp2.ep2", "dp4.ep2", "tp4.ep4")
NAMES = ("sum", "gather", "gather_ids", "scatter", "exchange", "any")


def inputs(rank: int) -> dict[str, Any]:
    """x [8, 3] float32 with an infinity, ids [2, 3] int32, flags [3] bool: other values on each rank."""
    x = np.random.default_rng(rank).standard_normal((8, 3)).astype(np.float32)
    if rank == 1:
        x[2, 1] = -np.inf
    ids = np.random.default_rng(rank).integers(-5, 1 << 24, (2, 3)).astype(np.int32)
    return {"x": x, "ids": ids, "flags": np.array([rank % 2 == 0, rank == 3, False])}


def expected(plan: str, rank: int) -> dict[str, Any]:
    """The definition of each collective on whole arrays."""
    ranks, out = Ranks(ShardPlan.parse(plan), rank), {}
    for axis in AXES:
        place = ranks.place(axis)
        given = [inputs(member) for member in place.members]
        count, mine = len(given), place.position
        total = np.sum([g["x"] for g in given], 0)
        part = 8 // count
        out[f"{axis}.sum"] = total
        out[f"{axis}.gather"] = np.concatenate([g["x"] for g in given], 1)
        out[f"{axis}.gather_ids"] = np.concatenate([g["ids"] for g in given], 0)
        out[f"{axis}.scatter"] = total[mine * part : (mine + 1) * part]
        out[f"{axis}.exchange"] = np.concatenate([g["x"][mine * part : (mine + 1) * part] for g in given])
        out[f"{axis}.any"] = np.any([g["flags"] for g in given], 0)
    return out


def run(rank: int) -> dict[str, Any]:
    """What this rank's graphs return: one graph per plan."""
    from msds_graphs.collectives import create_groups
    from msds_graphs.compile import compile

    out: dict[str, Any] = {}
    for plan in PLANS:
        ranks = Ranks(ShardPlan.parse(plan), rank)
        create_groups(ranks)
        values = compile(_step(ranks), bound=(), batch=inputs(rank), name=f"collectives of {plan}")(inputs(rank))
        keys = [f"{plan}/{axis}.{name}" for axis in AXES for name in NAMES]
        out |= dict(zip(keys, values, strict=True))
    return out


def _step(ranks: Ranks) -> Any:
    from msds_graphs.collectives import after, all_gather, all_reduce, all_to_all, reduce_scatter

    def step(bound, donated, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        x, ids, flags = batch["x"], batch["ids"], batch["flags"]
        results = ()
        for axis in AXES:
            total = all_reduce(x, axis, ranks)
            whole = all_gather(after(x, total, ranks), axis, 1, ranks)
            numbers = all_gather(after(ids, whole, ranks), axis, 0, ranks)
            part = reduce_scatter(after(x, numbers, ranks), axis, 0, ranks)
            swapped = all_to_all(after(x, part, ranks), axis, ranks)
            either = all_reduce(after(flags, swapped, ranks), axis, ranks)
            x = after(x, either, ranks)
            results = (*results, total, whole, numbers, part, swapped, either)
        return results, donated

    return step
