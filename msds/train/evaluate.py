"""Accuracy on checkable tasks, by kind, with confidence intervals; paired comparison of two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msds.llm import LLM
from msds.train.verifiable import Task, is_correct

Z95 = 1.959964


@dataclass(frozen=True)
class Score:
    """right of count tasks of one kind."""

    kind: str
    right: int
    count: int

    @property
    def accuracy(self) -> float:
        """In [0, 1]."""
        return self.right / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the accuracy (Wilson 1927)."""
        n, p, z = self.count, self.accuracy, Z95
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return middle - half, middle + half


def answer_tasks(llm: LLM, tasks: Sequence[Task], *, max_tokens: int = 128) -> list[bool]:
    """Whether each task is answered rightly, greedily."""
    sampling = llm.default_sampling(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.chat([task.prompt for task in tasks], sampling)
    return [is_correct(task, output.text) for task, output in zip(tasks, outputs, strict=True)]


def scores(tasks: Sequence[Task], right: Sequence[bool]) -> list[Score]:
    """One score per kind, in order of first appearance, then one over all."""
    kinds = list(dict.fromkeys(task.kind for task in tasks))
    found = []
    for kind in kinds:
        hits = [hit for task, hit in zip(tasks, right, strict=True) if task.kind == kind]
        found.append(Score(kind, sum(hits), len(hits)))
    return [*found, Score("all", sum(right), len(right))]


def render_scores(rows: Sequence[Score]) -> str:
    """A table of kinds, counts, accuracies and intervals."""
    lines = [f"{'kind':<16} {'tasks':>6} {'right':>6} {'accuracy':>9}  95 % interval"]
    for row in rows:
        low, high = row.interval
        lines.append(f"{row.kind:<16} {row.count:>6} {row.right:>6} {row.accuracy:>9.1%}  {low:.1%} to {high:.1%}")
    return "\n".join(lines)


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, float]:
    """(tasks won, tasks lost, two-sided exact p) of a paired comparison (McNemar 1947, binomial form)."""
    won = sum(b and not a for a, b in zip(before, after, strict=True))
    lost = sum(a and not b for a, b in zip(before, after, strict=True))
    changed, fewer = won + lost, min(won, lost)
    if changed == 0:
        return 0, 0, 1.0
    tail = sum(math.comb(changed, k) for k in range(fewer + 1)) / 2**changed
    return won, lost, min(1.0, 2 * tail)
