"""Thousands of random histories of the scheduler, each checked after every call by `World`."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from msds.engine.ladder import SharedPrefill
from msds.engine.schedule_types import QueueFullError, SchedulerPolicy
from msds.errors import OptionError
from tests.engine.scheduler_world import FakeSequence, World


def random_world(rng: random.Random, num_replicas: int = 1) -> World:
    policy = SchedulerPolicy(
        max_num_seqs=rng.randint(1, 4),
        chunk_sizes=rng.choice([(1,), (3,), (2, 5), (4, 16)]),
        shared=rng.choice([None, SharedPrefill((2,), 3, 40), SharedPrefill((2, 4), 4, 8), SharedPrefill((3,), 16, 16)]),
        max_waiting=rng.choice([None, 3, 20]),
        max_overtakes=rng.choice([0, 1, 4]),
        max_preemptions=rng.choice([0, 1, 2]),
    )
    sizes = {"num_blocks": rng.randint(3, 12), "block_size": rng.choice([1, 2, 4])}
    return World(policy, num_replicas=num_replicas, **sizes)


def add_random(world: World, rng: random.Random) -> None:
    """One to three sequences of few different tokens, so that prefixes are shared; perhaps too long to be served."""
    room = world.pool.num_usable * world.pool.block_size + 1
    prompt = [rng.randrange(2) for _ in range(rng.randint(1, rng.choice([3, 8, room])))]
    first = world.num_added
    options = {
        "num_lookahead": rng.choice([0, 0, 1, 3]),
        "priority": rng.choice([0, 0, 0, -1, 2]),
        "deadline": rng.choice([None, None, float(rng.randrange(50))]),
        "cache_salt": rng.choice([b"", b"", b"x"]),
        "allow_prefix_reuse": rng.random() < 0.8,
    }
    total = len(prompt) + rng.randint(1, rng.choice([4, 24]))
    sequences = [
        FakeSequence(first + n, list(prompt), total, **options)  # type: ignore[arg-type]
        for n in range(rng.choice([1, 1, 3]))
    ]
    needed = world.pool.blocks_for(max(len(prompt), total - 1))
    waiting, most = world.scheduler.stats.waiting, world.policy.max_waiting
    before = dict(world.live)
    try:
        world.add(*sequences)
    except QueueFullError:
        assert most is not None
        assert waiting + len(sequences) > most
        assert world.live == before
    except OptionError:
        assert needed > world.pool.num_usable or (most is not None and len(sequences) > most)
        assert world.live == before
    else:
        assert needed <= world.pool.num_usable
    world.check()


def act(world: World, rng: random.Random) -> None:
    """One random call."""
    action = rng.choices(["add", "step", "abort", "expire", "finish", "weights"], [3, 12, 1, 1, 1, 0.4])[0]
    if action == "add":
        add_random(world, rng)
    elif action == "step":
        if world.step is None:
            world.schedule()
        elif rng.random() < 0.05:
            world.fail(rng)
        else:
            world.run(rng)
    elif action == "abort" and world.live:
        world.abort(rng.choice(sorted(world.live)))
    elif action == "expire":
        world.expire(float(rng.randrange(50)) if rng.random() < 0.3 else -1.0)
    elif action == "finish" and world.live and world.step is None:
        world.finish(rng.choice(sorted(world.live)))
    elif action == "weights" and world.step is None:
        world.update_weights()


@pytest.mark.parametrize(("seeds", "num_replicas"), [(range(3000), 1), (range(3000, 3800), 2), (range(3800, 4200), 3)])
def test_random_histories_stay_consistent_and_end(seeds: range, num_replicas: int) -> None:
    num_hit = num_preempted = num_shared = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = random_world(rng, num_replicas)
        for _ in range(rng.randint(10, 120)):
            act(world, rng)
        if world.step is not None:
            world.run(rng)
        world.drain()
        num_hit += world.scheduler.stats.prefix_tokens_hit
        num_preempted += world.scheduler.stats.preemptions
        num_shared += world.num_shared
    share = len(seeds) / 3000 / num_replicas
    assert num_hit > 5000 * share, "the histories hardly ever hit the prefix cache: they prove nothing about it"
    assert num_preempted > 500 * share, "the histories hardly ever preempt: they prove nothing about it"
    assert num_shared > 2000 * share, "the histories hardly ever share prefill steps: they prove nothing about them"


class SchedulerMachine(RuleBasedStateMachine):
    """The same, searched and shrunk by hypothesis."""

    @initialize(
        num_blocks=st.integers(2, 9),
        block_size=st.sampled_from([1, 2, 4]),
        num_replicas=st.integers(1, 3),
        max_num_seqs=st.integers(1, 4),
        chunk_sizes=st.sampled_from([(1,), (2, 5), (4, 16)]),
        shared=st.none() | st.builds(SharedPrefill, st.just((2, 4)), st.sampled_from([1, 4]), st.sampled_from([4, 30])),
        max_overtakes=st.integers(0, 3),
        max_preemptions=st.integers(0, 2),
    )
    def start(self, num_blocks: int, block_size: int, num_replicas: int, **policy: object) -> None:
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_replicas": num_replicas}
        self.world = World(SchedulerPolicy(**policy), **sizes)  # type: ignore[arg-type]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 8),
        num_lookahead=st.sampled_from([0, 1, 3]),
        priority=st.integers(-1, 1),
        deadline=st.none() | st.floats(0, 10),
        salt=st.sampled_from([b"", b"x"]),
        reuse=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, salt: bytes, reuse: bool, **options: object) -> None:
        sequence = self.world.new(prompt, max_tokens, cache_salt=salt, allow_prefix_reuse=reuse, **options)
        if self.world.pool.blocks_for(len(prompt) + max_tokens - 1) <= self.world.pool.num_usable:
            self.world.add(sequence)

    @precondition(lambda self: self.world.step is None)
    @rule()
    def schedule(self) -> None:
        self.world.schedule()

    @precondition(lambda self: self.world.step is not None)
    @rule(accept=st.randoms(use_true_random=False))
    def commit(self, accept: random.Random) -> None:
        self.world.run(accept)

    @precondition(lambda self: self.world.step is not None)
    @rule(rng=st.randoms(use_true_random=False))
    def fail(self, rng: random.Random) -> None:
        self.world.fail(rng)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.live))))

    @precondition(lambda self: self.world.live and self.world.step is None)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.live))))

    @rule(now=st.floats(0, 10))
    def expire(self, now: float) -> None:
        self.world.expire(now)

    @precondition(lambda self: self.world.step is None)
    @rule()
    def update_weights(self) -> None:
        self.world.update_weights()

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            if self.world.step is not None:
                self.world.run()
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(settings.default, max_examples=max(200, settings.default.max_examples))
