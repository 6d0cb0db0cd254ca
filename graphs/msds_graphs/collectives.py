"""Collectives inside graphs: named by the axis of the plan that they run along; the identity where it has one rank.

n ranks along the axis, r this rank's index. MindSpore's CPU backend has one collective for sub-groups, the sum of
float32 (and float16). So unless `ranks.native`, the others are emulated by it: a part is put between zeros, and the
sum over all ranks is the whole. Zeros are selected, never multiplied in: -inf * 0 would be NaN. Integers and bool
travel as float32, which is exact below 2^24 and holds for token ids, expert ids and slots.

Every rank must run the same collectives in the same order. Steps of one plan, called in the same order, do, if in
each graph every collective depends on the one before it: MindSpore orders independent ones as it likes, differently
on each rank. `after` adds such a dependence where the data has none. A rank that comes 30 seconds late is given up.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops.primitive import constexpr

from msds_graphs.errors import GraphError
from msds_graphs.ranks import COLLECTIVE_AXES, Ranks

_CARRIED = (ms.int32, ms.bool_, ms.bfloat16)
"""What the CPU's AllReduce does not add; float32 holds it."""
HCCL_BUFFER_MB = 200
"""Each of the two buffers of a communication group on Ascend, where nothing else is set."""


def group_name(axis: str, ranks: Ranks) -> str:
    """The name of the communication group of a rank along an axis: the same on all its members."""
    return ranks.place(axis).group


def create_groups(ranks: Ranks, exchange_buffer: int = 0) -> None:
    """Create the groups that this rank is in; every rank calls it once per process, after `init`.

    Members meet in the creation, so the order of the axes is the same everywhere. Groups of one rank are not made.
    exchange_buffer: bytes that steps want of each buffer of the group "exchange"; HCCL's default is the least.
    """
    from mindspore.communication import create_group, get_group_size, get_rank

    if (get_rank(), get_group_size()) != (ranks.rank, ranks.plan.ranks):
        raise GraphError(
            f"this process is rank {get_rank()} of {get_group_size()}, the plan {ranks.plan} wants rank {ranks.rank} "
            f"of {ranks.plan.ranks}: start one process per rank and give each its own rank"
        )
    created = set()
    for axis in COLLECTIVE_AXES:
        place = ranks.place(axis)
        if len(place.members) > 1 and place.group not in created:
            options = _buffers(exchange_buffer) if axis == "exchange" else None
            create_group(place.group, list(place.members), options)
            created.add(place.group)


def _buffers(nbytes: int) -> Any:
    """Options of a group on Ascend whose two buffers have so many bytes each, and no less than they would have."""
    from mindspore._c_expression import GroupOptions

    options = GroupOptions()
    options.hccl_config = {"hccl_buffer_size": max(HCCL_BUFFER_MB, -(-nbytes >> 20))}
    return options


def all_reduce(x: Tensor, axis: str, ranks: Ranks) -> Tensor:
    """The sum over the ranks of the axis; of bool, whether any of them is True."""
    if ranks.size(axis) == 1:
        return x
    if x.dtype == ms.bool_ or (not ranks.native and x.dtype in _CARRIED):
        return _uncarried(_sum(x.astype(ms.float32), axis, ranks), x)
    return _sum(x, axis, ranks)


def all_gather(x: Tensor, axis: str, dim: int, ranks: Ranks) -> Tensor:
    """The parts of all ranks, joined along `dim` in their order: [.., d, ..] -> [.., n * d, ..]."""
    size = ranks.size(axis)
    if size == 1:
        return x
    if ranks.native:
        value = x.astype(ms.int8) if x.dtype == ms.bool_ else x  # its AllGather has no bool
        return _along(ops.AllGather(ranks.group(axis)), value, dim).astype(x.dtype)
    value = x.astype(ms.float32) if x.dtype in _CARRIED else x
    mine = _one_of(size, ranks.index(axis), value.ndim)
    parts = ops.where(mine, value.expand_dims(0), ops.zeros((1,), value.dtype))  # [n, ..], zeros but for part r
    return _uncarried(_joined(_sum(parts, axis, ranks), dim), x)


def reduce_scatter(x: Tensor, axis: str, dim: int, ranks: Ranks) -> Tensor:
    """Part r along `dim` of the sum over the ranks: [.., n * d, ..] -> [.., d, ..]."""
    size = ranks.size(axis)
    if size == 1:
        return x
    if ranks.native:
        return _along(ops.ReduceScatter(ops.ReduceOp.SUM, ranks.group(axis)), x, dim)
    part = x.shape[dim] // size
    return ops.narrow(all_reduce(x, axis, ranks), dim, ranks.index(axis) * part, part)


def all_to_all(x: Tensor, axis: str, ranks: Ranks) -> Tensor:
    """Part j of the leading dim goes to rank j, and what arrives is joined by sender: [n * d, ..] -> [n * d, ..]."""
    size = ranks.size(axis)
    if size == 1:
        return x
    if ranks.native:
        return ops.AlltoAll(size, 0, 0, ranks.group(axis))(x)
    part = x.shape[0] // size
    sent = all_gather(x.reshape(1, size, part, *x.shape[1:]), axis, 0, ranks)  # [sender, receiver, d, ..]
    return sent[:, ranks.index(axis)].reshape(x.shape)


def after(x: Tensor, earlier: Tensor, ranks: Ranks) -> Tensor:
    """`x`, but what is made of it runs after `earlier` is there; just `x` on one rank."""
    if ranks.plan.ranks == 1:
        return x
    return ops.depend(x, earlier)


def _along(primitive: Any, x: Tensor, dim: int) -> Tensor:
    """A primitive that works along the first dim, along `dim`."""
    return primitive(x) if dim == 0 else primitive(x.swapaxes(0, dim)).swapaxes(0, dim)


def _sum(x: Tensor, axis: str, ranks: Ranks) -> Tensor:
    return ops.AllReduce(ops.ReduceOp.SUM, ranks.group(axis))(x)


@constexpr  # type: ignore[untyped-decorator]
def _one_of(size: int, index: int, ndim: int) -> Tensor:
    """[size, 1, ..] bool, True at `index`: a constant, so that the graphs of all ranks have one structure and with it
    one order of collectives."""
    return Tensor((np.arange(size) == index).reshape(size, *(1,) * ndim))


def _joined(parts: Tensor, dim: int) -> Tensor:
    """[n, .., d, ..] -> [.., n * d, ..]."""
    if dim == 0:
        return parts.reshape(-1, *parts.shape[2:])
    shape = parts.shape[1:]
    parts = ops.moveaxis(parts, 0, dim)
    return parts.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _uncarried(value: Tensor, like: Tensor) -> Tensor:
    """float32 back in the dtype of what it carried."""
    if like.dtype == ms.bool_:
        return value > 0.5
    return value.astype(like.dtype)
