"""Several replicas behind one queue: who goes where, and what one step is. Histories: test_scheduler_histories.py."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from msds.engine.ladder import SharedPrefill
from msds.engine.schedule_types import DecodeStep, PrefillStep
from tests.engine.scheduler_world import FakeSequence, World, distinct, make_world

SHARED = SharedPrefill(rows=(2, 4), tokens=4, context=16)


def homes(world: World) -> list[int]:
    """The replicas of the rows of the next step, which is run."""
    step = world.schedule()
    assert step is not None
    found = [row.sequence.replica for row in step.rows]
    world.run()
    return found


@pytest.mark.parametrize("shared", [None, SHARED])
@pytest.mark.parametrize("together", [True, False], ids=["at once", "one by one"])
def test_requests_are_spread(shared: SharedPrefill | None, together: bool) -> None:
    world = make_world(num_replicas=2, max_num_seqs=4, shared=shared)
    sequences = [FakeSequence(id_, distinct(4, 50 * id_), 30) for id_ in range(8)]
    for sequence in sequences:
        world.add(sequence)
        if not together:
            world.schedule()
            world.run()
    while world.scheduler.stats.waiting:
        world.schedule()
        world.run()
    assert Counter(sequence.replica for sequence in sequences) == {0: 4, 1: 4}
    world.drain()


def test_short_chunks_share_the_step_of_all_replicas() -> None:
    world = make_world(num_replicas=2, shared=SHARED)
    world.add(*(FakeSequence(id_, distinct(4, 50 * id_), 9) for id_ in range(6)))
    assert homes(world) == [0, 0, 0, 1, 1, 1]
    assert homes(world) == [0, 0, 0, 1, 1, 1]


def test_a_long_chunk_of_one_replica_makes_the_step_one_chunk_each() -> None:
    """The step's shape is that of the longest: several rows of it are not planned for."""
    world = make_world(num_replicas=2, shared=SHARED)
    world.add(FakeSequence(0, distinct(30), 31), *(FakeSequence(id_, distinct(4, 50 * id_), 5) for id_ in (1, 2)))
    step = world.schedule()
    assert isinstance(step, PrefillStep)
    assert [(row.sequence.id, row.sequence.replica, row.num_tokens) for row in step.rows] == [(0, 0, 8), (1, 1, 4)]


def test_a_step_is_of_one_kind_everywhere() -> None:
    """Prefill steps of one replica alternate with decode steps of the other, though each could go on alone."""
    world = make_world(num_replicas=2)
    world.add(world.new(distinct(4), 20))
    assert homes(world) == [0]
    world.add(world.new(distinct(40, 200), 20))
    assert [homes(world) for _ in range(6)] == [[0], [1], [0], [1], [0], [1]]


def test_a_conversation_goes_on_where_it_began() -> None:
    world = make_world(num_replicas=2)
    other, first = world.new(distinct(4), 2), FakeSequence(1, distinct(24, 100), 40)
    world.add(other, first)
    world.drain()
    assert (other.replica, first.replica) == (0, 1)
    second = FakeSequence(2, [*first.token_ids, 9, 9], 60)
    world.add(second)
    world.drain()
    assert (second.replica, second.num_cached_tokens) == (1, 36)


def test_a_common_beginning_does_not_send_everybody_to_one_replica() -> None:
    world = make_world(num_replicas=2, max_num_seqs=8)
    beginning = distinct(20, 500)
    sequences = [FakeSequence(id_, [*beginning, id_], 60) for id_ in range(6)]
    for sequence in sequences:
        world.add(sequence)
        for _ in range(4):
            world.schedule()
            world.run()
    assert Counter(sequence.replica for sequence in sequences) == {0: 3, 1: 3}
    assert sum(bool(sequence.num_cached_tokens) for sequence in sequences) == 4  # all but the first of each


def test_nobody_waits_for_a_replica_while_another_has_room() -> None:
    world = make_world(num_replicas=2, max_num_seqs=1)
    short, long, waiting = world.new(distinct(4), 2), FakeSequence(1, distinct(4, 50), 60), FakeSequence(2, [5] * 4, 9)
    world.add(short, long, waiting)
    while waiting.id in world.live:
        world.schedule()
        world.run()
    assert waiting.replica == short.replica != long.replica
    assert long.id in world.live


def test_who_gives_way_may_go_on_elsewhere() -> None:
    world = make_world(num_replicas=2, num_blocks=5, max_num_seqs=2)  # four blocks of four
    growing = [FakeSequence(id_, [id_], total) for id_, total in enumerate([17, 6, 17])]
    world.add(*growing)
    begun: dict[int, list[int]] = {sequence.id: [] for sequence in growing}
    while world.schedule() is not None:
        for sequence in growing:
            if sequence.block_table and begun[sequence.id][-1:] != [sequence.replica]:
                begun[sequence.id].append(sequence.replica)
        world.run()
    assert begun == {0: [0], 1: [1], 2: [0, 1]}
    assert world.scheduler.stats.preemptions == 1


def test_a_failed_step_drops_what_ran_in_it_everywhere() -> None:
    world = make_world(num_replicas=2)
    world.add(*(FakeSequence(id_, distinct(8, 50 * id_), 20) for id_ in range(4)))
    world.schedule()
    world.fail(random.Random(1))
    assert set(world.live) == {2, 3}
    world.drain()


def test_decode_steps_have_the_rows_of_all() -> None:
    world = make_world(num_replicas=3)
    world.add(*(FakeSequence(id_, [id_], 5) for id_ in range(7)))
    step: Any = world.schedule()
    assert isinstance(step, DecodeStep)
    assert Counter(row.sequence.replica for row in step.rows) == {0: 3, 1: 2, 2: 2}
