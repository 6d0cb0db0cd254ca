"""Which static shapes serve which lengths: a short ladder per step, and how prompts are cut into calls. No tensors.

Compiling costs seconds per shape, padding costs compute: rungs a factor four apart keep the default at fifteen
shapes and waste at most three quarters of a step's context reads, half of them on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

RUNG_FACTOR = 4
CALL_OVERHEAD_TOKENS = 32
"""What one more call costs, in tokens of compute; keeps short tails from becoming many small chunks."""
SHORT_CHUNK = 64
"""Most tokens of a short chunk. Short chunks of several prompts are computed in one call."""


@dataclass(frozen=True)
class SharedPrefill:
    """Which chunks of several sequences may be one prefill step.

    rows: how many sequences such a step is padded to, ascending, each at least 2. tokens: most new tokens of each, to
    which all are padded. context: most tokens of each text after the step.
    """

    rows: tuple[int, ...]
    tokens: int
    context: int

    @property
    def num_tokens(self) -> int:
        """Padded tokens of the largest such step."""
        return max(self.rows) * self.tokens

    def count_together(self, num_rows: int) -> int:
        """How many of `num_rows` waiting chunks the next step takes, for the least padded compute in all; 1: alone."""
        most = max(self.rows)
        return _cuts(most, (1, *self.rows), self.tokens)[min(num_rows, most)]


def rungs(largest: int, smallest: int) -> tuple[int, ...]:
    """Sizes from `largest` down by RUNG_FACTOR, none below `smallest`, ascending: rungs(512, 32) = (32, 128, 512)."""
    sizes = [largest]
    while sizes[-1] > smallest:
        sizes.append(max(smallest, -(-sizes[-1] // RUNG_FACTOR)))
    return tuple(reversed(sizes))


def step_ladders(
    *,
    max_model_len: int,
    max_num_seqs: int,
    prefill_chunk: int,
    block_size: int,
    num_drafts: int = 0,
    one_shape: bool = False,
) -> tuple[tuple[dict[str, int], ...], tuple[dict[str, int], ...]]:
    """(prefill buckets, decode buckets): S sequences, Q query tokens each, B context blocks each.

    Prefill takes one sequence, or several with short chunks of short texts where together they keep to
    `prefill_chunk` tokens; decode one to `max_num_seqs`, of one token each or of one and `num_drafts`. one_shape: the
    largest of each alone, and one sequence per prefill, so that a sequence is computed alike whoever runs beside it.
    """
    max_blocks = -(-max_model_len // block_size)
    contexts = rungs(max_blocks, max(1, min(max_blocks, 512 // block_size)))
    chunk = min(prefill_chunk, max_model_len)
    if one_shape:
        return ({"S": 1, "Q": chunk, "B": max_blocks},), ({"S": max_num_seqs, "Q": 1, "B": max_blocks},)
    short = min(SHORT_CHUNK, chunk)
    prefill = [{"S": 1, "Q": q, "B": b} for q in sorted({short, chunk}) for b in contexts if q <= b * block_size]
    together = min(max_num_seqs, prefill_chunk // short)
    if together > 1:
        prefill += [{"S": s, "Q": short, "B": contexts[0]} for s in rungs(together, 2)]
    between = {size for size in rungs(max_num_seqs, 1) if size > 2}  # a rung of two would save little
    sequences = tuple(sorted({1, max_num_seqs} | between))
    queries = tuple(sorted({1, 1 + num_drafts}))
    decode = tuple({"S": s, "Q": q, "B": b} for q in queries for s in sequences for b in contexts)
    return tuple(prefill), decode


def shared_prefill(prefill_buckets: Sequence[dict[str, int]], block_size: int) -> SharedPrefill | None:
    """What the prefill buckets of several sequences allow; None where there are none."""
    shared = [bucket for bucket in prefill_buckets if bucket["S"] > 1]
    if not shared:
        return None
    tokens, blocks = (min(bucket[name] for bucket in shared) for name in ("Q", "B"))
    return SharedPrefill(tuple(sorted({bucket["S"] for bucket in shared})), tokens, blocks * block_size)


def next_chunk(remaining: int, chunk_sizes: Sequence[int]) -> int:
    """How many of `remaining` prompt tokens the next chunk takes, for the least padded compute in all."""
    largest, most = max(chunk_sizes), 4 * max(chunk_sizes)
    return largest if remaining > most else _cuts(most, tuple(chunk_sizes), 1)[remaining]


@cache
def _cuts(most: int, sizes: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """For 0 to `most` units of `tokens` tokens: how many the next call takes, where calls pad to one of `sizes`."""
    costs, cuts = [0], [0]
    for count in range(1, most + 1):
        options = [(costs[max(0, count - size)] + size * tokens + CALL_OVERHEAD_TOKENS, -size) for size in sizes]
        cost, size = min(options)
        costs.append(cost)
        cuts.append(min(-size, count))
    return tuple(cuts)
