"""Finds cache blocks that already hold what a sequence begins with. No tensors.

What a block holds depends on all tokens up to its end, so it is known by a digest of the digest before it and its
own tokens. The first digest stands on a salt: whatever else decides the content (model, options, adapter) and how
often the cache has been cleared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from msds.engine.block_pool import BlockPool

DIGEST_BYTES = 32  # no two token chains share a digest, even when someone looks for such a pair


class BlockChain:
    """Digests of the full blocks of one sequence, computed when first asked for. Its tokens only ever grow."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._block_size = block_size
        self._digests = [root]

    def digest(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Digest of block `index`, which the first tokens of `token_ids` fill."""
        size = self._block_size
        for block in range(len(self._digests) - 1, index + 1):
            tokens = array("q", token_ids[block * size : (block + 1) * size])
            if len(tokens) < size:
                raise RuntimeError(f"block {block} of {size} tokens is not full: the sequence has {len(token_ids)}")
            state = hashlib.blake2b(self._digests[-1], digest_size=DIGEST_BYTES, person=b"msds block")
            state.update(tokens.tobytes())
            self._digests.append(state.digest())
        return self._digests[index + 1]


class PrefixCache:
    """Kept blocks by digest. A block enters when it is full and computed, and leaves when the pool needs it.

    tokens_queried, tokens_hit: tokens of the sequences that asked, and those of them that need no computing.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._generation = 0
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.tokens_queried = 0
        self.tokens_hit = 0

    def __len__(self) -> int:
        """Blocks that a lookup can find, referenced or not."""
        return len(self._block_of)

    def chain(self, salt: bytes) -> BlockChain:
        """The digests of a sequence whose content depends on `salt` besides its tokens; void after `clear`."""
        root = hashlib.blake2b(self._generation.to_bytes(8, "little"), digest_size=DIGEST_BYTES, person=b"msds root")
        root.update(salt)
        return BlockChain(root.digest(), self._pool.block_size)

    def lookup(self, chain: BlockChain, token_ids: Sequence[int]) -> list[int]:
        """The longest run of kept blocks that `token_ids` begins with, never all of it; no reference is taken.

        At least the last token stays uncomputed, because its logits are wanted, and so its block is not shared.
        """
        blocks = []
        for index in range((len(token_ids) - 1) // self._pool.block_size):
            block = self._block_of.get(chain.digest(index, token_ids))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, chain: BlockChain, token_ids: Sequence[int], index: int, block: int) -> None:
        """`block`, which the caller holds, is full and computed: block `index` of `token_ids`.

        Where equal content is kept already, that one stays and counts as used now; `block` remains the caller's own.
        """
        digest = chain.digest(index, token_ids)
        known = self._block_of.get(digest)
        if known is not None:
            self._pool.share([known])
            self._pool.release([known])
            return
        self._block_of[digest] = block
        self._digest_of[block] = digest
        self._pool.keep(block, self._forget)

    def record(self, *, queried: int, hit: int) -> None:
        """Count one lookup that was used: tokens of the sequence, and tokens found."""
        self.tokens_queried += queried
        self.tokens_hit += hit

    def drop(self, blocks: Sequence[int]) -> None:
        """What these blocks hold is not to be trusted; those of them that are kept are no longer found."""
        for block in blocks:
            if block in self._digest_of:
                self._pool.discard(block)

    def clear(self) -> None:
        """Forget everything, for good: chains made before find and register nothing that later ones can find."""
        self._generation += 1
        self.drop(list(self._digest_of))

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
