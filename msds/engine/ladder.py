"""Which static shapes serve which lengths: a short ladder per step, and how a prompt is cut into chunks. No tensors.

Compiling costs seconds per shape, padding costs compute: rungs a factor four apart keep the default at a dozen
shapes and waste at most three quarters of a step's context reads, half of them on average.
"""

from __future__ import annotations

from collections.abc import Sequence

RUNG_FACTOR = 4
CHUNK_OVERHEAD_TOKENS = 32
"""What launching one more chunk costs, in tokens of compute; keeps short tails from becoming many small chunks."""


def rungs(largest: int, smallest: int) -> tuple[int, ...]:
    """Sizes from `largest` down by RUNG_FACTOR, none below `smallest`, ascending: rungs(512, 32) = (32, 128, 512)."""
    sizes = [largest]
    while sizes[-1] > smallest:
        sizes.append(max(smallest, -(-sizes[-1] // RUNG_FACTOR)))
    return tuple(reversed(sizes))


def step_ladders(
    *, max_model_len: int, max_num_seqs: int, prefill_chunk: int, block_size: int, num_drafts: int = 0
) -> tuple[tuple[dict[str, int], ...], tuple[dict[str, int], ...]]:
    """(prefill buckets, decode buckets): S sequences, Q query tokens each, B context blocks each.

    Prefill takes one sequence, decode one or `max_num_seqs`, of one token each or of one and `num_drafts`.
    """
    max_blocks = -(-max_model_len // block_size)
    contexts = rungs(max_blocks, max(1, min(max_blocks, 512 // block_size)))
    chunk = min(prefill_chunk, max_model_len)
    chunks = tuple(sorted({min(64, chunk), chunk}))
    sequences = tuple(sorted({1, max_num_seqs}))
    prefill = tuple({"S": 1, "Q": q, "B": b} for q in chunks for b in contexts if q <= b * block_size)
    queries = tuple(sorted({1, 1 + num_drafts}))
    decode = tuple({"S": s, "Q": q, "B": b} for q in queries for s in sequences for b in contexts)
    return prefill, decode


def next_chunk(remaining: int, chunk_sizes: Sequence[int]) -> int:
    """How many of `remaining` prompt tokens the next chunk takes, for the least padded compute in all."""
    costs = {0: 0}
    best = {0: 0}
    sizes = sorted(chunk_sizes)
    largest = sizes[-1]
    if remaining > 4 * largest:
        return largest
    for count in range(1, remaining + 1):
        options = [(costs[max(0, count - size)] + size + CHUNK_OVERHEAD_TOKENS, size) for size in sizes]
        costs[count], best[count] = min(options, key=lambda option: (option[0], -option[1]))
    return min(best[remaining], remaining)
