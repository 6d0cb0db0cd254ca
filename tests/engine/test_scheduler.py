"""Scheduler: each of its rules in a history small enough to follow. Random ones: test_scheduler_histories.py."""

from __future__ import annotations

import random

import pytest

from msds.engine.schedule_types import DecodeStep, PrefillStep, QueueFullError, SchedulerPolicy
from msds.errors import MsdsError, OptionError
from tests.engine.scheduler_world import FakeSequence, World


def make_world(*, num_blocks: int = 65, block_size: int = 4, **policy: object) -> World:
    policy = {"max_num_seqs": 8, "chunk_sizes": (8,)} | policy
    return World(SchedulerPolicy(**policy), num_blocks=num_blocks, block_size=block_size)  # type: ignore[arg-type]


def distinct(length: int, start: int = 100) -> list[int]:
    """A prompt that shares no block with one of another start."""
    return list(range(start, start + length))


def history(world: World, num_steps: int) -> list[str]:
    """The next steps, run: "p3" is a prefill step of sequence 3, "d1,2" a decode step of 1 and 2."""
    steps = []
    for _ in range(num_steps):
        step = world.schedule()
        if step is None:
            break
        ids = ",".join(str(id_) for id_ in sorted(row.sequence.id for row in step.rows))
        steps.append(("p" if isinstance(step, PrefillStep) else "d") + ids)
        world.run()
    return steps


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
        rows.append((step.row.start, step.row.num_tokens, step.row.samples))
        world.run()
    assert [start for start, _, _ in rows] == [0, *(start + count for start, count, _ in rows[:-1])]
    assert rows[-1][0] + rows[-1][1] == 41
    assert [samples for _, _, samples in rows] == [False] * (len(rows) - 1) + [True]
    assert max(count for _, count, _ in rows) == 16


def test_short_prompts_pass_a_long_one_in_prefill_every_second_time() -> None:
    world = make_world()
    world.add(world.new(distinct(40), 2))
    world.add(world.new(distinct(40, 200), 2))
    world.add(
        world.new(distinct(5, 300), 2),
    )
    assert history(world, 7) == ["p0", "p2", "d2", "p0", "p0", "p0", "p0"]
    assert history(world, 3) == ["d0", "p1", "p1"]


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


# Preemption


def test_the_youngest_of_lowest_priority_gives_way_and_its_answer_does_not_change() -> None:
    world = make_world(num_blocks=6, max_num_seqs=4)  # five blocks of four; each sequence comes to need three
    sequences = [FakeSequence(id_, [id_], 13, priority=p) for id_, p in enumerate([0, 1, 0])]
    world.add(*sequences)
    preempted: list[int] = []
    while world.schedule() is not None:
        for sequence in sequences:
            if sequence.id in world.live and len(sequence.token_ids) > 1 and not sequence.block_table:
                preempted += [] if preempted[-1:] == [sequence.id] else [sequence.id]
        world.run()
    assert preempted == [1, 2]
    assert [sequence.token_ids for sequence in sequences] == [[id_, *[7] * 12] for id_ in range(3)]
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0, 0]
    assert world.scheduler.stats.preemptions == 2


def test_a_preempted_sequence_reuses_what_is_left_of_its_blocks() -> None:
    world = make_world(num_blocks=7, block_size=2, max_num_seqs=2, max_preemptions=9)
    old, young = FakeSequence(0, [1], 12), FakeSequence(1, [2], 9)
    world.add(old, young)
    while young.block_table or len(young.token_ids) == 1:
        world.schedule()
        world.run()
    assert young.num_computed == 0
    while not young.block_table:
        world.schedule()
        world.run()
    assert young.num_computed > 0
    assert world.scheduler.stats.prefix_tokens_hit == 0, "what preemption finds again is no hit in the statistics"
    world.drain()


