"""One cache and what runs on it: who starts, whose prompt goes on, who decodes, who gives way. No tensors.

A model has one replica, or several that share a queue and compute their parts of each step at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeAlias

from msds.engine.block_pool import BlockPool
from msds.engine.ladder import next_chunk
from msds.engine.prefix_cache import PrefixCache
from msds.engine.schedule_types import S, ScheduledRow, SchedulerPolicy
from msds.engine.waiting_queue import Entry, WaitingQueue

MayStart: TypeAlias = Callable[[Entry[S], int], bool]
"""may_start(entry, uncomputed): whether a waiting sequence may start that has so many tokens to compute."""


class Replica(Generic[S]):
    """The blocks of one cache and the sequences that hold them. For the scheduler alone.

    index: its place among the replicas, which is written to sequences that start here. running: by id. last_prefill:
    the sequence whose turn it was in the last prefill step.
    """

    def __init__(self, index: int, pool: BlockPool, policy: SchedulerPolicy, waiting: WaitingQueue[S]) -> None:
        self.index = index
        self.pool = pool
        self.cache = PrefixCache(pool)
        self.running: dict[int, Entry[S]] = {}
        self.num_preemptions = 0
        self._policy = policy
        self._waiting = waiting
        self.last_prefill: Entry[S] | None = None

    def turn(self) -> tuple[Entry[S] | None, MayStart[S] | None]:
        """Whose chunk is next of those in prefill, and who may start and go before it; None: nobody.

        It is the first in rank, but after a chunk of a long one it may be another's turn.
        """
        pending = sorted((entry for entry in self.running.values() if is_in_prefill(entry)), key=self._rank)
        if not pending:
            return None, lambda entry, uncomputed: True
        first, budget = pending[0], self._policy.max_chunk
        if first is not self.last_prefill or first.num_uncomputed <= budget:
            return first, None
        short = next((entry for entry in pending[1:] if entry.num_uncomputed <= budget), None)
        if short is not None:
            return short, None
        priority = first.sequence.priority
        return first, lambda entry, uncomputed: uncomputed <= budget or entry.sequence.priority < priority

    def start(self, starting: Mapping[Replica[S], MayStart[S]], most: int | None) -> Entry[S] | None:
        """Start the first waiting sequence that can start here, and in no replica for less; None where none can.

        starting: the replicas that start sequences now, this among them, and who may start there. most: how many of
        the queue are looked at, None for as many as it shows.
        """
        if len(self.running) >= self._policy.max_num_seqs:
            return None
        spare = self._spare()
        for entry in self._waiting.candidates()[:most]:
            found = self._find_prefix(entry)
            cost = self._cost(entry, found, starting[self], spare)
            if cost is not None and not any(
                replica._takes_for_less(entry, cost, may_start)
                for replica, may_start in starting.items()
                if replica is not self
            ):
                self._waiting.start(entry)
                self._occupy(entry, found)
                return entry
        return None

    def short_beside(self, first: Entry[S]) -> list[Entry[S]]:
        """The running sequences besides the first whose chunks may share its step, by rank."""
        running = (entry for entry in self.running.values() if entry is not first and is_in_prefill(entry))
        return [entry for entry in sorted(running, key=self._rank) if self.is_short(entry, entry.num_uncomputed)]

    def is_short(self, entry: Entry[S], uncomputed: int) -> bool:
        """Whether the next chunk of a sequence, with so many tokens to compute, may share a step."""
        shared, start = self._policy.shared, len(entry.sequence.token_ids) - uncomputed
        count = next_chunk(uncomputed, self._policy.chunk_sizes)
        return shared is not None and count <= shared.tokens and start + count <= shared.context

    def chunk(self, entry: Entry[S]) -> ScheduledRow[S]:
        """The next chunk of a sequence in prefill."""
        count = next_chunk(entry.num_uncomputed, self._policy.chunk_sizes)
        return ScheduledRow(entry.sequence, entry.sequence.num_computed, count, 0, count == entry.num_uncomputed)

    def decode(self) -> list[ScheduledRow[S]]:
        """All running sequences out of prefill, as far as there are blocks; drafts only where blocks are to spare."""
        growing = sorted((entry for entry in self.running.values() if not is_in_prefill(entry)), key=self._rank)
        for entry in growing:
            if entry.sequence.id in self.running:
                self._grow(entry)
        return [self._decode_row(entry) for entry in growing if entry.sequence.id in self.running]

    def register(self, entry: Entry[S]) -> None:
        """Let blocks that have become full be found by their content."""
        sequence = entry.sequence
        full = sequence.num_computed // self.pool.block_size
        for index in range(entry.num_registered, full):
            self.cache.register(entry.chain, sequence.token_ids, index, sequence.block_table[index])
        entry.num_registered = full

    def requeue(self, entry: Entry[S]) -> None:
        """Back to the queue, blocks released; full ones can be found again until they are needed."""
        del self.running[entry.sequence.id]
        self.release(entry)
        entry.sequence.num_computed = 0
        self._waiting.push(entry)

    def release(self, entry: Entry[S]) -> None:
        """Give up the blocks of a sequence."""
        self.pool.release(entry.sequence.block_table)
        entry.sequence.block_table = []

    def _takes_for_less(self, entry: Entry[S], cost: int, may_start: MayStart[S]) -> bool:
        """Whether a waiting sequence can start here now, for less."""
        if len(self.running) >= self._policy.max_num_seqs:
            return False
        own = self._cost(entry, self._find_prefix(entry), may_start, self._spare())
        return own is not None and own < cost

    def _cost(self, entry: Entry[S], found: Sequence[int], may_start: MayStart[S], spare: int) -> int | None:
        """Tokens that a sequence has to compute here, and those of the sequences it runs beside; None: it cannot start.

        `found` blocks hold its first tokens; `spare` available blocks have to be enough for the others.
        """
        uncomputed = len(entry.sequence.token_ids) - len(found) * self.pool.block_size
        fresh = self.pool.blocks_for(self._slots_to_start(entry)) - len(found)
        taken = fresh + sum(self.pool.is_cached(block) for block in found)  # of the found ones some are available too
        if not may_start(entry, uncomputed) or taken > spare:
            return None
        return uncomputed + sum(len(other.sequence.token_ids) for other in self.running.values())

    def _find_prefix(self, entry: Entry[S]) -> list[int]:
        sequence = entry.sequence
        may_reuse = self._policy.prefix_cache and sequence.allow_prefix_reuse
        return self.cache.lookup(entry.chain, sequence.token_ids) if may_reuse else []

    def _slots_to_start(self, entry: Entry[S]) -> int:
        """Slots for all tokens and for the one that follows, so that it is not preempted before it is computed."""
        return min(len(entry.sequence.token_ids) + 1, entry.max_slots)

    def _spare(self) -> int:
        """Available blocks, less one in reserve for each running sequence that may yet need one more."""
        growing = sum(
            len(entry.sequence.block_table) < self.pool.blocks_for(entry.max_slots) for entry in self.running.values()
        )
        return self.pool.num_available - growing

    def _occupy(self, entry: Entry[S], found: list[int]) -> None:
        sequence = entry.sequence
        self.pool.share(found)  # before allocating, which may evict them
        fresh = self.pool.blocks_for(self._slots_to_start(entry)) - len(found)
        sequence.replica = self.index
        sequence.block_table = found + self.pool.allocate(fresh)
        sequence.num_computed = len(found) * self.pool.block_size
        entry.num_registered = len(found)
        self.running[sequence.id] = entry
        if not entry.has_started:
            entry.has_started = True
            sequence.num_cached_tokens = sequence.num_computed
            if sequence.allow_prefix_reuse:
                self.cache.record(queried=len(sequence.token_ids), hit=sequence.num_computed)

    def _grow(self, entry: Entry[S]) -> None:
        """Blocks for all tokens of a sequence; the last in rank give up theirs, itself perhaps among them."""
        length = len(entry.sequence.token_ids)
        if length > entry.max_slots:
            raise RuntimeError(
                f"sequence {entry.sequence.id} has {length} tokens, and max_total_tokens is "
                f"{entry.sequence.max_total_tokens}: it should have been finished"
            )
        missing = self.pool.blocks_for(length) - len(entry.sequence.block_table)
        while missing > self.pool.num_available:
            victim = max(self.running.values(), key=self._rank)
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.requeue(victim)
            if victim is entry:
                return
        entry.sequence.block_table.extend(self.pool.allocate(max(0, missing)))

    def _decode_row(self, entry: Entry[S]) -> ScheduledRow[S]:
        sequence = entry.sequence
        table, length, uncomputed = sequence.block_table, len(sequence.token_ids), entry.num_uncomputed
        drafts = max(0, min(1 + sequence.num_lookahead - uncomputed, entry.max_slots - length))
        missing = self.pool.blocks_for(length + drafts) - len(table)
        table.extend(self.pool.allocate(max(0, min(missing, self.pool.num_available))))
        drafts = min(drafts, len(table) * self.pool.block_size - length)
        return ScheduledRow(sequence, sequence.num_computed, uncomputed, drafts, True)

    def _rank(self, entry: Entry[S]) -> tuple[int, int, int]:
        """Who keeps blocks before whom, least first: often preempted ones by arrival, then priority and arrival."""
        if entry.num_preemptions >= self._policy.max_preemptions:
            return 0, 0, entry.arrival
        return 1, entry.sequence.priority, entry.arrival


def is_in_prefill(entry: Entry[S]) -> bool:
    """Whether more is to be computed than a decode step holds, or logits of every prompt token are wanted."""
    sequence = entry.sequence
    wants_prompt = not sequence.allow_prefix_reuse and sequence.num_computed < sequence.num_prompt
    return wants_prompt or entry.num_uncomputed > 1 + sequence.num_lookahead
