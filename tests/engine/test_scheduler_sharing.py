"""Scheduler: who gives up blocks to whom, and what is computed once for many."""

from __future__ import annotations

import pytest

from msds.engine.schedule_types import DecodeStep, PrefillStep
from tests.engine.scheduler_world import FakeSequence, distinct, history, make_world

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
            computed += [row.num_tokens for row in step.rows]
        world.run()
    assert computed == [43, 3, 3]
    assert [sequence.num_cached_tokens for sequence in world.live.values()] == [0, 40, 40]
    stats = world.scheduler.stats
    assert (stats.prefix_tokens_queried, stats.prefix_tokens_hit) == (129, 80)


def test_blocks_that_others_hold_need_no_room() -> None:
    world = make_world(num_blocks=9, chunk_sizes=(32,))
    first = world.new(distinct(21), 4)
    world.add(first)
    history(world, 1)
    second = world.new(distinct(21), 2)
    world.add(second)
    history(world, 2)
    assert first.block_table
    assert second.num_cached_tokens == 20
    assert second.block_table or second.id not in world.live
    world.drain()


def test_what_is_computed_again_after_eviction_can_be_found_again() -> None:
    world = make_world(num_blocks=6, block_size=2, max_num_seqs=2, max_preemptions=9)
    old, young = FakeSequence(0, [1], 9), FakeSequence(1, [2], 9)
    world.add(old, young)
    world.drain()
    assert world.scheduler.stats.preemptions == 1
    again = world.new(young.token_ids, 1)
    world.add(again)
    world.schedule()
    assert again.num_cached_tokens == 8
    world.run()
    world.drain()


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
    assert (step.rows[0].start, len(world.live[0].token_ids)) == (0, before)
    assert world.scheduler.stats.preemptions == 0
    world.run()
    late = world.new(world.live[0].token_ids[:9], 2)
    world.add(late)
    world.drain()
    assert late.num_cached_tokens == 8, "what was computed with the new weights is not found"
