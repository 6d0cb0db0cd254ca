"""From rows to the arrays of a step: where each token goes, what padding is, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.engine.batch import BATCH_SPEC, Row, build_batch, pick_rows, stack_batches

LIMITS = {"block_size": 4, "num_cache_blocks": 10, "vocab_size": 100}


def test_two_rows_by_hand() -> None:
    batch = build_batch([Row([7, 8, 9], 3, [5, 2, 6]), Row([1], 0, [9])], **LIMITS)
    expected = {
        "tokens": [[7, 8, 9], [1, 0, 0]],
        "positions": [[3, 4, 5], [0, 0, 0]],
        "slot_mapping": [[23, 8, 9], [36, 0, 0]],  # the last place of block 5, then block 2
        "block_tables": [[5, 2], [9, 0]],  # the third block holds nothing yet
        "query_lens": [3, 1],
        "context_lens": [6, 1],
    }
    assert batch.keys() == expected.keys() == BATCH_SPEC.keys()
    for name, values in expected.items():
        assert batch[name].dtype == np.int32
        np.testing.assert_array_equal(batch[name], values, err_msg=name)


@given(st.data())
def test_every_token_is_written_where_its_context_is_read(data: st.DataObject) -> None:
    """Slots of a row, read through its block table, are its positions; no two rows write to one slot, padding to 0."""
    blocks = data.draw(st.permutations(range(1, 10)))
    rows = []
    for index in range(data.draw(st.integers(1, 3))):
        table = blocks[3 * index : 3 * index + 3]
        start = data.draw(st.integers(0, 11))
        rows.append(Row(data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=12 - start)), start, table))
    batch = build_batch(rows, **LIMITS)
    written: list[int] = []
    for index, row in enumerate(rows):
        count = len(row.tokens)
        context = [block * 4 + place for block in batch["block_tables"][index] for place in range(4)]
        slots = batch["slot_mapping"][index]
        assert slots[:count].tolist() == context[row.start : row.context_len]
        assert not slots[count:].any()
        assert batch["context_lens"][index] == row.context_len <= len(context)
        written += slots[:count].tolist()
    assert len(set(written)) == len(written)
    assert min(written) >= 4  # nothing real goes to the reserved block


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row([1] * 5, 0, [3]), "cannot hold 5 tokens"),
        (Row([1], 4, [3]), "cannot hold 5 tokens"),
        (Row([1], 0, [0]), "block table"),  # the reserved block
        (Row([1], 0, [-1]), "block table"),
        (Row([1], 0, [10]), "block table"),
        (Row([1], 0, [2, 10]), "block table"),  # not yet used, but wrong
        (Row([-1], 0, [3]), "tokens"),
        (Row([1, 100], 0, [3]), "tokens"),
    ],
)
def test_an_index_out_of_range_never_reaches_a_graph(row: Row, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        build_batch([Row([1], 0, [4]), row], **LIMITS)
    assert build_batch([Row([1], 0, [4])], **LIMITS)


def test_blocks_of_tokens_that_a_step_adds_by_itself() -> None:
    """A draft behind the end of a block reads the one before it there; blocks beyond are nobody's."""
    size = LIMITS["block_size"]
    rows = [Row([1], size - 1, [4, 5, 6]), Row([1], 0, [7, 8]), Row([1], size - 1, [9])]
    assert build_batch(rows, **LIMITS)["block_tables"].tolist() == [[4], [7], [9]]
    assert build_batch(rows, **LIMITS, ahead=1)["block_tables"].tolist() == [[4, 5], [7, 0], [9, 0]]


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=8)


@given(ROWS)
def test_replicas_are_stacked_and_padded_by_zeros(rows: list[tuple[int, int]]) -> None:
    """Each part is what its own rows give; what is beyond them, and replicas without rows, is padding."""
    parts = [[Row([7] * length, 2, [1, 2], replica=r) for of, length in rows if of == r] for r in range(4)]
    alone = [build_batch(part, **LIMITS) if part else None for part in parts]
    stacked = stack_batches(alone)
    for name, whole in stacked.items():
        assert whole.dtype == np.int32
        for part, batch in zip(whole, alone, strict=True):
            if batch is not None:
                corner = tuple(map(slice, batch[name].shape))
                np.testing.assert_array_equal(part[corner], batch[name])
                part[corner] = 0
            assert not part.any()
    assert stacked["tokens"].shape[1:] == (max(map(len, parts)), max(length for _, length in rows))


@given(ROWS)
def test_rows_find_their_results_in_any_order(rows: list[tuple[int, int]]) -> None:
    results = np.full((4, 8, 2), -1)
    of = [0] * 4
    for index, (replica, _) in enumerate(rows):
        results[replica, of[replica]] = index
        of[replica] += 1
    picked = pick_rows(results, [Row([1], 0, [1], replica=replica) for replica, _ in rows])
    np.testing.assert_array_equal(picked, np.repeat(np.arange(len(rows))[:, None], 2, 1))


def test_results_without_padding_are_not_copied() -> None:
    results = np.zeros((2, 3, 4))
    rows = [Row([1], 0, [1], replica=replica) for replica in (0, 0, 0, 1, 1, 1)]
    assert np.shares_memory(pick_rows(results, rows), results)
