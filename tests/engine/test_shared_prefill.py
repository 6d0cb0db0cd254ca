"""Short chunks of several sequences in one prefill step: which share, who waits for whom, and that it costs less."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.engine.ladder import CALL_OVERHEAD_TOKENS, SharedPrefill, shared_prefill, step_ladders
from msds.engine.schedule_types import PrefillStep
from msds.errors import OptionError
from tests.engine.scheduler_world import FakeSequence, World, distinct, history, make_world

SHARED = SharedPrefill(rows=(2, 4), tokens=8, context=32)


def world_of(*lengths: int, **policy: object) -> World:
    """Prompts of these lengths, no two alike, one token to generate each."""
    world = make_world(**{"chunk_sizes": (8, 64), "shared": SHARED, "num_blocks": 200, **policy})
    for length in lengths:
        world.add(world.new(distinct(length, 1000 * world.num_added), 1))
    return world


def test_a_burst_of_short_prompts_is_computed_together() -> None:
    assert history(world_of(5, 8, 2, 3), 9) == ["p0,1,2,3"]


def test_no_more_than_the_largest_step_holds() -> None:
    assert history(world_of(*[5] * 9), 9) == ["p0,1,2,3", "p4,5,6,7", "p8"]


def test_a_long_chunk_is_a_step_of_its_own() -> None:
    """And the short ones behind it take every second turn, together."""
    assert history(world_of(150, 5, 5), 9) == ["p0", "p1,2", "p0", "p0"]


def test_a_step_takes_no_more_rows_than_pay() -> None:
    """Five rows padded to eight would cost more than twice two and one alone."""
    shared = SharedPrefill(rows=(2, 8), tokens=64, context=128)
    world = world_of(*[60] * 5, chunk_sizes=(64,), shared=shared)
    assert history(world, 9) == ["p0,1", "p2,3", "p4"]
    world = world_of(*[60] * 7, chunk_sizes=(64,), shared=shared)
    assert history(world, 9) == ["p0,1,2,3,4,5,6"]


def test_nobody_is_overtaken_for_the_sake_of_sharing() -> None:
    """The long prompt is next, so the short ones behind it do not share the first step: they could take its place."""
    world = world_of(5, 60, 5, 5, max_num_seqs=2)
    assert history(world, 9) == ["p0", "p1", "p2,3"]


def test_a_text_beyond_the_planned_context_goes_alone() -> None:
    world = world_of(64)
    assert history(world, 1) == ["p0"]
    world.add(*(FakeSequence(id_, [*distinct(64, 0), id_, 9], 67) for id_ in (1, 2)))
    steps = []
    while (step := world.schedule()) is not None:
        steps.append((type(step), len(step.rows)))
        world.run()
    assert steps == [(PrefillStep, 1)] * 2, "a short chunk after a long cached prefix"


def test_what_is_left_of_some_and_others_that_start_share() -> None:
    """Chunks of a prompt that is cut into short ones share as well, and each text ends with all its tokens."""
    world = world_of(20, 5, chunk_sizes=(8,))
    third = FakeSequence(2, distinct(3, 5000), 4)
    world.add(third)
    assert history(world, 9) == ["p0,1,2", "p0", "p0"]
    assert len(third.token_ids) == 4


def test_decode_steps_take_turns_with_shared_ones() -> None:
    world = make_world(chunk_sizes=(8,), shared=SHARED, max_num_seqs=8)
    world.add(world.new(distinct(4), 9))
    assert history(world, 2) == ["p0", "d0"]
    world.add(*(FakeSequence(id_, distinct(12, 1000 * id_), 14) for id_ in (1, 2)))
    assert history(world, 5) == ["p1,2", "d0", "p1,2", "d0,1,2", "d0"]


def test_where_a_block_is_missing_the_others_go_ahead() -> None:
    world = world_of(5, 5, 12, num_blocks=6, chunk_sizes=(8,))
    assert history(world, 9) == ["p0,1", "p2", "p2"]


@pytest.mark.parametrize("shared", [SharedPrefill((), 8, 8), SharedPrefill((1, 4), 8, 8), SharedPrefill((4,), 0, 8)])
def test_sizes_that_make_no_sense_are_refused(shared: SharedPrefill) -> None:
    with pytest.raises(OptionError, match="shared is"):
        make_world(shared=shared)


@given(rows=st.sets(st.integers(2, 12), min_size=1, max_size=3), tokens=st.integers(1, 100), waiting=st.integers(1, 30))
def test_sharing_never_costs_more_than_one_by_one(rows: set[int], tokens: int, waiting: int) -> None:
    """Padded rows and the overhead of each call against as many calls of one row; and it is exact for full steps."""
    shared = SharedPrefill(tuple(sorted(rows)), tokens, 512)

    def cost(size: int) -> int:
        return size * tokens + CALL_OVERHEAD_TOKENS

    left, total = waiting, 0
    while left:
        count = shared.count_together(left)
        assert 1 <= count <= min(left, max(rows))
        total += cost(min(size for size in (1, *rows) if size >= count))
        left -= count
    assert total <= waiting * cost(1)
    assert shared.count_together(max(rows)) == max(rows) or tokens > CALL_OVERHEAD_TOKENS


@given(
    max_model_len=st.integers(1, 9000),
    max_num_seqs=st.integers(1, 64),
    prefill_chunk=st.integers(1, 2048),
    block_size=st.sampled_from([1, 8, 16, 128]),
)
def test_what_may_be_shared_is_planned_and_keeps_to_the_budget(
    max_model_len: int, max_num_seqs: int, prefill_chunk: int, block_size: int
) -> None:
    prefill, _ = step_ladders(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk, block_size=block_size
    )
    shared = shared_prefill(prefill, block_size)
    if shared is None:
        assert max_num_seqs == 1 or prefill_chunk < 2 * min(64, prefill_chunk, max_model_len)
        return
    assert max(shared.rows) <= max_num_seqs
    assert shared.num_tokens <= prefill_chunk
    assert all(low < high for low, high in itertools.pairwise(shared.rows))
    for size in shared.rows:
        blocks = -(-shared.context // block_size)
        assert {"S": size, "Q": shared.tokens, "B": blocks} in prefill
    assert len(prefill) <= 2 * len({bucket["B"] for bucket in prefill}) + 3
