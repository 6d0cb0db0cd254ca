"""Decides what each step computes: who starts, whose prompt goes on, who decodes, who gives way. No tensors.

One rule for all sequences: a step computes tokens [num_computed, num_computed + q); when it reaches the last token,
the next one is sampled. A sequence with more to compute than a decode step holds is in prefill. Preemption sets
num_computed back, so a recomputation is a prefill over prompt and output and changes no token.

Why nothing waits for ever:
- Starting: see `WaitingQueue`. A sequence starts when there are blocks for all its tokens and the one after, and one
  more for each running sequence that may yet grow; alone it always starts, because `add` refused what never fits.
- Computing: prefill and decode steps alternate while there is work for both, so decode waits for one chunk at most.
  Of two prefill steps one at least is that of the sequence whose turn it is; the other may be a short one's. Where
  that is a short chunk, those of others share its step, which pads to several rows anyway: they take nobody's turn,
  and those that start for it are the first in the queue, so that nobody is overtaken for the sake of sharing.
- Finishing: the sequence first in `_rank` is never preempted, and it may take the blocks of all others. Those
  preempted `max_preemptions` times rank before all others, by arrival, so each comes first some day.

Why no shared block is written: a step writes slots from num_computed on. Kept and shared blocks are full blocks
before it; all others in a table were allocated for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from msds.engine.block_pool import BlockPool
from msds.engine.ladder import next_chunk
from msds.engine.prefix_cache import PrefixCache
from msds.engine.schedule_types import (
    DecodeStep,
    PrefillStep,
    QueueFullError,
    S,
    ScheduledRow,
    SchedulerPolicy,
    SchedulerStats,
    Step,
)
from msds.engine.waiting_queue import Entry, WaitingQueue
from msds.errors import OptionError


class Scheduler(Generic[S]):
    """Owns the blocks and the order of work. Deterministic: the same calls give the same steps. Used by one thread.

    The cycle is `schedule`, run the step, append the sampled tokens, `commit` (or `fail`), `finish` for sequences
    that have ended. One step is out at a time; `add`, `abort` and `expire` are allowed while it runs.
    """

    def __init__(self, pool: BlockPool, policy: SchedulerPolicy) -> None:
        self.policy = policy
        self._pool = pool
        self._cache = PrefixCache(pool)
        self._entries: dict[int, Entry[S]] = {}  # all that are known, by id, in order of arrival
        self._waiting: WaitingQueue[S] = WaitingQueue(policy.max_overtakes)
        self._running: dict[int, Entry[S]] = {}
        self._step: Step[S] | None = None
        self._step_entries: list[Entry[S]] = []
        self._lengths: list[int] = []  # tokens of each row's sequence when the step was scheduled
        self._prefilled_last = False
        self._last_prefill: Entry[S] | None = None
        self._num_arrivals = 0
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether `schedule` has or will have something to run."""
        return bool(self._entries)

    @property
    def stats(self) -> SchedulerStats:
        """Gauges and counters now."""
        return SchedulerStats(
            waiting=len(self._waiting),
            running=len(self._running),
            preemptions=self._num_preemptions,
            free_blocks=self._pool.num_free,
            referenced_blocks=self._pool.num_referenced,
            cached_blocks=self._pool.num_cached,
            prefix_tokens_queried=self._cache.tokens_queried,
            prefix_tokens_hit=self._cache.tokens_hit,
        )

    def add(self, sequences: Sequence[S]) -> None:
        """Queue the sequences of one request, all or none.

        OptionError for what can never be served, QueueFullError for what cannot be queued now, both with the numbers.
        """
        most = self.policy.max_waiting
        if most is not None and len(sequences) > most:
            raise OptionError(
                f"the request asks for {len(sequences)} sequences, but at most {most} may wait: ask for fewer"
            )
        if most is not None and len(self._waiting) + len(sequences) > most:
            raise QueueFullError(len(sequences), len(self._waiting), most)
        ids = [sequence.id for sequence in sequences]
        if len(set(ids)) < len(ids) or not self._entries.keys().isdisjoint(ids):
            raise RuntimeError(f"sequences {ids}: each needs an id of its own")
        slots = [self._check_fits(sequence) for sequence in sequences]
        for sequence, max_slots in zip(sequences, slots, strict=True):
            entry = Entry(sequence, self._num_arrivals, max_slots, self._cache.chain(sequence.cache_salt))
            self._num_arrivals += 1
            self._entries[sequence.id] = entry
            self._waiting.push(entry)

    def schedule(self) -> Step[S] | None:
        """The next step, or None when there is nothing to do. RuntimeError while a step is out."""
        self._require_no_step()
        step: Step[S] | None = self._schedule_decode() if self._prefilled_last else None
        step = step or self._schedule_prefill() or self._schedule_decode()
        if step is not None:
            self._prefilled_last = isinstance(step, PrefillStep)
            self._step = step
            self._step_entries = [self._running[row.sequence.id] for row in step.rows]
            self._lengths = [len(row.sequence.token_ids) for row in step.rows]
        return step

    def commit(self, step: Step[S]) -> None:
        """The step ran, and accepted tokens are appended to its sequences: count them, and keep full blocks.

        A row that samples may have brought up to 1 + num_drafts tokens (accepted drafts, then a sampled one), others
        none; RuntimeError otherwise, and then the step is still out. What counts as computed stops before the last
        token, whose logits come next.
        """
        grown = self._grown(step)
        for row, entry, num_new in zip(step.rows, self._close(step), grown, strict=True):
            if entry.is_aborted:
                self._release(entry)
                continue
            row.sequence.num_computed = min(row.end + num_new, len(row.sequence.token_ids) - 1)
            self._register(entry)

    def fail(self, step: Step[S]) -> None:
        """The step raised: its sequences are dropped, and nothing that their blocks hold is used again."""
        for entry in self._close(step):
            self._cache.drop(entry.sequence.block_table)
            self._forget(entry)
            self._release(entry)

    def finish(self, sequence_id: int) -> None:
        """A sequence has ended, after `commit`; its full blocks stay cached. RuntimeError when it is not known."""
        if sequence_id not in self._entries:
            raise RuntimeError(f"sequence {sequence_id} is finished but not known")
        self.abort(sequence_id)

    def abort(self, sequence_id: int) -> bool:
        """Drop a sequence in whatever state it is; False when it is not known (any more).

        While it is part of a step, its blocks stay its own until `commit` or `fail`, because the step writes them.
        """
        entry = self._entries.get(sequence_id)
        if entry is None:
            return False
        if sequence_id not in self._running:
            self._waiting.remove(entry)
        self._forget(entry)
        entry.is_aborted = True
        if entry not in self._step_entries:
            self._release(entry)
        return True

    def expire(self, now: float) -> list[int]:
        """Abort the sequences whose deadline is `now` or earlier, in whatever state; their ids, by arrival."""
        expired = [
            id_
            for id_, entry in self._entries.items()
            if entry.sequence.deadline is not None and entry.sequence.deadline <= now
        ]
        for id_ in expired:
            self.abort(id_)
        return expired

    def invalidate(self) -> None:
        """Weights have changed: all sequences start again over their tokens, and no block computed before is reused.

        RuntimeError while a step is out.
        """
        self._require_no_step()
        for entry in list(self._running.values()):
            self._requeue(entry)
        self._cache.clear()
        for entry in self._entries.values():
            entry.chain = self._cache.chain(entry.sequence.cache_salt)

    def _check_fits(self, sequence: S) -> int:
        """Most slots the sequence will use; the last of its tokens needs none. OptionError when there are too few."""
        length = len(sequence.token_ids)
        if length == 0:
            raise RuntimeError(f"sequence {sequence.id} has no tokens")
        max_slots = max(length, sequence.max_total_tokens - 1)
        needed = self._pool.blocks_for(max_slots)
        if needed > self._pool.num_usable:
            raise OptionError(
                f"a prompt of {sequence.num_prompt} tokens with {sequence.max_total_tokens - sequence.num_prompt} to "
                f"generate needs {needed} cache blocks of {self._pool.block_size} tokens, but the cache has "
                f"{self._pool.num_usable}: shorten the prompt, lower max_tokens, or give the cache more memory"
            )
        return max_slots

    def _schedule_prefill(self) -> PrefillStep[S] | None:
        entry = self._next_prefill()
        if entry is None:
            return None
        self._last_prefill = entry
        return PrefillStep(tuple(self._chunk(one) for one in self._join(entry)))

    def _chunk(self, entry: Entry[S]) -> ScheduledRow[S]:
        count = next_chunk(entry.num_uncomputed, self.policy.chunk_sizes)
        return ScheduledRow(entry.sequence, entry.sequence.num_computed, count, 0, count == entry.num_uncomputed)

    def _join(self, first: Entry[S]) -> list[Entry[S]]:
        """The first and those whose short chunks share its step: running ones by rank, then the queue in its order."""
        shared = self.policy.shared
        if shared is None or not self._is_short(first, first.num_uncomputed):
            return [first]
        running = (entry for entry in self._running.values() if entry is not first and _in_prefill(entry))
        found = [entry for entry in sorted(running, key=self._rank) if self._is_short(entry, entry.num_uncomputed)]
        found = [first, *found]
        while len(found) < max(shared.rows) and (entry := self._start(self._is_short, most=1)) is not None:
            found.append(entry)
        return found[: shared.count_together(len(found))]

    def _is_short(self, entry: Entry[S], uncomputed: int) -> bool:
        """Whether the next chunk of a sequence, with so many tokens to compute, may share a step."""
        shared, start = self.policy.shared, len(entry.sequence.token_ids) - uncomputed
        count = next_chunk(uncomputed, self.policy.chunk_sizes)
        return shared is not None and count <= shared.tokens and start + count <= shared.context

    def _next_prefill(self) -> Entry[S] | None:
        """Whose chunk is next: the first in rank, but after a chunk of a long one it may be another's turn."""
        pending = sorted((entry for entry in self._running.values() if _in_prefill(entry)), key=self._rank)
        if not pending:
            return self._start(lambda entry, uncomputed: True)
        first, budget = pending[0], self.policy.max_chunk
        if first is not self._last_prefill or first.num_uncomputed <= budget:
            return first
        short = next((entry for entry in pending[1:] if entry.num_uncomputed <= budget), None)
        priority = first.sequence.priority
        return (
            short
            or self._start(lambda entry, uncomputed: uncomputed <= budget or entry.sequence.priority < priority)
            or first
        )

    def _start(self, may_start: Callable[[Entry[S], int], bool], most: int | None = None) -> Entry[S] | None:
        """Start waiting sequences until one needs a prefill step; that one, or None.

        `may_start(entry, uncomputed)`: whether to start one with so many tokens to compute. `most`: how many of the
        queue are looked at, None for as many as it shows.
        """
        while len(self._running) < self.policy.max_num_seqs:
            spare = self._pool.num_available - self._num_growing()
            for entry in self._waiting.candidates()[:most]:
                found = self._find_prefix(entry)
                uncomputed = len(entry.sequence.token_ids) - len(found) * self._pool.block_size
                if may_start(entry, uncomputed) and self._fits(entry, found, spare):
                    break
            else:
                return None
            self._waiting.start(entry)
            self._occupy(entry, found)
            if _in_prefill(entry):
                return entry
        return None

    def _find_prefix(self, entry: Entry[S]) -> list[int]:
        sequence = entry.sequence
        may_reuse = self.policy.prefix_cache and sequence.allow_prefix_reuse
        return self._cache.lookup(entry.chain, sequence.token_ids) if may_reuse else []

    def _slots_to_start(self, entry: Entry[S]) -> int:
        """Slots for all tokens and for the one that follows, so that it is not preempted before it is computed."""
        return min(len(entry.sequence.token_ids) + 1, entry.max_slots)

    def _num_growing(self) -> int:
        """Running sequences that may need one more block: each has one in reserve while others start."""
        return sum(
            len(entry.sequence.block_table) < self._pool.blocks_for(entry.max_slots) for entry in self._running.values()
        )

    def _fits(self, entry: Entry[S], found: Sequence[int], spare: int) -> bool:
        """Whether `spare` available blocks are enough besides the `found` ones, some of which are available too."""
        fresh = self._pool.blocks_for(self._slots_to_start(entry)) - len(found)
        return fresh + sum(self._pool.is_cached(block) for block in found) <= spare

    def _occupy(self, entry: Entry[S], found: list[int]) -> None:
        sequence = entry.sequence
        self._pool.share(found)  # before allocating, which may evict them
        fresh = self._pool.blocks_for(self._slots_to_start(entry)) - len(found)
        sequence.block_table = found + self._pool.allocate(fresh)
        sequence.num_computed = len(found) * self._pool.block_size
        entry.num_registered = len(found)
        self._running[sequence.id] = entry
        if not entry.has_started:
            entry.has_started = True
            sequence.num_cached_tokens = sequence.num_computed
            if sequence.allow_prefix_reuse:
                self._cache.record(queried=len(sequence.token_ids), hit=sequence.num_computed)

    def _schedule_decode(self) -> DecodeStep[S] | None:
        """All running sequences out of prefill, as far as there are blocks; drafts only where blocks are to spare."""
        growing = sorted((entry for entry in self._running.values() if not _in_prefill(entry)), key=self._rank)
        for entry in growing:
            if entry.sequence.id in self._running:
                self._grow(entry)
        rows = [self._decode_row(entry) for entry in growing if entry.sequence.id in self._running]
        return DecodeStep(tuple(rows)) if rows else None

    def _grow(self, entry: Entry[S]) -> None:
        """Blocks for all tokens of a sequence; the last in rank give up theirs, itself perhaps among them."""
        length = len(entry.sequence.token_ids)
        if length > entry.max_slots:
            raise RuntimeError(
                f"sequence {entry.sequence.id} has {length} tokens, and max_total_tokens is "
                f"{entry.sequence.max_total_tokens}: it should have been finished"
            )
        missing = self._pool.blocks_for(length) - len(entry.sequence.block_table)
        while missing > self._pool.num_available:
            victim = max(self._running.values(), key=self._rank)
            victim.num_preemptions += 1
            self._num_preemptions += 1
            self._requeue(victim)
            if victim is entry:
                return
        entry.sequence.block_table.extend(self._pool.allocate(max(0, missing)))

    def _decode_row(self, entry: Entry[S]) -> ScheduledRow[S]:
        sequence = entry.sequence
        table, length, uncomputed = sequence.block_table, len(sequence.token_ids), entry.num_uncomputed
        drafts = max(0, min(1 + sequence.num_lookahead - uncomputed, entry.max_slots - length))
        missing = self._pool.blocks_for(length + drafts) - len(table)
        table.extend(self._pool.allocate(max(0, min(missing, self._pool.num_available))))
        drafts = min(drafts, len(table) * self._pool.block_size - length)
        return ScheduledRow(sequence, sequence.num_computed, uncomputed, drafts, True)

    def _rank(self, entry: Entry[S]) -> tuple[int, int, int]:
        """Who keeps blocks before whom, least first: often preempted ones by arrival, then priority and arrival."""
        if entry.num_preemptions >= self.policy.max_preemptions:
            return 0, 0, entry.arrival
        return 1, entry.sequence.priority, entry.arrival

    def _register(self, entry: Entry[S]) -> None:
        sequence = entry.sequence
        full = sequence.num_computed // self._pool.block_size
        for index in range(entry.num_registered, full):
            self._cache.register(entry.chain, sequence.token_ids, index, sequence.block_table[index])
        entry.num_registered = full

    def _requeue(self, entry: Entry[S]) -> None:
        """Back to the queue, blocks released; full ones can be found again until they are needed."""
        del self._running[entry.sequence.id]
        self._release(entry)
        entry.sequence.num_computed = 0
        self._waiting.push(entry)

    def _release(self, entry: Entry[S]) -> None:
        self._pool.release(entry.sequence.block_table)
        entry.sequence.block_table = []

    def _forget(self, entry: Entry[S]) -> None:
        self._entries.pop(entry.sequence.id, None)
        self._running.pop(entry.sequence.id, None)

    def _grown(self, step: Step[S]) -> list[int]:
        """By how many tokens the sequence of each row has grown in this step."""
        self._require_out(step)
        grown = [len(row.sequence.token_ids) - n for row, n in zip(step.rows, self._lengths, strict=True)]
        for row, entry, num_new in zip(step.rows, self._step_entries, grown, strict=True):
            most = 1 + row.num_drafts if row.samples else 0
            if not entry.is_aborted and not 0 <= num_new <= most:
                raise RuntimeError(f"sequence {row.sequence.id} grew by {num_new} tokens in a step for 0 to {most}")
        return grown

    def _close(self, step: Step[S]) -> list[Entry[S]]:
        """The step is out no longer; the entries of its rows."""
        self._require_out(step)
        entries, self._step, self._step_entries, self._lengths = self._step_entries, None, [], []
        return entries

    def _require_out(self, step: Step[S]) -> None:
        if step is not self._step:
            raise RuntimeError("this step is not out: each is committed or failed once, before the next is scheduled")

    def _require_no_step(self) -> None:
        if self._step is not None:
            raise RuntimeError("a step is out: commit it or fail it first")


def _in_prefill(entry: Entry[S]) -> bool:
    """Whether more is to be computed than a decode step holds, or logits of every prompt token are wanted."""
    sequence = entry.sequence
    wants_prompt = not sequence.allow_prefix_reuse and sequence.num_computed < sequence.num_prompt
    return wants_prompt or entry.num_uncomputed > 1 + sequence.num_lookahead
