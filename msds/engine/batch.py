"""From scheduled sequences to the padded int32 arrays of one step, every index checked. No tensors.

S sequences, Q query tokens per sequence, B context blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Batch = dict[str, npt.NDArray[np.int32]]


@dataclass(frozen=True)
class Row:
    """New tokens of one sequence in one step: `tokens` from position `start` on, found through `block_table`."""

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]

    @property
    def context_len(self) -> int:
        """Tokens of the sequence after this step."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepShape:
    """The static shape of a compiled step: S sequences, Q query tokens each, B context blocks each."""

    num_seqs: int
    num_queries: int
    num_blocks: int

    def fits(self, rows: Sequence[Row], block_size: int) -> bool:
        """Whether rows can be padded to this shape."""
        return (
            len(rows) <= self.num_seqs
            and all(len(row.tokens) <= self.num_queries for row in rows)
            and all(-(-row.context_len // block_size) <= self.num_blocks for row in rows)
        )

    def __str__(self) -> str:
        return f"S={self.num_seqs} Q={self.num_queries} B={self.num_blocks}"


def build_batch(
    rows: Sequence[Row], shape: StepShape, *, block_size: int, num_cache_blocks: int, vocab_size: int
) -> Batch:
    """Pad rows to `shape`. Padding tokens are token 0 at position 0, written to slot 0 of the reserved block.

    An index outside its range would leave the cache half written when the graph runs, so it is a RuntimeError here:
    tokens in [0, vocab_size), blocks in [1, num_cache_blocks), every context token in a block of its own table.
    """
    size = (shape.num_seqs, shape.num_queries)
    batch: Batch = {
        "tokens": np.zeros(size, np.int32),
        "positions": np.zeros(size, np.int32),
        "slot_mapping": np.zeros(size, np.int32),
        "block_tables": np.zeros((shape.num_seqs, shape.num_blocks), np.int32),
        "query_lens": np.zeros(shape.num_seqs, np.int32),
        "context_lens": np.zeros(shape.num_seqs, np.int32),
    }
    if not shape.fits(rows, block_size):
        raise RuntimeError(f"rows do not fit the step {shape}: {[(len(r.tokens), r.context_len) for r in rows]}")
    for index, row in enumerate(rows):
        count = len(row.tokens)
        used = -(-row.context_len // block_size)
        table = np.asarray(row.block_table, np.int32)
        tokens = np.asarray(row.tokens, np.int32)
        if used > len(table) or table.min() < 1 or table.max() >= num_cache_blocks:
            raise RuntimeError(f"block table {row.block_table} cannot hold {row.context_len} tokens")
        if count == 0 or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise RuntimeError(f"tokens {row.tokens} are not all in [0, {vocab_size})")
        positions = np.arange(row.start, row.context_len, dtype=np.int32)
        batch["tokens"][index, :count] = tokens
        batch["positions"][index, :count] = positions
        batch["slot_mapping"][index, :count] = table[positions // block_size] * block_size + positions % block_size
        batch["block_tables"][index, :used] = table[:used]
        batch["query_lens"][index] = count
        batch["context_lens"][index] = row.context_len
    return batch
