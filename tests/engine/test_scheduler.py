"""Scheduler: each of its rules in a history small enough to follow. Random ones: test_scheduler_histories.py."""

from __future__ import annotations

import random

import pytest

from msds.engine.schedule_types import DecodeStep, PrefillStep, QueueFullError
from msds.errors import MsdsError, OptionError
from tests.engine.scheduler_world import FakeSequence, distinct, history, make_world

# What can be served: 8 usable blocks of 16


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "is_served"),
    [
        (127, 1, True),
        (127, 2, True),
        (128, 1, True),
        (128, 2, False),
        (140, 1, False),
        (100, 64, False),
        (100, 29, True),
    ],
)
def test_what_needs_all_blocks_is_served_and_what_needs_more_is_refused(
    prompt: int, max_tokens: int, is_served: bool
) -> None:
    """The last token is sampled but never computed: 128 slots serve 129 tokens."""
    world = make_world(num_blocks=9, block_size=16, chunk_sizes=(64,))
    sequence = world.new(distinct(prompt), max_tokens)
    if is_served:
        world.add(sequence)
    else:
        blocks = -(-(prompt + max_tokens - 1) // 16)
        with pytest.raises(OptionError, match=rf"{prompt} tokens with {max_tokens} .* {blocks} cache blocks .* has 8"):
            world.add(sequence)
        assert world.schedule() is None
    small = world.new(distinct(10, 900), 3)
    world.add(small)
    world.drain()
    assert len(small.token_ids) == 13
    assert len(sequence.token_ids) == (prompt + max_tokens if is_served else prompt)


def test_the_choices_of_one_request_are_queued_together_or_not_at_all() -> None:
    world = make_world(max_waiting=3)
    world.add(world.new([1], 5))
    two = [FakeSequence(id_, [1], 6) for id_ in (1, 2, 3)]
    with pytest.raises(QueueFullError, match="1 sequences wait and the request brings 3 more, but at most 3") as caught:
        world.add(*two)
    assert isinstance(caught.value, MsdsError)
    assert (caught.value.num_new, caught.value.num_waiting, caught.value.max_waiting) == (3, 1, 3)
    world.add(*two[:2])
    with pytest.raises(OptionError, match="4 sequences, but at most 3"):
        world.add(*(FakeSequence(id_, [1], 6) for id_ in range(5, 9)))
    fits, never = FakeSequence(10, [1], 6), FakeSequence(11, [1] * 300, 301)
    world.drain()
    with pytest.raises(OptionError):
        world.add(fits, never)
    assert world.schedule() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("chunk_sizes", (0,)), ("chunk_sizes", ()), ("max_waiting", 0), ("max_overtakes", -1)],
)
def test_a_policy_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        make_world(**{name: value})


# The order of steps


def test_prefill_chunks_and_decode_steps_alternate() -> None:
    world = make_world()
    world.add(world.new(distinct(4), 9))
    assert history(world, 2) == ["p0", "d0"]
    world.add(world.new(distinct(24, 200), 9))
    assert history(world, 7) == ["p1", "d0", "p1", "d0", "p1", "d0,1", "d0,1"]


def test_chunks_cover_a_prompt_exactly_and_only_the_last_samples() -> None:
    world = make_world(chunk_sizes=(4, 16))
    sequence = world.new(distinct(41), 2)
    world.add(sequence)
    rows = []
    while isinstance(step := world.schedule(), PrefillStep):
        rows += [(row.start, row.num_tokens, row.samples) for row in step.rows]
        world.run()
    assert [start for start, _, _ in rows] == [0, *(start + count for start, count, _ in rows[:-1])]
    assert rows[-1][0] + rows[-1][1] == 41
    assert [samples for _, _, samples in rows] == [False] * (len(rows) - 1) + [True]
    assert max(count for _, count, _ in rows) == 16


