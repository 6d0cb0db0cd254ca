"""Whether drafting pays, measured as it runs, and what came of the drafts. No tensors.

Speculation is lossless: the draft is one token, the target is sampled with the key of its own position, and the draft
counts only where it equals the target. So nothing here can change an answer, and the clock may decide. It need not
know any sequence either: every step keeps the MTP layer's cache complete, so drafting may stop and start at any time.

Logits of a step of several tokens are those of single steps up to rounding, as they are in batches of different size:
where two tokens are as likely as that, either may come.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from statistics import median

logger = logging.getLogger("msds")


@dataclass(frozen=True)
class SpeculationStats:
    """Draft tokens that were verified and those that were kept, by their place after the last token; is it on now."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    is_on: bool


class Speculation:
    """Turns itself down where a round of drafting and verifying brings fewer tokens per second than plain steps.

    num_drafts: tokens per round. clock: seconds, from anywhere. window: rounds that are judged together. pause: plain
    rounds before it is tried again, twice as many after each further failure, up to `max_pause`.
    A shape is whatever decides the time of a step. Plain steps of each are timed first: `num_probes` of them.
    """

    def __init__(
        self,
        num_drafts: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        window: int = 64,
        pause: int = 256,
        max_pause: int = 8192,
        num_probes: int = 3,
    ) -> None:
        self.num_drafts = num_drafts
        self.clock = clock
        self._window, self._first_pause, self._max_pause, self._num_probes = window, pause, max_pause, num_probes
        self._pause = pause
        self._rest = 0  # plain rounds until it is tried again; 0: it is on
        self._plain: dict[Hashable, deque[float]] = {}
        self._seen: set[Hashable] = set()
        self._drafted, self._accepted = [0] * num_drafts, [0] * num_drafts
        self._start_window()

    @property
    def num_lookahead(self) -> int:
        """Draft tokens for each sequence of the next round."""
        return 0 if self._rest else self.num_drafts

    @property
    def stats(self) -> SpeculationStats:
        """Counters since the start."""
        return SpeculationStats(tuple(self._drafted), tuple(self._accepted), self._rest == 0)

    def wants(self, shape: Hashable) -> bool:
        """Whether a round of this shape should draft; not before it is known what a plain one takes."""
        return self._rest == 0 and len(self._plain.get(shape, ())) >= self._num_probes

    def count(self, *, drafted: int, accepted: int) -> None:
        """One sequence's drafts of a round: how many were verified, how many of these, the first ones, were kept."""
        for place in range(drafted):
            self._drafted[place] += 1
            self._accepted[place] += place < accepted

    def measure(self, shape: Hashable, *, has_drafts: bool, tokens_per_row: float, seconds: float) -> None:
        """One decode round: its time, and how many tokens it brought each of its sequences on average."""
        if not has_drafts:
            self._plain.setdefault(shape, deque(maxlen=5)).append(seconds)
            self._rest = max(0, self._rest - 1)
        elif shape not in self._seen:
            self._seen.add(shape)  # its graphs may have been compiled in it
        else:
            self._rounds += 1
            self._tokens += tokens_per_row
            self._spent += seconds
            self._worth += median(self._plain[shape]) * tokens_per_row
            if self._rounds == self._window:
                self._judge()

    def _judge(self) -> None:
        gain = self._worth / self._spent if self._spent else 1.0
        tokens = self._tokens / self._rounds
        if gain >= 1:
            if self._pause > self._first_pause:
                logger.info("speculation pays again: %.2f tokens per round, %.2f times as fast", tokens, gain)
            self._pause = self._first_pause
        else:
            if self._pause == self._first_pause:  # said once, not after each further trial
                logger.info(
                    "speculation does not pay and is off: %.2f tokens per round of %d drafts, %.2f times the speed of "
                    "plain steps; it is tried again from time to time",
                    tokens,
                    self.num_drafts,
                    gain,
                )
            self._rest = self._pause
            self._pause = min(2 * self._pause, self._max_pause)
        self._start_window()

    def _start_window(self) -> None:
        self._rounds, self._tokens, self._spent, self._worth = 0, 0.0, 0.0, 0.0
