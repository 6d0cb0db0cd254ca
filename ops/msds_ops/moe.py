"""Mixture of experts: routing and the expert products (DeepSeekMoE, Dai et al. 2024; DeepSeek-V3, section 2.1.2).

T tokens, D features, E experts, G groups, K experts per token, I expert width, N row blocks of M rows, A rows that are
sorted by expert already.

Top-k is done by rank: the rank of a score is how many beat it, ties going to the lower index. It needs comparisons
only, is the same on every device, and the built-in top-k costs milliseconds per call on a CPU.
"""

from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops
from mindspore.ops.auto_generate import GroupedMatmulV4
from mindspore.ops.primitive import constexpr

from msds_ops.iota import iota

Array: TypeAlias = npt.NDArray[Any]

_bmm_nt = ops.BatchMatMul(transpose_b=True)
_grouped_matmul = GroupedMatmulV4()

NEGATIVE_INFINITY = float("-inf")


def rank_descending(scores: Tensor) -> Tensor:
    """How many scores of the row come before each: [..., E] -> [..., E] int32; ties by lowest index."""
    size = scores.shape[-1]
    mine, other = scores.expand_dims(-1), scores.expand_dims(-2)
    index = iota(size)
    earlier = index.expand_dims(0) < index.expand_dims(1)  # [E, E]: the other stands before me
    beats = ops.logical_or(other > mine, ops.logical_and(other == mine, earlier))
    return beats.astype(ms.int32).sum(-1, dtype=ms.int32)


def scores_from_logits(logits: Tensor, scoring_func: str) -> Tensor:
    """Expert affinities: [T, E] float32, `sigmoid` (V3) or `softmax` (V2).

    A score that is not a number becomes 0. NaN beats nothing and is beaten by nothing, so the ranks of a token that
    overflowed would name experts that do not exist, and the index error would end the step for all sequences.
    """
    scores = ops.sigmoid(logits) if scoring_func == "sigmoid" else ops.softmax(logits, -1)
    return ops.where(ops.isfinite(scores), scores, ops.zeros_like(scores))


def select_groups(choice: Tensor, num_groups: int, num_kept: int, *, by_top2: bool) -> Tensor:
    """Node-limited routing: keep the best groups, give the others -inf: [T, E] -> [T, E].

    A group's score is the sum of its two best (V3, `noaux_tc`) or its best (V2, `group_limited_greedy`).
    """
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, num_groups, experts // num_groups)
    group_scores = ops.amax(grouped, -1)  # [T, G]
    if by_top2 and experts > num_groups:
        ranks = rank_descending(grouped)
        second = ops.masked_fill(grouped, ranks != 1, 0.0).sum(-1)
        group_scores = group_scores + second
    kept = rank_descending(group_scores) < num_kept  # [T, G]
    return ops.masked_fill(grouped, ops.logical_not(kept).expand_dims(-1), NEGATIVE_INFINITY).reshape(tokens, experts)


