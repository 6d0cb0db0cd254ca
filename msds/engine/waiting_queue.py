"""Sequences that wait to start: in which order they may, and why none waits for ever. No tensors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic

from msds.engine.prefix_cache import BlockChain
from msds.engine.schedule_types import S

SCAN_LIMIT = 64  # candidates looked at for one start; keeps a step cheap when ten thousand wait


@dataclass(eq=False)
class Entry(Generic[S]):
    """What the scheduler knows of one sequence.

    arrival: its number in order of `add`. max_slots: most tokens of it that are ever in the cache. num_registered:
    blocks of its table that the prefix cache has seen. num_passed: sequences that started while this one had waited
    longest.
    """

    sequence: S
    arrival: int
    max_slots: int
    chain: BlockChain
    num_registered: int = 0
    num_passed: int = 0
    num_preemptions: int = 0
    has_started: bool = False
    is_aborted: bool = False

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the cache does not hold; at least one, the last."""
        return len(self.sequence.token_ids) - self.sequence.num_computed


class WaitingQueue(Generic[S]):
    """Ordered by priority, then arrival. A sequence that does not fit now lets others start before it, up to a limit.

    The rule: of every `max_overtakes` + 1 starts, one at least is that of the sequence which arrived first among
    those waiting, whatever its priority. When its turn has come, nothing else starts until it fits; running sequences
    end, so it will. A sequence behind `m` earlier ones thus sees at most (m + 1) * (max_overtakes + 1) starts, plus
    those of earlier ones that are preempted and start again.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._entries: list[Entry[S]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[S]]:
        return iter(self._entries)

    def push(self, entry: Entry[S]) -> None:
        """Queue a sequence; one that was preempted takes the place its arrival gives it."""
        insort(self._entries, entry, key=_order)

    def remove(self, entry: Entry[S]) -> None:
        """Take a sequence out that will not start."""
        index = bisect_left(self._entries, _order(entry), key=_order)
        if index == len(self._entries) or self._entries[index] is not entry:
            raise RuntimeError(f"sequence {entry.sequence.id} does not wait")
        del self._entries[index]

    def candidates(self) -> list[Entry[S]]:
        """Those that may start next, the first that fits before the others."""
        oldest = self._oldest()
        if oldest is not None and oldest.num_passed >= self._max_overtakes:
            return [oldest]
        return list(islice(self._entries, SCAN_LIMIT))

    def start(self, entry: Entry[S]) -> None:
        """Take a sequence out because it starts, and count that against the one that has waited longest."""
        oldest = self._oldest()
        if oldest is not None and oldest is not entry:
            oldest.num_passed += 1
        entry.num_passed = 0
        self.remove(entry)

    def _oldest(self) -> Entry[S] | None:
        """The first arrival: the least among the first of each priority."""
        oldest: Entry[S] | None = None
        index = 0
        while index < len(self._entries):
            first = self._entries[index]
            if oldest is None or first.arrival < oldest.arrival:
                oldest = first
            index = bisect_right(self._entries, first.sequence.priority, key=_priority)
        return oldest


def _priority(entry: Entry[S]) -> int:
    return entry.sequence.priority


def _order(entry: Entry[S]) -> tuple[int, int]:
    return entry.sequence.priority, entry.arrival
