"""The simple block pool: whatever is allocated and released, each block is free or used, once."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from msds.engine.blocks import RESERVED_BLOCK, BlockPool
from msds.errors import OptionError


class Pool(RuleBasedStateMachine):
    """Owners hold tuples of blocks; the model of the pool is that list."""

    @initialize(num_blocks=st.integers(2, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.held: list[tuple[int, ...]] = []

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(RuntimeError, match="did not check"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(blocks) == count
        self.held.append(blocks)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.pool.release(blocks)
            if blocks:
                with pytest.raises(RuntimeError, match="not in use"):
                    self.pool.release(blocks[:1])

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        if not hasattr(self, "pool"):
            return
        used = [block for blocks in self.held for block in blocks]
        assert len(set(used)) == len(used)
        assert RESERVED_BLOCK not in used
        assert all(0 < block < self.pool.num_blocks for block in used)
        assert self.pool.num_free + len(used) == self.pool.num_usable == self.pool.num_blocks - 1


TestPool = Pool.TestCase


def test_the_reserved_block_cannot_be_released() -> None:
    with pytest.raises(RuntimeError, match="block 0"):
        BlockPool(4, 1).release([RESERVED_BLOCK])


def test_a_pool_needs_a_usable_block() -> None:
    with pytest.raises(OptionError, match="1 blocks"):
        BlockPool(1, 16)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(2, 4).blocks_for(tokens) == blocks