def top_experts(choice: Tensor, scores: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """The best K by `choice`, best first, and their `scores`: two [T, E] -> topk_idx [T, K] int32, weights [T, K]."""
    experts = choice.shape[-1]
    slots = iota(num_chosen).reshape(1, -1, 1)
    chosen = rank_descending(choice).expand_dims(1) == slots  # [T, K, E], one True per row
    index = iota(experts).reshape(1, 1, -1)
    topk_idx = (chosen.astype(ms.int32) * index).sum(-1, dtype=ms.int32)
    weights = ops.masked_fill(scores.expand_dims(1), ops.logical_not(chosen), 0.0).sum(-1)
    return topk_idx, weights


def count_chosen(topk_idx: Tensor, num_experts: int) -> Tensor:
    """How many tokens chose each expert: topk_idx [T, K] int32 -> [E] int32; E, which is none, is not counted."""
    hit = topk_idx.reshape(-1, 1) == iota(num_experts).expand_dims(0)  # [T * K, E]
    return hit.astype(ms.int32).sum(0, dtype=ms.int32)


def moe_experts(
    x: Tensor, topk_idx: Tensor, weights: Tensor, node: dict[str, Tensor], impl: str, partial: bool = False
) -> Tensor:
    """sum_k weight_k * SwiGLU expert_k(x): [T, D], two [T, K] -> [T, D].

    `node` holds gate_proj and up_proj [E, I, D], down_proj [E, D, I]. `reference` computes every
    expert for every token; `portable` computes only chosen pairs. partial: `node` holds some of the experts; a pair
    whose topk_idx is E is another rank's and adds nothing here.
    """
    if impl == "reference":
        return _experts_dense(x, topk_idx, weights, node)
    return _experts_blocked(x, topk_idx, weights, node, partial)


def moe_experts_sorted(rows: Tensor, counts: Tensor, node: dict[str, Tensor], impl: str) -> Tensor:
    """SwiGLU expert_e(row) of rows that come sorted by expert: [A, D], counts [E] int64 of each expert's -> [A, D].

    Rows behind the counted ones mean nothing, and neither does what comes of them. `primitive`: one grouped product of
    Ascend per projection, which reads the experts that have rows; compiled without hardware, never run on an NPU, and
    whether turning the weights is a view there or a copy is not known. Others: as `moe_experts`.
    """
    if impl == "primitive":
        gate = _grouped(rows, counts, node["gate_proj"])
        return _grouped(ops.silu(gate) * _grouped(rows, counts, node["up_proj"]), counts, node["down_proj"])
    expert = expert_of_rows(counts, rows.shape[0])
    return moe_experts(rows, expert.expand_dims(-1), ops.ones((rows.shape[0], 1), rows.dtype), node, impl, True)


def expert_of_rows(counts: Tensor, num_rows: int) -> Tensor:
    """Whose each of A sorted rows is: counts [E] -> [A] int32, E for rows behind the counted ones."""
    end = ops.cumsum(counts.astype(ms.int32), 0)
    return (iota(num_rows).expand_dims(-1) >= end).astype(ms.int32).sum(-1, dtype=ms.int32)


def _grouped(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """[A, I], counts [E], weight [E, O, I] -> [A, O]."""
    turned = weight.swapaxes(1, 2)
    # one tensor in, one out (3), grouped along rows (0), by counts and not running sums (1)
    groups = (None, None, None, None, None, None, counts, None, None, None, 3, 0, 1, 0, None)
    return _grouped_matmul((rows,), (turned,), *groups)[0]


def _experts_dense(x: Tensor, topk_idx: Tensor, weights: Tensor, node: dict[str, Tensor]) -> Tensor:
    experts = node["gate_proj"].shape[0]
    index = iota(experts).reshape(1, 1, -1)
    hit = (topk_idx.expand_dims(-1) == index).astype(weights.dtype)  # [T, K, E]
    mixture = (hit * weights.expand_dims(-1)).sum(1)  # [T, E]
    rows = ops.broadcast_to(x.expand_dims(0), (experts, *x.shape))  # [E, T, D]
    y = _swiglu_rows(rows, node["gate_proj"], node["up_proj"], node["down_proj"])
    return (y * mixture.T.expand_dims(-1).astype(y.dtype)).sum(0)


def _experts_blocked(x: Tensor, topk_idx: Tensor, weights: Tensor, node: dict[str, Tensor], partial: bool) -> Tensor:
    """Sort the T*K pairs by expert into blocks of M rows of one expert each, one batched product over blocks.

    Any rank may get all pairs, so a partial node has as many blocks as one of all experts: spreading experts saves
    their memory, not the padded rows of this form.
    """
    tokens, features = x.shape
    chosen = topk_idx.shape[1]
    experts = node["gate_proj"].shape[0]
    block_rows, num_blocks = block_shape(tokens * chosen, experts)
    if block_rows == 1:  # pair order is as good as any
        block_expert = topk_idx.reshape(-1)
        if partial:
            block_expert = ops.minimum(block_expert, experts - 1)
        rows = ops.repeat_interleave(x, chosen, 0).expand_dims(1)  # [T * K, 1, D]
        place = None
    else:
        place, block_expert = place_pairs(topk_idx.reshape(-1), experts, block_rows, num_blocks)
        token_of_pair = iota(tokens * chosen) // chosen
        if partial:  # one place more, where the pairs of other ranks go
            place = ops.where(topk_idx.reshape(-1) < experts, place, num_blocks * block_rows)
        spare = 1 if partial else 0
        source = ops.full((num_blocks * block_rows + spare,), tokens, dtype=ms.int32)  # empty places read the zero row
        source = ops.tensor_scatter_update(source, place.expand_dims(-1), token_of_pair)
        if partial:
            source = source[: num_blocks * block_rows]
            place = ops.minimum(place, num_blocks * block_rows - 1)
        padded = ops.concat((x, ops.zeros((1, features), x.dtype)), 0)
        rows = ops.gather(padded, source, 0).reshape(num_blocks, block_rows, features)
    gate = ops.gather(node["gate_proj"], block_expert, 0)  # [N, I, D]
    up = ops.gather(node["up_proj"], block_expert, 0)
    down = ops.gather(node["down_proj"], block_expert, 0)
    y = _swiglu_rows(rows, gate, up, down).reshape(num_blocks * block_rows, features)
    if place is not None:
        y = ops.gather(y, place, 0)
    if partial:  # selected, not multiplied: what stands in these rows may be infinite
        y = ops.where((topk_idx < experts).reshape(-1, 1), y, ops.zeros((1,), y.dtype))
    y = y.reshape(tokens, chosen, features) * weights.expand_dims(-1).astype(y.dtype)
    return y.sum(1)


@constexpr  # type: ignore[untyped-decorator]  # graph mode cannot differentiate two calls of a function with a loop
def block_shape(pairs: int, experts: int) -> tuple[int, int]:
    """Rows per block and the number of blocks that always suffices for `pairs` token-expert pairs.

    Blocks as tall as the mean load, so that about half of the rows are used whatever the routing; at decode,
    where most experts get at most one token, blocks of one row and no waste at all.
    """
    block_rows = 1
    while block_rows * 2 <= min(pairs // experts, 64):
        block_rows *= 2
    if block_rows == 1:
        return 1, pairs
    return block_rows, (pairs + min(experts, pairs) * (block_rows - 1)) // block_rows


def place_pairs(expert_of_pair: Tensor, experts: int, block_rows: int, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Row of each pair when sorted by expert into padded blocks, and the expert of each block.

    expert_of_pair [T*K] int32 -> place [T*K] int32 in [0, N*M), block_expert [N] int32. Stable, no sort: a running
    count per expert.
    """
    index = iota(experts)
    hit = (expert_of_pair.expand_dims(-1) == index).astype(ms.int32)  # [T*K, E]
    running = ops.cumsum(hit, 0)
    rank_in_expert = (running * hit).sum(-1, dtype=ms.int32) - 1  # [T*K]
    blocks = (running[-1] + block_rows - 1) // block_rows  # [E]
    block_end = ops.cumsum(blocks, 0)
    block_start = block_end - blocks
    place = (hit * block_start).sum(-1, dtype=ms.int32) * block_rows + rank_in_expert
    block = iota(num_blocks).expand_dims(-1)
    block_expert = (block >= block_end).astype(ms.int32).sum(-1, dtype=ms.int32)  # unused blocks at the end count all E
    return place, ops.minimum(block_expert, experts - 1).astype(ms.int32)


def _swiglu_rows(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """[N, M, D] through per-block weights [N, I, D], [N, I, D], [N, D, I] -> [N, M, D]."""
    return _bmm_nt(ops.silu(_bmm_nt(rows, gate)) * _bmm_nt(rows, up), down)


def count_chosen_numpy(topk_idx: Array, num_experts: int) -> Array:
    """`count_chosen` by bins."""
    return np.bincount(topk_idx.reshape(-1), minlength=num_experts + 1)[:num_experts]


def moe_experts_numpy(
    x: Array,
    topk_idx: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
) -> Array:
    """`moe_experts` pair by pair in float64."""
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for t, (chosen, shares) in enumerate(zip(topk_idx, weights, strict=True)):
        for e, share in zip(chosen, shares, strict=True):
            g = gate[e].astype(np.float64) @ x[t]
            out[t] += share * (down[e].astype(np.float64) @ (g / (1 + np.exp(-g)) * (up[e].astype(np.float64) @ x[t])))
    return out


def moe_experts_sorted_numpy(rows: Array, counts: Array, gate: Array, up: Array, down: Array) -> Array:
    """`moe_experts_sorted` expert by expert in float64, of the counted rows: [sum of counts, D]."""
    out, start = [], 0
    for e, count in enumerate(counts):
        x = np.asarray(rows[start : start + count], np.float64)
        g = x @ gate[e].astype(np.float64).T
        out.append((g / (1 + np.exp(-g)) * (x @ up[e].astype(np.float64).T)) @ down[e].astype(np.float64).T)
        start += count
    return np.concatenate(out)
