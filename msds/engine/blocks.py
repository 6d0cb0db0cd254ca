"""Host-side bookkeeping of cache blocks: which are free, which belong to whom. No tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msds.errors import OptionError

RESERVED_BLOCK = 0
"""Padding tokens write here and nothing reads it, so that no negative index ever reaches a graph."""


class BlockPool:
    """A fixed number of equal blocks; block 0 is reserved. Invariant: free + used = total - 1.

    Blocks are handed out oldest-freed first, so that a use-after-free in a step function shows up late and rarely
    overwrites data that is still being looked at.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise OptionError(f"the cache has {num_blocks} blocks: it needs at least 2, because block 0 is reserved")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, num_blocks))
        self._used: set[int] = set()

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold, free or not."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` block ids, now used. The caller has compared with `num_free`; RuntimeError otherwise."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free: the scheduler did not check")
        blocks = tuple(self._free.popleft() for _ in range(count))
        self._used.update(blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. RuntimeError for one that is not used: it would be shared by two sequences."""
        for block in blocks:
            if block not in self._used:
                raise RuntimeError(f"block {block} is released but not in use")
            self._used.remove(block)
            self._free.append(block)
