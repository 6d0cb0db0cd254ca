"""Tokens to the ranks that hold their experts, and what these made of them back: dispatch and combine.

T tokens of each rank, D features, K slots chosen by each token, n ranks along `ep`, P slots for experts on each rank,
A = n * T * min(P, K) rows that a rank gets at most (`exchange_limits.received_rows`).

Two forms of one contract. `operators`: MoeDistributeDispatch and MoeDistributeCombine of Ascend, which send a token
once per expert that it chose; compiled without hardware, never run on an NPU. `emulated`: the same by collectives that
CPUs have, where every rank sees every token; for tests of what lies between, not for speed. Both want whole experts
on each rank (`ep` the ranks of `dp`, tp 1).

Every token is sent: the operators' mask of idle tokens (x_active_mask) is reserved and must be empty. Who has idle
tokens gives them slots of their own rank, so that they cost no link.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops.auto_generate import MoeDistributeCombine, MoeDistributeDispatch
from mindspore.ops.primitive import constexpr

from msds_graphs.collectives import after, all_gather, reduce_scatter
from msds_graphs.errors import GraphError
from msds_graphs.exchange_limits import IMPLEMENTATIONS, received_rows, step_refusal
from msds_graphs.ranks import Ranks

_dispatch = MoeDistributeDispatch()
_combine = MoeDistributeCombine()

_ALIKE = 0
"""global_bs: all ranks give as many tokens as this one. Steps of other sizes lay out the group's buffers otherwise and
may not overlap; each ends with a gather of its results over all ranks, which keeps them apart."""
_COUNTS = 1
"""expert_token_nums_type: how many rows each expert gets, not their running sums."""


@constexpr  # type: ignore[untyped-decorator]
def exchange_form(
    impl: str, machine: str, ranks: int, tokens: int, hidden: int, chosen: int, slots: int, dtype: Any
) -> str:
    """How tokens reach their experts: `operators`, `emulated`, or `gathered`, which is not of this file.

    impl: of "exchange" in the plan. "portable": the operators where they may be used, else gathered; "reference":
    emulated. ranks: of the axis "exchange". GraphError for another implementation.
    """
    if impl not in IMPLEMENTATIONS:
        raise GraphError(f"exchange has no implementation {impl!r}: use {' or '.join(IMPLEMENTATIONS)}")
    if impl == "reference":
        return "emulated"
    name = str(dtype).lower()
    if ranks > 1 and not step_refusal(machine, ranks, tokens, hidden, chosen, slots, name):
        return "operators"
    return "gathered"


def dispatch(
    x: Tensor, slots: Tensor, weights: Tensor, held: int, ranks: Ranks, form: str
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Each token to the slots that it chose: rows [A, D] sorted by slot of this rank, counts [P] int64 of each slot's
    rows, and what `combine` needs to find the way back.

    x [T, D]; slots [T, K] int32 counted over all ranks, no two of a token alike; weights [T, K] float32; held: P.
    Rows behind the counted ones mean nothing.
    """
    if form == "operators":
        return _dispatch_by_operator(x, slots, weights, held, ranks)
    check_replicas(ranks.size("tp"), ranks.size("dp"), ranks.size("ep"))
    tokens, features = x.shape
    chosen = slots.shape[1]
    every = all_gather(x, "ep", 0, ranks)  # [n * T, D]
    wanted = all_gather(after(slots, every, ranks), "ep", 0, ranks).reshape(-1) - ranks.index("ep") * held
    hit = (wanted.expand_dims(-1) == _numbers(held)).astype(ms.int32)  # [n * T * K, P]
    running = ops.cumsum(hit, 0)
    counts = running[-1]
    start = ops.cumsum(counts, 0) - counts
    most = _rows(ranks.size("ep"), tokens, chosen, held)
    place = (hit * (start + running - 1)).sum(-1, dtype=ms.int32)
    place = ops.where(hit.sum(-1, dtype=ms.int32) > 0, place, ops.full_like(place, most))
    senders = ranks.size("ep") * tokens
    source = ops.full((most + 1,), senders, dtype=ms.int32)
    source = ops.tensor_scatter_update(source, place.expand_dims(-1), _numbers(senders * chosen) // chosen)
    nothing = ops.full((1, features), float("nan"), dtype=x.dtype)  # who reads it will be noticed
    rows = ops.gather(ops.concat((every, nothing), 0), source[:most], 0)
    return rows, counts.astype(ms.int64), (place,)


def combine(
    rows: Tensor, slots: Tensor, weights: Tensor, held: int, way_back: tuple[Tensor, ...], ranks: Ranks, form: str
) -> Tensor:
    """What became of the rows [A, D] back to their tokens: sum_k weight_k * row of (token, slot_k), [T, D]."""
    if form == "operators":
        return _combine_by_operator(rows, slots, weights, held, way_back, ranks)
    place = way_back[0]
    pairs = ops.gather(rows, ops.minimum(place, rows.shape[0] - 1), 0)
    is_here = (place < rows.shape[0]).expand_dims(-1)
    pairs = ops.where(is_here, pairs, ops.zeros((1,), rows.dtype))  # [n * T * K, D], on one rank each
    mine = reduce_scatter(pairs, "ep", 0, ranks).reshape(*slots.shape, -1)
    return (mine * weights.expand_dims(-1).astype(mine.dtype)).sum(1)


def _dispatch_by_operator(
    x: Tensor, slots: Tensor, weights: Tensor, held: int, ranks: Ranks
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    size = ranks.size("exchange")
    rows, _, index, counts, received, _, scales = _dispatch(
        x,
        slots,
        size,
        ranks.index("exchange"),
        held * size,
        weights if ranks.machine == "a2" else None,  # the A3 operator has no such input
        None,
        None,
        ranks.group("exchange"),
        None,
        0,
        0,
        0,
        1 if ranks.machine == "a3" else 0,  # shared experts on ranks of their own: none; A3 yet refuses 0 as the number
        0,
        0,
        _ALIKE,
        _COUNTS,
    )
    return rows, counts, (index, received, scales)


def _combine_by_operator(
    rows: Tensor, slots: Tensor, weights: Tensor, held: int, way_back: tuple[Tensor, ...], ranks: Ranks
) -> Tensor:
    index, received, scales = way_back
    size = ranks.size("exchange")
    return _combine(
        rows,
        slots,
        index,
        received,
        weights,
        size,
        ranks.index("exchange"),
        held * size,
        None,
        None,
        None,
        None,
        None,
        scales if ranks.machine == "a2" else None,
        ranks.group("exchange"),
        None,
        0,
        0,
        0,
        1 if ranks.machine == "a3" else 0,
        0,
        0,
        0,
        0,
        0,
    )


@constexpr  # type: ignore[untyped-decorator]
def check_replicas(tp: int, dp: int, ep: int) -> None:
    """GraphError unless every rank is a replica of its own that holds whole experts."""
    if tp > 1 or dp != ep:
        raise GraphError(
            f"exchange is 'reference' with tp = {tp}, dp = {dp}, ep = {ep}: it needs tp = 1 and ep = dp; leave it out"
        )


@constexpr  # type: ignore[untyped-decorator]
def _numbers(size: int) -> Tensor:
    """[size] int32: 0, 1, 2, ..."""
    return Tensor(np.arange(size, dtype=np.int32), ms.int32)


@constexpr  # type: ignore[untyped-decorator]
def _rows(ranks: int, tokens: int, chosen: int, held: int) -> int:
    return received_rows(ranks, tokens, chosen, ranks * held)
