"""Waiting queue: the order of starts, and the one who has waited longest."""

from __future__ import annotations

import random

import pytest

from msds.engine.block_pool import BlockPool
from msds.engine.prefix_cache import PrefixCache
from msds.engine.waiting_queue import SCAN_LIMIT, Entry, WaitingQueue
from tests.engine.scheduler_world import FakeSequence

CACHE = PrefixCache(BlockPool(2, 1))


def entry(arrival: int, priority: int = 0) -> Entry[FakeSequence]:
    return Entry(FakeSequence(arrival, [1], 2, priority=priority), arrival, 1, CACHE.chain(b""))


def queue_of(*entries: Entry[FakeSequence], max_overtakes: int = 2) -> WaitingQueue[FakeSequence]:
    queue: WaitingQueue[FakeSequence] = WaitingQueue(max_overtakes)
    for item in entries:
        queue.push(item)
    return queue


def test_candidates_come_by_priority_then_arrival() -> None:
    a, b, c, d = entry(0, 1), entry(1), entry(2, -1), entry(3)
    queue = queue_of(d, c, b, a)
    assert queue.candidates() == list(queue) == [c, b, d, a]
    queue.remove(b)
    assert list(queue) == [c, d, a]
    assert len(queue) == 3
    with pytest.raises(RuntimeError, match="sequence 1 does not wait"):
        queue.remove(b)


def test_after_so_many_overtakes_the_first_arrival_is_the_only_candidate() -> None:
    first, *others = [entry(0, 5), *(entry(n) for n in range(1, 5))]
    queue = queue_of(first, *others)
    queue.start(others[0])
    assert first not in queue.candidates()[:1]
    queue.start(others[1])
    assert queue.candidates() == [first]
    queue.start(first)
    assert queue.candidates() == others[2:]


def test_only_the_first_arrival_counts_and_it_counts_anew_after_its_start() -> None:
    first, second, third, fourth = (entry(n) for n in range(4))
    queue = queue_of(first, second, third, fourth, max_overtakes=1)
    queue.start(third)
    assert queue.candidates() == [first]
    queue.start(first)
    assert queue.candidates() == [second, fourth]
    queue.push(first)  # preempted
    assert queue.candidates() == [first, second, fourth]


def test_a_long_queue_is_not_scanned_to_its_end() -> None:
    entries = [entry(n) for n in range(3 * SCAN_LIMIT)]
    assert queue_of(*entries).candidates() == entries[:SCAN_LIMIT]


def test_among_any_few_starts_is_one_of_the_first_arrival() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        most, passed, arrival = rng.randrange(4), 0, 0
        queue = queue_of(max_overtakes=most)
        for _ in range(60):
            if rng.random() < 0.6 or not len(queue):
                queue.push(entry(arrival, rng.randrange(3)))
                arrival += 1
                continue
            oldest = min(queue, key=lambda item: item.arrival)
            chosen = rng.choice(queue.candidates())
            passed = 0 if chosen is oldest else passed + 1
            assert passed <= most
            queue.start(chosen)
