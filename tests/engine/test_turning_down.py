"""Speculation measures itself, and stops and starts by what it brings per second of an injected clock."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from msds.engine.speculation import Speculation
from tests.engine.drafting import DraftingCase, DraftingRunner, told
from tests.engine.test_engine import VOCAB
from tests.engine.test_speculation import Request, answers, plain, texts_of


class Clock:
    """Seconds that pass only in calls of a runner."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(DraftingRunner):
    """A plain step takes a second, one with drafts 1.2, drafting itself 0.3: k = 2 pays from 1.5 tokens per round."""

    def __init__(self, clock: Clock, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clock = clock

    def decode(self, rows: Any) -> Any:
        self.clock.now += 1.2 if any(len(row.tokens) > 1 for row in rows) else 1.0
        return super().decode(rows)

    def draft(self, rows: Any) -> Any:
        self.clock.now += 0.3
        return super().draft(rows)


class TestTurningDown:
    REQUEST: Request = ([2, 3, 4], {"max_tokens": 300, "ignore_eos": True, "logit_bias": {VOCAB - 1: -100}})

    def run(self, wrong: float, **options: Any) -> DraftingCase:
        [want] = plain([self.REQUEST], max_model_len=400)
        clock = Clock()
        runner = TimedRunner(clock, 200, 2, texts_of([self.REQUEST], [want]), wrong)
        speculation = Speculation(2, clock=clock, **{"window": 8, "pause": 20, "max_pause": 40, **options})
        case = DraftingCase(runner, max_model_len=400, speculation=speculation)
        [got] = answers(case, [self.REQUEST])
        assert told(got) == told(want)
        return case

    def test_drafts_that_are_right_go_on(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "msds"):
            case = self.run(0.0)
        assert not caplog.records
        stats = case.engine.speculation
        assert stats is not None
        assert stats.is_on
        # a few plain steps for each shape, the rest in rounds of three tokens
        assert case.runner.kinds.count("decode") < 130

    def test_drafts_that_are_wrong_stop_and_are_tried_again(self, caplog: pytest.LogCaptureFixture) -> None:
        """Every window of 8 is lost (1.0 tokens, 1.5 s); then 20 plain rounds, then 40, and 40: at most that."""
        with caplog.at_level(logging.INFO, "msds"):
            case = self.run(1.0)
        [record] = caplog.records
        assert "1.00 tokens per round of 2 drafts, 0.67 times" in record.getMessage()
        rounds = len(case.runner.num_rows)
        assert 40 < rounds < 80
        assert case.engine.speculation is not None
        assert case.engine.speculation.accepted == (0, 0)

    def test_it_goes_by_time_and_not_by_acceptance(self) -> None:
        """With half of the drafts wrong a round brings about 1.75 tokens in 1.5 s: it pays."""
        case = self.run(0.35)
        assert case.engine.speculation is not None
        assert case.engine.speculation.is_on

    def test_it_recovers(self, caplog: pytest.LogCaptureFixture) -> None:
        speculation = Speculation(1, window=4, pause=10, clock=lambda: 0.0)
        for _ in range(3):
            speculation.measure("s", has_drafts=False, tokens_per_row=1, seconds=1.0)
        assert speculation.wants("s")
        assert not speculation.wants("other")
        with caplog.at_level(logging.INFO, "msds"):
            for tokens in (1.0, 2.0):
                for _ in range(5):
                    assert speculation.num_lookahead == 1
                    speculation.measure("s", has_drafts=True, tokens_per_row=tokens, seconds=1.5)
                    if not speculation.num_lookahead:
                        break
                if tokens == 1.0:
                    assert not speculation.stats.is_on
                    for _ in range(10):
                        assert not speculation.wants("s")
                        speculation.measure("s", has_drafts=False, tokens_per_row=1, seconds=1.0)
        assert speculation.stats.is_on
        assert [record.getMessage().split(":")[0] for record in caplog.records] == [
            "speculation does not pay and is off",
            "speculation pays again",
        ]

    def test_a_first_round_that_compiles_is_not_held_against_it(self) -> None:
        speculation = Speculation(1, window=4, clock=lambda: 0.0)
        for seconds in (60.0, 1.0, 1.0):
            speculation.measure("s", has_drafts=False, tokens_per_row=1, seconds=seconds)
        speculation.measure("s", has_drafts=True, tokens_per_row=2, seconds=60.0)
        for _ in range(8):
            speculation.measure("s", has_drafts=True, tokens_per_row=2, seconds=1.5)
        assert speculation.stats.is_on
