"""Decides what each step computes: who starts, whose prompt goes on, who decodes, who gives way. No tensors.

One rule for all sequences: a step computes tokens [num_computed, num_computed + q); when it reaches the last token,
the next one is sampled. A sequence with more to compute than a decode step holds is in prefill. Preemption sets
num_computed back, so a recomputation is a prefill over prompt and output and changes no token.

Replicas of a model have a cache each, and compute steps of one kind and shape together. They share the queue: a
sequence starts where it fits and costs least, which is tokens to compute, less where its prefix is cached, and the
tokens of those that run there. One that was preempted may start again in another replica. A prefill step has one chunk
of each replica, and more only where all replicas have short ones, because the shape is that of the longest.

Why nothing waits for ever:
- Starting: see `WaitingQueue`. A sequence starts when there are blocks for all its tokens and the one after, and one
  more for each running sequence that may yet grow; alone it always starts, because `add` refused what never fits. A
  replica leaves it to another only if that is to start some now, and can start this one.
- Computing: prefill and decode steps alternate while there is work for both, so decode waits for one chunk at most.
  Of two prefill steps of a replica one at least is that of the sequence whose turn it is; the other may be a short
  one's. Where that is a short chunk, those of others share its step, which pads to several rows anyway: they take
  nobody's turn, and those that start for it are the first in the queue, so that nobody is overtaken for the sake of
  sharing.
- Finishing: the sequence first in a replica's `_rank` is never preempted, and it may take the blocks of all others
  there. Those preempted `max_preemptions` times rank before all others, by arrival, so each comes first some day.

Why no shared block is written: a step writes slots from num_computed on. Kept and shared blocks are full blocks
before it; all others in a table were allocated for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic

from msds.engine.block_pool import BlockPool
from msds.engine.replica import MayStart, Replica, is_in_prefill
from msds.engine.schedule_types import (
    DecodeStep,
    PrefillStep,
    QueueFullError,
    S,
    SchedulerPolicy,
    SchedulerStats,
    Step,
)
from msds.engine.waiting_queue import Entry, WaitingQueue
from msds.errors import OptionError


class Scheduler(Generic[S]):
    """Owns the blocks and the order of work. Deterministic: the same calls give the same steps. Used by one thread.

    pools: the blocks of each replica, of one size; one for most models. The cycle is `schedule`, run the step, append
    the sampled tokens, `commit` (or `fail`), `finish` for sequences that have ended. One step is out at a time; `add`,
    `abort` and `expire` are allowed while it runs.
    """

    def __init__(self, pools: Sequence[BlockPool], policy: SchedulerPolicy) -> None:
        self.policy = policy
        self._entries: dict[int, Entry[S]] = {}  # all that are known, by id, in order of arrival
        self._waiting: WaitingQueue[S] = WaitingQueue(policy.max_overtakes)
        self._replicas = [Replica(index, pool, policy, self._waiting) for index, pool in enumerate(pools)]
        self._step: Step[S] | None = None
        self._step_entries: list[Entry[S]] = []
        self._lengths: list[int] = []  # tokens of each row's sequence when the step was scheduled
        self._prefilled_last = False
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether `schedule` has or will have something to run."""
        return bool(self._entries)

    @property
    def stats(self) -> SchedulerStats:
        """Gauges and counters now, of all replicas together."""
        replicas = self._replicas
        return SchedulerStats(
            waiting=len(self._waiting),
            running=sum(len(replica.running) for replica in replicas),
            preemptions=sum(replica.num_preemptions for replica in replicas),
            free_blocks=sum(replica.pool.num_free for replica in replicas),
            referenced_blocks=sum(replica.pool.num_referenced for replica in replicas),
            cached_blocks=sum(replica.pool.num_cached for replica in replicas),
            prefix_tokens_queried=sum(replica.cache.tokens_queried for replica in replicas),
            prefix_tokens_hit=sum(replica.cache.tokens_hit for replica in replicas),
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
            chain = self._replicas[0].cache.chain(sequence.cache_salt)  # digests are the same in all replicas
            entry = Entry(sequence, self._num_arrivals, max_slots, chain)
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
            self._step_entries = [self._entries[row.sequence.id] for row in step.rows]
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
                self._replica_of(entry).release(entry)
                continue
            row.sequence.num_computed = min(row.end + num_new, len(row.sequence.token_ids) - 1)
            self._replica_of(entry).register(entry)

    def fail(self, step: Step[S]) -> None:
        """The step raised: its sequences are dropped, and nothing that their blocks hold is used again."""
        for entry in self._close(step):
            self._replica_of(entry).cache.drop(entry.sequence.block_table)
            self._forget(entry)
            self._replica_of(entry).release(entry)

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
        if sequence_id not in self._replica_of(entry).running:
            self._waiting.remove(entry)
        self._forget(entry)
        entry.is_aborted = True
        if entry not in self._step_entries:
            self._replica_of(entry).release(entry)
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
        for replica in self._replicas:
            for entry in list(replica.running.values()):
                replica.requeue(entry)
            replica.cache.clear()
        for entry in self._entries.values():
            entry.chain = self._replicas[0].cache.chain(entry.sequence.cache_salt)

    def _check_fits(self, sequence: S) -> int:
        """Most slots the sequence will use; the last of its tokens needs none. OptionError when there are too few."""
        pool, length = self._replicas[0].pool, len(sequence.token_ids)
        if length == 0:
            raise RuntimeError(f"sequence {sequence.id} has no tokens")
        max_slots = max(length, sequence.max_total_tokens - 1)
        needed = pool.blocks_for(max_slots)
        if needed > pool.num_usable:
            raise OptionError(
                f"a prompt of {sequence.num_prompt} tokens with {sequence.max_total_tokens - sequence.num_prompt} to "
                f"generate needs {needed} cache blocks of {pool.block_size} tokens, but the cache has "
                f"{pool.num_usable}: shorten the prompt, lower max_tokens, or give the cache more memory"
            )
        return max_slots

    def _schedule_prefill(self) -> PrefillStep[S] | None:
        """A chunk of each replica that has one, or several where all of them are short."""
        chosen: dict[Replica[S], list[Entry[S]]] = {}
        starting: dict[Replica[S], MayStart[S]] = {}
        for replica in self._replicas:
            entry, may_start = replica.turn()
            chosen[replica] = [entry] if entry is not None else []
            if may_start is not None:
                starting[replica] = may_start
        for replica, entry in self._start(starting):
            chosen[replica] = [entry]
            del starting[replica]
        chosen = {replica: entries for replica, entries in chosen.items() if entries}
        for replica, (entry,) in chosen.items():
            replica.last_prefill = entry
        if all(replica.is_short(entry, entry.num_uncomputed) for replica, (entry,) in chosen.items()):
            self._join(chosen)
        rows = tuple(replica.chunk(entry) for replica, entries in chosen.items() for entry in entries)
        return PrefillStep(rows) if rows else None

    def _join(self, chosen: Mapping[Replica[S], list[Entry[S]]]) -> None:
        """Add those whose short chunks share the step: running ones by rank, then the queue in its order."""
        shared = self.policy.shared
        if shared is None:
            return
        most = max(shared.rows)
        for replica, entries in chosen.items():
            entries += replica.short_beside(entries[0])
        starting = {replica: replica.is_short for replica, entries in chosen.items() if len(entries) < most}
        for replica, entry in self._start(starting, most=1):
            chosen[replica].append(entry)
            if len(chosen[replica]) == most:
                del starting[replica]
        together = max((shared.count_together(len(entries)) for entries in chosen.values()), default=0)
        for entries in chosen.values():
            del entries[together:]

    def _start(
        self, starting: Mapping[Replica[S], MayStart[S]], most: int | None = None
    ) -> Iterator[tuple[Replica[S], Entry[S]]]:
        """Start waiting sequences, one of each replica in turn, until none can start; those that need a prefill step.

        starting: who may start where; a replica that is taken out starts no more. most: see `Replica.start`.
        """
        has_started = True
        while has_started:
            has_started = False
            for replica in list(starting):
                entry = replica.start(starting, most)
                has_started = has_started or entry is not None
                if entry is not None and is_in_prefill(entry):
                    yield replica, entry

    def _schedule_decode(self) -> DecodeStep[S] | None:
        rows = tuple(row for replica in self._replicas for row in replica.decode())
        return DecodeStep(rows) if rows else None

    def _replica_of(self, entry: Entry[S]) -> Replica[S]:
        """Where a sequence runs, or ran last."""
        return self._replicas[entry.sequence.replica]

    def _forget(self, entry: Entry[S]) -> None:
        self._entries.pop(entry.sequence.id, None)
        self._replica_of(entry).running.pop(entry.sequence.id, None)

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
