"""Block pool: every block is in exactly one state, and the states change as the references do."""

from __future__ import annotations

import random

import pytest

from msds.engine.block_pool import RESERVED_BLOCK, BlockPool
from msds.errors import OptionError


def forget(block: int) -> None:
    """A listener for tests that do not look at what is forgotten."""


def test_a_new_pool_hands_out_every_block_but_the_reserved_one() -> None:
    pool = BlockPool(5, 16)
    assert (pool.num_usable, pool.num_free, pool.num_available, pool.num_referenced) == (4, 4, 4, 0)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert RESERVED_BLOCK == 0
    assert (pool.num_free, pool.num_available, pool.num_referenced) == (0, 0, 4)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(OptionError, match="1 blocks"):
        BlockPool(1, 16)


def test_a_shared_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(3, 4)
    (block,) = pool.allocate(1)
    pool.share([block])
    assert pool.references(block) == 2
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


def test_misuse_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(3, 4)
    (block,) = pool.allocate(1)
    with pytest.raises(RuntimeError, match="2 blocks asked for, 1 available"):
        pool.allocate(2)
    free = 3 - block
    with pytest.raises(RuntimeError, match="it is free"):
        pool.share([free])
    with pytest.raises(RuntimeError, match="not in use"):
        pool.release([free])
    with pytest.raises(RuntimeError, match="0 references"):
        pool.keep(free, forget)
    pool.keep(block, forget)
    with pytest.raises(RuntimeError, match="cannot be kept"):
        pool.keep(block, forget)
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (1, 0, 1)


def test_kept_blocks_are_cached_when_released_and_evicted_after_the_free_ones_tail_first() -> None:
    pool = BlockPool(6, 4)
    forgotten: list[int] = []
    first, second = pool.allocate(2), pool.allocate(2)
    for block in (*first, *second):
        pool.keep(block, forgotten.append)
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 4, 5)
    assert pool.allocate(1) == [5]
    assert forgotten == []
    assert pool.allocate(4) == [*reversed(first), *reversed(second)] == forgotten
    assert not any(pool.is_kept(block) for block in (*first, *second))


def test_sharing_a_cached_block_saves_it_from_eviction_and_refreshes_it() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.keep(block, forget)
        pool.release([block])
    pool.share([blocks[0]])
    assert pool.is_kept(blocks[0])
    assert not pool.is_cached(blocks[0])
    assert pool.num_available == 2
    pool.release([blocks[0]])
    assert pool.allocate(2) == blocks[1:]
    assert pool.is_cached(blocks[0])


def test_a_discarded_block_is_free_at_once_or_when_its_last_reference_goes() -> None:
    pool = BlockPool(3, 4)
    forgotten: list[int] = []
    cached, held = pool.allocate(2)
    for block in (cached, held):
        pool.keep(block, forgotten.append)
    pool.release([cached])
    pool.discard(cached)
    pool.discard(held)
    assert forgotten == [cached, held]
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (1, 0, 1)
    pool.release([held])
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_random_histories_keep_the_sum_and_the_references() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        pool = BlockPool(rng.randint(2, 9), 4)
        tables: list[list[int]] = []
        kept: set[int] = set()
        for _ in range(60):
            held = [block for table in tables for block in table]
            action = rng.choice(["allocate", "share", "release", "keep", "discard"])
            if action == "allocate":
                tables.append(pool.allocate(rng.randint(0, pool.num_available)))
            elif action == "share" and (held or kept):
                block = rng.choice(sorted({*held, *kept}))
                pool.share([block])
                tables.append([block])
            elif action == "release" and tables:
                pool.release(tables.pop(rng.randrange(len(tables))))
            elif action == "keep" and set(held) - kept:
                block = rng.choice(sorted(set(held) - kept))
                kept.add(block)
                pool.keep(block, kept.remove)
            elif action == "discard" and kept:
                pool.discard(rng.choice(sorted(kept)))
            held = [block for table in tables for block in table]
            assert all(pool.references(block) == held.count(block) for block in range(pool.num_blocks))
            assert {block for block in range(pool.num_blocks) if pool.is_kept(block)} == kept
            assert pool.num_referenced == len(set(held))
            assert pool.num_cached == len(kept - set(held))
            assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_usable
        for table in tables:
            pool.release(table)
        assert pool.num_available == pool.num_usable
        assert sorted(pool.allocate(pool.num_usable)) == list(range(1, pool.num_blocks))
