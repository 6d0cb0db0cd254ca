"""A device and an engine loop without numbers, around the real scheduler: it remembers what each cache slot holds.

What a slot should hold depends on weights, salt and all tokens up to its own, so it holds exactly that. Every step
is checked before it "runs": what it will read is right, and what it will write belongs to one sequence alone. That
finds leaks, aliases, writes to shared blocks and stale reuse, whatever causes them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from msds.engine.block_pool import BlockPool
from msds.engine.schedule_types import DecodeStep, PrefillStep, SchedulerPolicy, Step
from msds.engine.scheduler import Scheduler

GARBAGE = ("garbage",)


@dataclass(eq=False)
class FakeSequence:
    """A sequence as the scheduler wants it."""

    id: int
    token_ids: list[int]
    max_total_tokens: int
    num_lookahead: int = 0
    priority: int = 0
    deadline: float | None = None
    cache_salt: bytes = b""
    allow_prefix_reuse: bool = True
    num_computed: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    replica: int = 0
    num_prompt: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def num_left(self) -> int:
        return self.max_total_tokens - len(self.token_ids)


class World:
    """Sequences, the scheduler under test, and the slots of the device, or of one device per replica.

    pools: of all replicas; pool: the first, which is as large as the others.
    """

    def __init__(self, policy: SchedulerPolicy, *, num_blocks: int, block_size: int, num_replicas: int = 1) -> None:
        self.pools = [BlockPool(num_blocks, block_size) for _ in range(num_replicas)]
        self.pool = self.pools[0]
        self.scheduler: Scheduler[FakeSequence] = Scheduler(self.pools, policy)
        self.policy = policy
        self.live: dict[int, FakeSequence] = {}
        self.zombies: list[FakeSequence] = []  # aborted while a step is out: their blocks are written until it ends
        self.slots: dict[tuple[int, int], tuple[object, ...]] = {}
        self.weights = 0
        self.step: Step[FakeSequence] | None = None
        self.num_added = 0
        self.prefills_while_decoding = 0
        self.num_shared = 0

    def add(self, *sequences: FakeSequence) -> None:
        self.scheduler.add(sequences)
        self.live.update((sequence.id, sequence) for sequence in sequences)
        self.num_added += len(sequences)

    def new(self, tokens: list[int], max_tokens: int, **options: object) -> FakeSequence:
        """A sequence with the next id, not added yet."""
        return FakeSequence(self.num_added, list(tokens), len(tokens) + max_tokens, **options)  # type: ignore[arg-type]

    def content(self, sequence: FakeSequence, length: int) -> tuple[object, ...]:
        """What the slot of token `length - 1` has to hold."""
        return (self.weights, sequence.cache_salt, *sequence.token_ids[:length])

    def slot(self, sequence: FakeSequence, position: int) -> tuple[int, int]:
        size = self.pool.block_size
        return sequence.replica, sequence.block_table[position // size] * size + position % size

    def schedule(self) -> Step[FakeSequence] | None:
        """The next step, checked against what its rows and the device say."""
        assert self.step is None
        before = self._decoding()
        self.step = self.scheduler.schedule()
        if self.step is None:
            assert not self.live, "there is work, but no step"
            return None
        rows = self.step.rows
        assert len({row.sequence.id for row in rows}) == len(rows)
        for replica in range(len(self.pools)):
            running = [s for s in self.live.values() if s.block_table and s.replica == replica]
            assert len(running) <= self.policy.max_num_seqs
        for row in rows:
            self._check_row(row.sequence, row.start, row.num_tokens, row.num_drafts)
            assert row.samples == (row.end == len(row.sequence.token_ids))
        kept = {id_ for id_, table in self._decoding().items() if before.get(id_) is table}
        self._check_kind(kept)
        self.check()
        return self.step

    def _decoding(self) -> dict[int, list[int]]:
        """The tables of those that can decode; one that gives its blocks up and starts again has another table."""
        return {id_: s.block_table for id_, s in self.live.items() if s.block_table and not self.is_in_prefill(s)}

    def is_in_prefill(self, sequence: FakeSequence) -> bool:
        wants_prompt = not sequence.allow_prefix_reuse and sequence.num_computed < sequence.num_prompt
        return wants_prompt or len(sequence.token_ids) - sequence.num_computed > 1 + sequence.num_lookahead

    def _check_row(self, sequence: FakeSequence, start: int, num_tokens: int, num_drafts: int) -> None:
        assert self.live[sequence.id] is sequence
        assert start == sequence.num_computed < len(sequence.token_ids)
        assert num_tokens >= 1
        assert num_drafts >= 0
        assert len(sequence.token_ids) + num_drafts + 1 <= max(sequence.max_total_tokens, sequence.num_prompt + 1)
        for position in range(start):
            assert self.slots.get(self.slot(sequence, position)) == self.content(sequence, position + 1)
        for position in range(start, start + num_tokens + num_drafts):
            pool = self.pools[sequence.replica]
            block = sequence.block_table[position // pool.block_size]
            assert pool.references(block) == 1, f"position {position} is written to a shared block"
            assert not pool.is_kept(block), f"position {position} is written to a block kept for reuse"

    def _check_kind(self, decoding: set[int]) -> None:
        """Prefill steps keep to their budget and never follow each other while someone, of `decoding`, could decode."""
        if isinstance(self.step, PrefillStep):
            assert all(self.is_in_prefill(row.sequence) for row in self.step.rows)
            assert all(row.num_tokens <= self.policy.max_chunk for row in self.step.rows)
            self._check_shared(self.step)
            self.prefills_while_decoding = self.prefills_while_decoding + 1 if decoding else 0
            assert self.prefills_while_decoding <= 1
            return
        assert isinstance(self.step, DecodeStep)
        self.prefills_while_decoding = 0
        for row in self.step.rows:
            assert row.samples
            assert row.num_tokens + row.num_drafts <= 1 + row.sequence.num_lookahead
        assert {row.sequence.id for row in self.step.rows} == set(self._decoding()), "one could decode and was left out"

    def _check_shared(self, step: PrefillStep[FakeSequence]) -> None:
        """Several chunks of one replica are in a step only as the policy allows, and then all of it is short."""
        shared = self.policy.shared
        most = max(Counter(row.sequence.replica for row in step.rows).values())
        if most == 1:
            return
        assert shared is not None
        self.num_shared += 1
        assert most <= max(shared.rows)
        assert all(row.num_tokens <= shared.tokens and row.end <= shared.context for row in step.rows)

    def run(self, accept: random.Random | None = None, *, tokens: int = 2) -> None:
        """The step runs: slots are written, sampled tokens appended, and it is committed.

        `accept` draws how many tokens each row brings, from 0 to all drafts and one; without it all do.
        """
        assert self.step is not None
        for row in self.step.rows:
            sequence, before = row.sequence, len(row.sequence.token_ids)
            for position in range(row.start, row.end):
                self.slots[self.slot(sequence, position)] = self.content(sequence, position + 1)
            for position in range(row.end, row.end + row.num_drafts):
                self.slots[self.slot(sequence, position)] = GARBAGE
            if sequence.id not in self.live or not row.samples:
                continue
            most = min(1 + row.num_drafts, sequence.num_left)
            count = most if accept is None else accept.randint(0, most)
            new = [7] * count if accept is None else [accept.randrange(tokens) for _ in range(count)]
            sequence.token_ids += new
            for position in range(before, before + count - 1):  # accepted drafts were computed, the last token was not
                self.slots[self.slot(sequence, position)] = self.content(sequence, position + 1)
        rows = self.step.rows
        self.scheduler.commit(self.step)
        self._step_is_over()
        for row in rows:
            if row.sequence.id in self.live and row.samples and row.sequence.num_left <= 0:
                self.finish(row.sequence.id)
        self.check()

    def fail(self, rng: random.Random) -> None:
        """The step raises with some of its slots half written."""
        assert self.step is not None
        for row in self.step.rows:
            for position in range(row.start, row.end + row.num_drafts):
                if rng.random() < 0.5:
                    self.slots[self.slot(row.sequence, position)] = GARBAGE
            self.live.pop(row.sequence.id, None)
        self.scheduler.fail(self.step)
        self._step_is_over()
        self.check()

    def finish(self, id_: int) -> None:
        self.scheduler.finish(id_)
        assert self.live.pop(id_).block_table == []

    def abort(self, id_: int) -> None:
        assert self.scheduler.abort(id_)
        self._is_dropped(id_)
        assert not self.scheduler.abort(id_)
        self.check()

    def expire(self, now: float) -> list[int]:
        due = [id_ for id_, s in self.live.items() if s.deadline is not None and s.deadline <= now]
        expired = self.scheduler.expire(now)
        assert expired == due
        for id_ in expired:
            self._is_dropped(id_)
        self.check()
        return expired

    def update_weights(self) -> None:
        self.scheduler.invalidate()
        self.weights += 1
        assert all(sequence.num_computed == 0 and not sequence.block_table for sequence in self.live.values())
        self.check()

    def _is_dropped(self, id_: int) -> None:
        sequence = self.live.pop(id_)
        if self.step is not None and any(row.sequence is sequence for row in self.step.rows):
            self.zombies.append(sequence)
        else:
            assert sequence.block_table == []

    def _step_is_over(self) -> None:
        self.step = None
        assert all(sequence.block_table == [] for sequence in self.zombies)
        self.zombies.clear()

    def check(self) -> None:
        """Blocks add up, and references are exactly those of the tables."""
        stats, referenced = self.scheduler.stats, 0
        for replica, pool in enumerate(self.pools):
            tables = [s.block_table for s in (*self.live.values(), *self.zombies) if s.replica == replica]
            held = Counter(block for table in tables for block in table)
            assert all(pool.references(block) == held[block] for block in range(pool.num_blocks))
            assert pool.references(0) == 0
            referenced += len(held)
        usable = sum(pool.num_usable for pool in self.pools)
        assert stats.free_blocks + stats.referenced_blocks + stats.cached_blocks == usable
        assert stats.referenced_blocks == referenced
        running = sum(bool(sequence.block_table) for sequence in self.live.values())
        assert (stats.running, stats.waiting) == (running, len(self.live) - running)
        assert self.scheduler.has_work == bool(self.live)
        for sequence in self.live.values():
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert 0 <= sequence.num_computed < len(sequence.token_ids)
            assert sequence.num_cached_tokens < sequence.num_prompt
            assert sequence.num_cached_tokens == 0 or sequence.allow_prefix_reuse

    def most_steps(self) -> int:
        """More steps than any correct scheduler needs to finish all there is, however often it preempts.

        Each preemption of one sequence follows a block gained by another, so it costs at most one recomputation per
        block of output; every computed token is charged a step of its own.
        """
        work = sum(sequence.max_total_tokens + 1 for sequence in self.live.values())
        return 2 * work * (len(self.live) + 1) * (self.policy.max_preemptions + 2) + 2

    def drain(self) -> int:
        """Run to the end without anything new; the number of steps. Fails where something never ends."""
        limit, steps = self.most_steps(), 0
        while self.schedule() is not None:
            self.run()
            steps += 1
            assert steps <= limit, "nothing new arrives, and still it does not end"
        assert not self.live
        assert all(pool.num_available == pool.num_usable for pool in self.pools)
        return steps


def make_world(*, num_blocks: int = 65, block_size: int = 4, num_replicas: int = 1, **policy: object) -> World:
    policy = {"max_num_seqs": 8, "chunk_sizes": (8,)} | policy
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_replicas": num_replicas}
    return World(SchedulerPolicy(**policy), **sizes)  # type: ignore[arg-type]


def distinct(length: int, start: int = 100) -> list[int]:
    """A prompt that shares no block with one of another start."""
    return list(range(start, start + length))


def history(world: World, num_steps: int) -> list[str]:
    """The next steps, run: "p3" is a prefill step of sequence 3, "d1,2" a decode step of 1 and 2."""
    steps = []
    for _ in range(num_steps):
        step = world.schedule()
        if step is None:
            break
        ids = ",".join(str(id_) for id_ in sorted(row.sequence.id for row in step.rows))
        steps.append(("p" if isinstance(step, PrefillStep) else "d") + ids)
        world.run()
    return steps