def test_short_prompts_pass_a_long_one_in_prefill_every_second_time() -> None:
    world = make_world()
    world.add(world.new(distinct(40), 1))
    world.add(world.new(distinct(40, 200), 1))
    world.add(*(FakeSequence(id_, distinct(5, 100 * id_), 6) for id_ in (3, 4, 5)))
    assert history(world, 8) == ["p0", "p3", "p0", "p4", "p0", "p5", "p0", "p0"]
    assert history(world, 9) == ["p1"] * 5


def test_what_is_left_of_a_short_prompt_goes_before_another_short_one() -> None:
    world = make_world(block_size=16, num_blocks=300, chunk_sizes=(64, 512))
    world.add(world.new(distinct(3100), 1))
    world.add(*(FakeSequence(id_, distinct(70, 9000 * id_), 71) for id_ in (1, 2)))  # cheaper as 64 + 6 than as 512
    assert history(world, 8) == ["p0", "p1", "p0", "p1", "p0", "p2", "p0", "p2"]


def test_a_long_prompt_of_higher_priority_passes_one_in_prefill() -> None:
    world = make_world()
    world.add(world.new(distinct(40), 2))
    assert history(world, 1) == ["p0"]
    world.add(world.new(distinct(24, 200), 2, priority=-1))
    assert history(world, 5) == ["p1", "p1", "p1", "d1", "p0"]


def test_what_a_decode_step_can_hold_needs_no_prefill() -> None:
    world = make_world()
    world.add(FakeSequence(0, [5], 4), FakeSequence(1, [5], 4))
    step = world.schedule()
    assert isinstance(step, DecodeStep)
    assert [(row.start, row.num_tokens, row.num_drafts, row.samples) for row in step.rows] == [(0, 1, 0, True)] * 2


def test_priority_then_arrival_decide_who_starts() -> None:
    world = make_world(max_num_seqs=1)
    for id_, priority in enumerate([0, 3, 0, -1]):
        world.add(FakeSequence(id_, distinct(4, 50 * id_), 5, priority=priority))
    assert history(world, 4) == ["p3", "p0", "p2", "p1"]


def test_no_more_sequences_run_than_allowed() -> None:
    world = make_world(max_num_seqs=2)
    world.add(*(FakeSequence(id_, [id_], 4) for id_ in range(5)))
    assert history(world, 4) == ["d0,1", "d0,1", "d0,1", "d2,3"]


# Nothing blocks, nothing starves


def test_what_does_not_fit_now_lets_smaller_ones_pass_but_only_so_many() -> None:
    world = make_world(num_blocks=9, max_overtakes=2, max_num_seqs=4)
    world.add(world.new(distinct(20), 9))  # five of eight blocks, later seven
    assert history(world, 1) == ["p0"]
    big = world.new(distinct(28, 200), 2)
    world.add(big)
    started = []
    for _ in range(200):
        if big.block_table:
            break
        small = world.new(distinct(2, 1000 * world.num_added), 1)
        world.add(small)
        world.schedule()
        world.run()
        if small.id not in world.live:
            started.append(small.id)
    assert big.block_table, "the big one starved"
    done = [id_ for id_ in range(2, world.num_added) if id_ not in world.live]
    assert len(done) == 2, "the small ones were blocked, or passed more often than allowed"
    world.drain()


def test_a_stream_of_small_high_priority_requests_starves_nobody() -> None:
    world = make_world(num_blocks=7, max_num_seqs=3, max_overtakes=4)
    rng = random.Random(0)
    low = world.new(distinct(16), 8, priority=9)
    world.add(low)
    for _ in range(3000):
        if low.id not in world.live:
            break
        if world.scheduler.stats.waiting < 6:
            world.add(world.new([rng.randrange(9) for _ in range(rng.randint(1, 9))], rng.randint(1, 9), priority=-1))
        world.schedule()
        world.run()
    assert len(low.token_ids) == 24


# Ends


