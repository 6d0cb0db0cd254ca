"""The watchdog's bookkeeping, on a clock of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from msds.launch.watch import Watch

TIMEOUT = 8.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(ranks: int) -> tuple[Watch, Clock]:
    clock = Clock()
    return Watch(range(ranks), TIMEOUT, clock), clock


def all_alive(watch: Watch, *ranks: int) -> None:
    for rank in ranks:
        watch.heard(rank)


@given(st.integers(2, 6), st.data())
def test_exactly_those_that_did_not_report_are_named(ranks: int, data: st.DataObject) -> None:
    watch, clock = watched(ranks)
    number = watch.begin("a step")
    late = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    for rank in range(ranks):
        if rank not in late:
            watch.done(rank, number)
    clock.now += TIMEOUT
    all_alive(watch, *range(1, ranks))
    assert watch.problem() is None
    clock.now += 0.1
    names = ", ".join(map(str, sorted(late)))
    assert watch.problem() == f"rank{'s' if len(late) > 1 else ''} {names} did not finish a step within 8 s"


def test_the_silent_rank_is_named_not_those_that_wait_for_it() -> None:
    watch, clock = watched(4)
    watch.begin("a step")
    for _ in range(10):
        clock.now += 0.9
        all_alive(watch, 1, 3)
    assert watch.problem() == "rank 2 did not finish a step within 8 s"


def test_progress_within_a_call_counts() -> None:
    watch, clock = watched(2)
    number = watch.begin("warm-up")
    for _ in range(5):
        clock.now += TIMEOUT - 1
        watch.progress(0)
        watch.progress(1)
        assert watch.problem() is None
    watch.done(0, number)
    clock.now += TIMEOUT - 1
    watch.heard(1)
    assert watch.problem() is None
    clock.now += 2
    assert watch.problem() == "rank 1 did not finish warm-up within 8 s"


def test_a_rank_that_is_idle_and_silent_is_named() -> None:
    watch, clock = watched(3)
    number = watch.begin("a step")
    for rank in range(3):
        watch.done(rank, number)
    for _ in range(4):
        clock.now += TIMEOUT - 1
        all_alive(watch, 1, 2)
        assert watch.problem() is None
    for _ in range(3):
        clock.now += 4
        all_alive(watch, 1)
        assert watch.problem() is None
    clock.now += 0.1
    assert watch.problem() == "rank 2 gave no sign of life for 12 s"


def test_silence_in_a_step_is_told_with_the_step() -> None:
    watch, clock = watched(2)
    clock.now += 1.9  # just before a sign of life was due
    watch.begin("a step")
    while watch.problem() is None:
        clock.now += 0.1
    assert watch.problem() == "rank 1 did not finish a step within 8 s"


def test_all_fail_or_none() -> None:
    watch, _ = watched(3)
    number = watch.begin("a step")
    for rank in range(3):
        watch.done(rank, number, "bad index")
    assert watch.problem() is None
    number = watch.begin("a step")
    watch.done(1, number, "bad index")
    watch.done(0, number)
    assert watch.problem() is None
    watch.done(2, number)
    assert watch.problem() == "rank 1 failed in a step, the others did not: bad index"


def test_a_rank_that_has_ended_is_named_with_what_it_was_in() -> None:
    watch, _ = watched(2)
    watch.begin("step decode")
    watch.lost(1)
    assert watch.problem() == "rank 1 has ended (in step decode)"
    watch.heard(1)
    assert watch.problem() == "rank 1 has ended (in step decode)"
