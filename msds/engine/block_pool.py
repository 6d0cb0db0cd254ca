"""Which cache blocks are free, which are referenced and by how many, and which are kept for reuse. No tensors."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from msds.errors import OptionError

RESERVED_BLOCK = 0
"""Padding tokens write here and nothing reads it, so that no negative index ever reaches a graph."""


class BlockPool:
    """A fixed number of equal blocks; block 0 is reserved. Free + referenced + cached = total - 1, always.

    A block is free, or referenced by one or more tables, or cached: nobody refers to it, but its content is kept
    until the block is needed. Free blocks are handed out oldest-freed first, so that a use-after-free in a step
    shows up late and rarely overwrites what is still looked at; cached ones follow, least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise OptionError(f"the cache has {num_blocks} blocks: it needs at least 2, because block 0 is reserved")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._forget: dict[int, Callable[[int], None]] = {}  # of every kept block, referenced or not
        self._evictable: OrderedDict[int, None] = OrderedDict()  # kept, unreferenced; least recently used first

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold, whatever they are now."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without content of use to anyone."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody refers to, kept for reuse until they are needed."""
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_referenced(self) -> int:
        """Blocks in at least one table."""
        return self.num_usable - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def references(self, block: int) -> int:
        """How many tables hold this block."""
        return self._references[block]

    def is_kept(self, block: int) -> bool:
        """Whether the block's content is registered for reuse, and so must not be written."""
        return block in self._forget

    def is_cached(self, block: int) -> bool:
        """Whether the block is kept and nobody refers to it: sharing it makes one block less available."""
        return block in self._evictable

    def allocate(self, count: int) -> list[int]:
        """`count` block ids with one reference each and no content, evicting cached ones where free ones run out.

        The caller has compared with `num_available`; RuntimeError otherwise, and then nothing has changed.
        """
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks asked for, {self.num_available} available: the scheduler did not check")
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these kept or referenced blocks. RuntimeError for any other block."""
        for block in blocks:
            if self._references[block] == 0 and block not in self._evictable:
                raise RuntimeError(f"block {block} is shared, but it is free: its content may be overwritten")
            self._evictable.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each; the last one given up frees the block, or caches it where it is kept.

        The end of the table counts as used longest ago, because a block is of use only after all before it.
        RuntimeError for a block without references.
        """
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise RuntimeError(f"block {block} is released but not in use")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._forget:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int, forget: Callable[[int], None]) -> None:
        """From now on the content of a referenced block outlives its references; `forget(block)` ends that.

        RuntimeError for a block that is kept already or that nobody refers to.
        """
        if self._references[block] == 0 or block in self._forget:
            raise RuntimeError(f"block {block} cannot be kept: it has {self._references[block]} references")
        self._forget[block] = forget

    def discard(self, block: int) -> None:
        """The content of a kept block is of no more use: it is free now, or when its last reference goes."""
        self._forget.pop(block)(block)
        if block in self._evictable:
            del self._evictable[block]
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._forget.pop(block)(block)
        return block
