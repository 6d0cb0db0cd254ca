"""Prefix cache: what is found is exactly what was registered for the same tokens and salt, and still there."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from msds.engine.block_pool import BlockPool
from msds.engine.prefix_cache import PrefixCache

SALT = b"model"


def computed(pool: BlockPool, cache: PrefixCache, tokens: list[int], salt: bytes = SALT) -> list[int]:
    """The table of a sequence whose full blocks are computed and registered; the caller holds it."""
    table = pool.allocate(pool.blocks_for(len(tokens)))
    chain = cache.chain(salt)
    for index in range(len(tokens) // pool.block_size):
        cache.register(chain, tokens, index, table[index])
    return table


def found(cache: PrefixCache, tokens: list[int], salt: bytes = SALT) -> list[int]:
    return cache.lookup(cache.chain(salt), tokens)


@pytest.mark.parametrize(
    ("num_tokens", "num_found"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (40, 3)]
)
def test_a_lookup_finds_full_blocks_but_never_the_last_token(num_tokens: int, num_found: int) -> None:
    pool = BlockPool(20, 4)
    cache = PrefixCache(pool)
    table = computed(pool, cache, list(range(14)))  # three full blocks and two tokens
    assert len(cache) == 3
    assert found(cache, list(range(num_tokens))) == table[:num_found]


def test_tokens_before_a_block_decide_whether_it_is_found() -> None:
    pool = BlockPool(20, 2)
    cache = PrefixCache(pool)
    computed(pool, cache, [1, 2, 3, 4])
    assert found(cache, [9, 2, 3, 4, 5]) == []
    assert len(found(cache, [1, 2, 9, 4, 5])) == 1
    assert found(cache, [3, 4, 5]) == []


@pytest.mark.parametrize("other", [b"", b"mode", b"model2", b"MODEL"])
def test_another_salt_shares_nothing(other: bytes) -> None:
    pool = BlockPool(20, 2)
    cache = PrefixCache(pool)
    table = computed(pool, cache, [1, 2, 3])
    assert found(cache, [1, 2, 3], other) == []
    assert found(cache, [1, 2, 3]) == table[:1]


def test_equal_content_is_kept_once_and_the_second_block_stays_private() -> None:
    pool = BlockPool(20, 2)
    cache = PrefixCache(pool)
    first, second = computed(pool, cache, [1, 2, 3, 4]), computed(pool, cache, [1, 2, 3, 4])
    assert not set(first) & set(second)
    assert len(cache) == 2
    assert found(cache, [1, 2, 3, 4, 5]) == first
    pool.release(second)
    assert pool.num_cached == 0
    pool.release(first)
    assert pool.num_cached == 2


def test_equal_content_computed_again_counts_as_use() -> None:
    pool = BlockPool(4, 2)
    cache = PrefixCache(pool)
    old, young = computed(pool, cache, [1, 2]), computed(pool, cache, [5, 6])
    pool.release(old)
    pool.release(young)
    pool.release(computed(pool, cache, [1, 2]))
    pool.allocate(2)
    assert found(cache, [1, 2, 3]) == old
    assert found(cache, [5, 6, 7]) == []


def test_eviction_takes_the_longest_unused_and_the_end_of_a_chain_first() -> None:
    pool = BlockPool(7, 2)
    cache = PrefixCache(pool)
    a, b = computed(pool, cache, [1, 2, 3, 4, 5, 6]), computed(pool, cache, [7, 8, 9, 10, 11, 12])
    pool.release(a)
    pool.release(b)
    assert pool.num_free == 0
    pool.allocate(1)
    assert found(cache, [1, 2, 3, 4, 5, 6, 0]) == a[:2]
    assert found(cache, [7, 8, 9, 10, 11, 12, 0]) == b
    pool.share(a[:1])
    pool.release(a[:1])
    pool.allocate(1)
    assert found(cache, [1, 2, 3, 4, 5, 6, 0]) == a[:1]
    pool.allocate(2)
    assert found(cache, [7, 8, 9, 10, 11, 12, 0]) == b[:1]
    assert len(cache) == 2


def test_clear_forgets_all_and_chains_made_before_stay_apart() -> None:
    pool = BlockPool(6, 2)
    cache = PrefixCache(pool)
    released, held = computed(pool, cache, [1, 2, 3, 4]), computed(pool, cache, [5, 6])
    old = cache.chain(SALT)
    pool.release(released)
    cache.clear()
    assert (len(cache), pool.num_cached, pool.num_free) == (0, 0, 4)
    cache.register(old, [5, 6], 0, held[0])
    assert found(cache, [5, 6, 7]) == []
    table = computed(pool, cache, [1, 2])
    assert found(cache, [1, 2, 3]) == table


def test_dropped_blocks_are_not_found_and_nothing_else_is_lost() -> None:
    pool = BlockPool(8, 2)
    cache = PrefixCache(pool)
    table, other = computed(pool, cache, [1, 2, 3, 4]), computed(pool, cache, [5, 6])
    cache.drop([table[1], 7])
    assert found(cache, [1, 2, 3, 4, 5]) == table[:1]
    assert found(cache, [5, 6, 7]) == other


def test_a_block_that_is_not_full_is_not_registered() -> None:
    pool = BlockPool(4, 4)
    cache = PrefixCache(pool)
    with pytest.raises(RuntimeError, match="not full"):
        cache.register(cache.chain(SALT), [1, 2, 3], 0, pool.allocate(1)[0])


def test_digests_do_not_depend_on_the_process() -> None:
    """A digest from Python's own hash would: that is seeded per process, and collides for -1 and -2."""
    code = (
        "from msds.engine.block_pool import BlockPool; from msds.engine.prefix_cache import PrefixCache;"
        "print(PrefixCache(BlockPool(2, 2)).chain(b'model').digest(1, [1, 2, 3, 4]).hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cache = PrefixCache(BlockPool(2, 2))
    assert run.stdout.strip() == cache.chain(SALT).digest(1, [1, 2, 3, 4]).hex()
    assert cache.chain(SALT).digest(0, [2**31, 1]) != cache.chain(SALT).digest(0, [1, 2**31])


def test_random_histories_find_the_longest_chain_that_is_kept() -> None:
    """Against a model that stores whole prefixes instead of digests."""
    for seed in range(300):
        rng = random.Random(seed)
        pool = BlockPool(rng.randint(3, 10), 2)
        cache = PrefixCache(pool)
        holds: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # of each block: salt and all tokens up to its end
        tables: list[list[int]] = []
        for _ in range(40):
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            salt = rng.choice([b"a", b"b"])
            hit = found(cache, tokens, salt)
            for index, block in enumerate(hit):
                assert holds[block] == (salt, tuple(tokens[: 2 * index + 2]))
            assert 2 * len(hit) < len(tokens)
            longer = (salt, tuple(tokens[: 2 * len(hit) + 2]))
            if len(longer[1]) < len(tokens):
                assert not any(pool.is_kept(block) and content == longer for block, content in holds.items())
            pool.share(hit)
            fresh = pool.blocks_for(len(tokens)) - len(hit)
            if fresh <= pool.num_available and rng.random() < 0.8:
                table = hit + pool.allocate(fresh)
                chain = cache.chain(salt)
                for index in range(len(hit), len(tokens) // 2):
                    holds[table[index]] = (salt, tuple(tokens[: 2 * index + 2]))
                    cache.register(chain, tokens, index, table[index])
                tables.append(table)
            else:
                pool.release(hit)
            while tables and rng.random() < 0.5:
                pool.release(tables.pop(rng.randrange(len(tables))))
            if rng.random() < 0.02:
                cache.clear()
                holds.clear()
            assert len(cache) == sum(pool.is_kept(block) for block in range(pool.num_blocks))
