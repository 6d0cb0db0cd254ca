"""From scheduled sequences to the int32 arrays of one step, every index checked. No tensors.

S sequences, Q query tokens per sequence, B context blocks, R replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msds_graphs.specs import ArraySpec

Batch = dict[str, npt.NDArray[Any]]

BATCH_SPEC: dict[str, ArraySpec] = {
    "tokens": ArraySpec(("S", "Q"), "int32"),
    "positions": ArraySpec(("S", "Q"), "int32"),
    "slot_mapping": ArraySpec(("S", "Q"), "int32"),
    "block_tables": ArraySpec(("S", "B"), "int32"),
    "query_lens": ArraySpec(("S",), "int32"),
    "context_lens": ArraySpec(("S",), "int32"),
}
"""What every step takes. Padding is 0 everywhere: token 0 at position 0, written to slot 0 of the reserved block."""


@dataclass(frozen=True)
class Row:
    """New tokens of one sequence in one step: `tokens` from position `start` on, found through `block_table`.

    prev_hidden: the model's state [D] of the token before `start`, where MTP entries are kept; None: it is not known,
    and zeros stand for it. That is so after a prefix hit: the block has the token, not its state. It makes one entry
    worse and with it perhaps a draft, never a result. replica: in whose cache the blocks are, where there are several.
    """

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]
    prev_hidden: npt.NDArray[np.float32] | None = None
    replica: int = 0

    @property
    def context_len(self) -> int:
        """Tokens of the sequence after this step."""
        return self.start + len(self.tokens)


def draft_slots(rows: Sequence[Row], count: int, block_size: int) -> npt.NDArray[np.int32]:
    """[S, count] slots of the first new token of each row and those after it; 0, which nobody reads, without a block.

    The block table of a row is longer than its tokens where the scheduler found room for drafts.
    """
    slots = np.zeros((len(rows), count), np.int32)
    for index, row in enumerate(rows):
        table = np.asarray(row.block_table, np.int32)
        positions = np.arange(row.start, min(row.start + count, len(table) * block_size))
        slots[index, : len(positions)] = table[positions // block_size] * block_size + positions % block_size
    return slots


def prev_hidden(rows: Sequence[Row], size: int) -> npt.NDArray[np.float32]:
    """[S, size] the state before each row; zeros where it is not known."""
    zeros = np.zeros(size, np.float32)
    return np.stack([zeros if row.prev_hidden is None else row.prev_hidden for row in rows])


def build_batch(
    rows: Sequence[Row], *, block_size: int, num_cache_blocks: int, vocab_size: int, ahead: int = 0
) -> Batch:
    """The arrays of a step, no larger than its rows need; a compiled step pads them to its bucket.

    ahead: tokens that the step adds by itself, whose blocks stay in the tables where a row has them.

    An index outside its range would leave the cache half written when the graph runs, so it is a RuntimeError here:
    tokens in [0, vocab_size), blocks in [1, num_cache_blocks), every context token in a block of its own table.
    """
    counts = np.array([len(row.tokens) for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    lens = starts + counts
    sizes = np.array([len(row.block_table) for row in rows], np.int32)
    tables = np.zeros((len(rows), int(sizes.max())), np.int32)
    for index, row in enumerate(rows):
        tables[index, : sizes[index]] = row.block_table
    column = np.arange(tables.shape[1])
    used = -(-lens // block_size)
    wrong = ((column < sizes[:, None]) & ((tables < 1) | (tables >= num_cache_blocks))).any(1) | (used > sizes)
    if wrong.any():
        row = rows[int(wrong.argmax())]
        raise RuntimeError(f"block table {row.block_table} cannot hold {row.context_len} tokens")
    kept = np.minimum(-(-(lens + ahead) // block_size), sizes)
    tables = np.where(column < kept[:, None], tables, 0)[:, : kept.max()]
    places = np.arange(counts.max(), dtype=np.int32)
    is_real = places < counts[:, None]
    positions = np.where(is_real, starts[:, None] + places, 0)
    tokens = np.zeros(positions.shape, np.int64)
    tokens[is_real] = [token for row in rows for token in row.tokens]
    wrong = (counts == 0) | ((tokens < 0) | (tokens >= vocab_size)).any(1)
    if wrong.any():
        raise RuntimeError(f"tokens {rows[int(wrong.argmax())].tokens} are not all in [0, {vocab_size})")
    blocks = np.take_along_axis(tables, positions // block_size, axis=1)
    return {
        "tokens": tokens.astype(np.int32),
        "positions": positions,
        "slot_mapping": np.where(is_real, blocks * block_size + positions % block_size, 0),
        "block_tables": tables,
        "query_lens": counts,
        "context_lens": lens,
    }


def stack_batches(batches: Sequence[Batch | None]) -> Batch:
    """The batches of several replicas, each padded to the largest, as one: [S, ..] -> [R, S, ..]; None: all padding."""
    given = [batch for batch in batches if batch is not None]
    stacked = {}
    for name, array in given[0].items():
        sizes = np.max([batch[name].shape for batch in given], axis=0)
        stacked[name] = np.zeros((len(batches), *sizes), array.dtype)
        for whole, batch in zip(stacked[name], batches, strict=True):
            if batch is not None:
                whole[tuple(map(slice, batch[name].shape))] = batch[name]
    return stacked


def pick_rows(stacked: npt.NDArray[Any], rows: Sequence[Row]) -> npt.NDArray[Any]:
    """What belongs to each row of what a step gave for all replicas: [R, S, ..] -> [rows, ..]; a view where it can."""
    taken = [0] * len(stacked)
    places = []
    for row in rows:
        places.append(row.replica * stacked.shape[1] + taken[row.replica])
        taken[row.replica] += 1
    flat = stacked.reshape(-1, *stacked.shape[2:])
    return flat if places == list(range(len(flat))) else flat[places]