def test_a_failed_step_drops_its_sequences_and_what_their_blocks_hold() -> None:
    world = make_world(max_num_seqs=2)
    bystander = FakeSequence(9, distinct(3, 500), 20)
    world.add(world.new(distinct(16), 4))
    history(world, 1)
    world.add(bystander)
    world.schedule()
    assert world.scheduler.stats.cached_blocks == 0
    world.fail(random.Random(0))
    assert list(world.live) == [9]
    assert world.scheduler.stats.cached_blocks == 0
    again = FakeSequence(10, distinct(16), 20)
    world.add(again)
    world.drain()
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waiting", "in prefill", "decoding"])
@pytest.mark.parametrize("is_out", [False, True], ids=["between steps", "during its step"])
def test_an_abort_frees_the_blocks_in_every_state(steps: int, is_out: bool) -> None:
    world = make_world()
    sequence = world.new(distinct(16), 9)
    world.add(sequence)
    history(world, steps)
    if is_out:
        world.schedule()
    world.abort(sequence.id)
    assert (world.scheduler.stats.referenced_blocks > 0) == is_out
    if is_out:
        world.run()
    assert world.scheduler.stats.referenced_blocks == 0
    assert world.schedule() is None
    assert not world.scheduler.abort(12345)


def test_deadlines_end_waiting_and_running_sequences() -> None:
    world = make_world(max_num_seqs=1)
    for id_, deadline in enumerate([5.0, None, 4.0, 9.0]):
        world.add(FakeSequence(id_, [id_], 9, deadline=deadline))
    world.schedule()
    assert world.expire(3.9) == []
    assert world.expire(5.0) == [0, 2]
    world.run()
    assert history(world, 1) == ["d1"]


def test_misuse_is_an_error() -> None:
    world = make_world()
    sequence = world.new([1], 5)
    world.add(sequence)
    for again in ([sequence], [FakeSequence(7, [1], 5), FakeSequence(7, [1], 5)]):
        with pytest.raises(RuntimeError, match="an id of its own"):
            world.scheduler.add(again)
    with pytest.raises(RuntimeError, match="no tokens"):
        world.scheduler.add([FakeSequence(7, [], 5)])
    with pytest.raises(RuntimeError, match="not known"):
        world.scheduler.finish(7)
    step = world.schedule()
    assert step is not None
    for call in (world.scheduler.schedule, world.scheduler.invalidate):
        with pytest.raises(RuntimeError, match="a step is out"):
            call()
    sequence.token_ids += [1, 2]
    with pytest.raises(RuntimeError, match="grew by 2 tokens in a step for 0 to 1"):
        world.scheduler.commit(step)
    del sequence.token_ids[-2:]
    world.run()
    for late in (world.scheduler.commit, world.scheduler.fail):
        with pytest.raises(RuntimeError, match="not out"):
            late(step)


def test_tokens_may_come_only_where_the_chunk_was_the_last() -> None:
    world = make_world()
    sequence = world.new(distinct(20), 5)
    world.add(sequence)
    step = world.schedule()
    assert step is not None
    sequence.token_ids.append(7)
    with pytest.raises(RuntimeError, match="grew by 1 tokens in a step for 0 to 0"):
        world.scheduler.commit(step)


def test_what_an_aborted_sequence_got_from_its_last_step_does_not_matter() -> None:
    world = make_world()
    sequence = world.new(distinct(4), 5)
    world.add(sequence)
    world.schedule()
    world.abort(sequence.id)
    sequence.token_ids += [1, 2, 3, 4]
    world.run()
    assert world.scheduler.stats.free_blocks == world.pool.num_usable


def test_a_sequence_that_should_have_been_finished_is_an_error() -> None:
    world = make_world()
    sequence = world.new([1], 1)
    world.add(sequence)
    step = world.schedule()
    assert step is not None
    sequence.token_ids.append(7)
    world.scheduler.commit(step)
    with pytest.raises(RuntimeError, match="should have been finished"):
        world.scheduler.schedule()


def test_the_same_calls_give_the_same_steps() -> None:
    def run() -> list[str]:
        world = make_world(num_blocks=9, max_num_seqs=3)
        rng = random.Random(1)
        for _ in range(8):
            world.add(world.new([rng.randrange(3) for _ in range(rng.randint(1, 12))], rng.randint(1, 9)))
        return history(world, 500)

    assert run() == run()