def test_who_was_preempted_often_is_protected() -> None:
    """Low priority gives way max_preemptions times, and then others do."""
    world = make_world(num_blocks=7, max_num_seqs=2, max_preemptions=1)
    low = world.new([1], 24, priority=5)
    world.add(low)
    had_blocks, times = False, 0
    for _ in range(400):
        if low.id not in world.live:
            break
        if len(world.live) < 2:
            world.add(world.new([world.num_added], 16, priority=0))
        world.schedule()
        times += had_blocks and not low.block_table
        had_blocks = bool(low.block_table)
        world.run()
    assert low.id not in world.live
    assert times == 1
    assert world.scheduler.stats.preemptions > 1


def test_drafts_take_spare_blocks_only() -> None:
    world = make_world(num_blocks=3, block_size=4, max_num_seqs=2)
    a, b = FakeSequence(0, [1, 2, 3], 5, num_lookahead=3), FakeSequence(1, [4, 5, 6], 5, num_lookahead=3)
    world.add(a, b)
    step = world.schedule()
    assert isinstance(step, DecodeStep)
    assert [(row.num_tokens, row.num_drafts) for row in step.rows] == [(3, 1), (3, 1)]
    assert world.scheduler.stats.preemptions == 0


def test_drafts_never_go_beyond_the_last_token_wanted() -> None:
    world = make_world()
    world.add(FakeSequence(0, [1], 7, num_lookahead=3))
    drafts = []
    while (step := world.schedule()) is not None:
        drafts.append(step.rows[0].num_drafts)
        world.run()
    assert drafts == [3, 1]


# Prefix reuse


def test_choices_of_one_prompt_compute_it_once() -> None:
    world = make_world(chunk_sizes=(64,))
    world.add(*(FakeSequence(id_, distinct(43), 50) for id_ in range(3)))
    computed = []
    for _ in range(5):
        step = world.schedule()
        if isinstance(step, PrefillStep):
            computed.append(step.row.num_tokens)
        world.run()
    assert computed == [43, 3, 3]
    assert [sequence.num_cached_tokens for sequence in world.live.values()] == [0, 40, 40]
    stats = world.scheduler.stats
    assert (stats.prefix_tokens_queried, stats.prefix_tokens_hit) == (129, 80)


@pytest.mark.parametrize(("length", "num_cached"), [(7, 4), (8, 4), (9, 8)])
def test_a_finished_answer_is_found_again_up_to_its_last_token(length: int, num_cached: int) -> None:
    world = make_world()
    world.add(world.new(distinct(6), 4))
    world.drain()
    again = world.new([*distinct(6), 7, 7, 7][:length], 2)
    world.add(again)
    world.schedule()
    assert again.num_cached_tokens == again.num_computed == num_cached
    world.run()
    world.drain()


@pytest.mark.parametrize("options", [{"cache_salt": b"other"}, {"allow_prefix_reuse": False}])
def test_another_salt_and_forbidden_reuse_compute_everything(options: dict[str, object]) -> None:
    world = make_world()
    world.add(world.new(distinct(13), 2))
    world.drain()
    world.add(world.new(distinct(13), 2, **options))
    assert history(world, 3) == ["p1", "p1", "d1"]
    assert world.scheduler.stats.prefix_tokens_hit == 0


def test_logits_of_every_prompt_token_come_from_prefill_steps() -> None:
    world = make_world()
    world.add(FakeSequence(0, [5], 3, allow_prefix_reuse=False, num_lookahead=2))
    assert history(world, 2) == ["p0", "d0"]


def test_new_weights_reuse_nothing_and_keep_everyone() -> None:
    world = make_world()
    world.add(world.new(distinct(12), 9))
    history(world, 4)
    before = len(world.live[0].token_ids)
    world.update_weights()
    assert world.scheduler.stats.cached_blocks == 0
    step = world.schedule()
    assert isinstance(step, PrefillStep)
    assert (step.row.start, len(world.live[0].token_ids)) == (0, before)
    assert world.scheduler.stats.preemptions == 0
    world.run()
    world.drain()


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
