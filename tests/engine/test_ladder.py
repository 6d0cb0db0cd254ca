"""Ladders of shapes and the cutting of prompts: every reachable shape is planned, every token computed once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.engine.ladder import CALL_OVERHEAD_TOKENS, RUNG_FACTOR, next_chunk, rungs, step_ladders

SIZES = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("largest", "smallest", "sizes"),
    [(512, 32, (32, 128, 512)), (100, 32, (32, 100)), (4, 4, (4,)), (5, 4, (4, 5)), (1, 1, (1,))],
)
def test_rungs_by_hand(largest: int, smallest: int, sizes: tuple[int, ...]) -> None:
    assert rungs(largest, smallest) == sizes


@given(largest=SIZES, smallest=SIZES)
def test_rungs(largest: int, smallest: int) -> None:
    smallest = min(largest, smallest)
    sizes = rungs(largest, smallest)
    assert sizes[0] == smallest
    assert sizes[-1] == largest
    assert all(low < high <= RUNG_FACTOR * low for low, high in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (2, (1, 2)), (8, (1, 8)), (16, (1, 4, 16)), (64, (1, 4, 16, 64)), (9, (1, 3, 9))]
)
def test_few_sequences_do_not_pay_for_many(most: int, sizes: tuple[int, ...]) -> None:
    """No step is padded to more than four times its sequences, but for those of 2 to 8 of a small service."""
    _, decode = step_ladders(max_model_len=512, max_num_seqs=most, prefill_chunk=512, block_size=16)
    assert tuple(bucket["S"] for bucket in decode) == sizes


@given(
    max_model_len=st.integers(1, 20000),
    max_num_seqs=st.integers(1, 64),
    prefill_chunk=st.integers(1, 2048),
    block_size=st.sampled_from([1, 8, 16, 128]),
    length=st.integers(1, 20000),
    seqs=st.integers(1, 64),
    num_drafts=st.integers(0, 8),
)
def test_every_reachable_shape_is_planned(
    max_model_len: int,
    max_num_seqs: int,
    prefill_chunk: int,
    block_size: int,
    length: int,
    seqs: int,
    num_drafts: int,
) -> None:
    prefill, decode = step_ladders(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        prefill_chunk=prefill_chunk,
        block_size=block_size,
        num_drafts=num_drafts,
    )
    chunks = sorted({bucket["Q"] for bucket in prefill})
    assert max(chunks) <= prefill_chunk
    context, seqs = min(length, max_model_len), min(seqs, max_num_seqs)
    blocks = -(-context // block_size)
    for queries in (1, 1 + num_drafts):
        assert any(bucket["S"] >= seqs and bucket["B"] >= blocks and bucket["Q"] == queries for bucket in decode)
    start, remaining = 0, context
    for _ in range(3):  # the first chunks of this text, and its whole context at the end
        count = next_chunk(remaining, chunks)
        end = -(-(start + count) // block_size)
        assert any(bucket["Q"] >= count and bucket["B"] >= end for bucket in prefill)
        start, remaining = start + count, remaining - count
        if not remaining:
            break
    assert any(bucket["B"] >= blocks for bucket in prefill if bucket["Q"] == chunks[-1])


@pytest.mark.parametrize("options", [{}, {"max_model_len": 131072}, {"block_size": 128}, {"max_num_seqs": 1}])
def test_default_ladders_are_short(options: dict[str, int]) -> None:
    sizes = {"max_model_len": 4096, "max_num_seqs": 8, "prefill_chunk": 512, "block_size": 16} | options
    prefill, decode = step_ladders(**sizes)
    assert len(prefill) + len(decode) <= (22 if sizes["max_model_len"] > 4096 else 14)


@given(remaining=st.integers(1, 3000), sizes=st.sets(st.integers(1, 600), min_size=1, max_size=3))
def test_chunks_cover_a_prompt_exactly(remaining: int, sizes: set[int]) -> None:
    left = remaining
    taken = []
    while left:
        taken.append(next_chunk(left, sorted(sizes)))
        assert 1 <= taken[-1] <= min(left, max(sizes))
        left -= taken[-1]
    assert sum(taken) == remaining


@given(remaining=st.integers(1, 400), sizes=st.sets(st.integers(1, 120), min_size=1, max_size=3))
def test_the_cut_is_the_cheapest(remaining: int, sizes: set[int]) -> None:
    """Padded tokens computed, plus a fixed cost per chunk: no worse than cutting with any one size alone."""

    def cost(chunks: list[int]) -> int:
        padded = [min(size for size in sizes if size >= chunk) for chunk in chunks]
        return sum(padded) + CALL_OVERHEAD_TOKENS * len(padded)

    taken, left = [], remaining
    while left:
        taken.append(next_chunk(left, sorted(sizes)))
        left -= taken[-1]
    if remaining > 4 * max(sizes):
        return  # long prompts take the largest chunk first, whatever the rest will be
    for size in sizes:
        count = -(-remaining // size)
        assert cost(taken) <= count * (size + CALL_OVERHEAD_TOKENS)
