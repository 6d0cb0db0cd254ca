"""Accuracy on checkable tasks, by kind, with confidence intervals; paired comparison of two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msds.errors import TrainingError
from msds.llm import LLM
from msds.text.reasoning import Start
from msds.train.verifiable import Task, is_correct, split_reply

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

    def to_json(self) -> dict[str, Any]:
        """kind, count, right, accuracy, and low and high of the interval."""
        low, high = self.interval
        numbers = {"count": self.count, "right": self.right, "accuracy": self.accuracy, "low": low, "high": high}
        return {"kind": self.kind, **numbers}

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the accuracy (Wilson 1927)."""
        n, p, z = self.count, self.accuracy, Z95
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


NO_REASONING = "\n</think>\n\n"
"""What closes the thinking that a prompt has opened."""


def measure(
    model: str | Path, tasks: Sequence[Task], *, max_tokens: int, reasoning: bool = True, max_num_seqs: int = 32
) -> tuple[list[bool], list[Score]]:
    """Whether each task is answered rightly by a checkpoint folder, as `answered_rightly`; and the scores."""
    right = answered_rightly(LLM(model, max_num_seqs=max_num_seqs), tasks, max_tokens=max_tokens, reasoning=reasoning)
    return right, scores(tasks, right)


def answered_rightly(llm: LLM, tasks: Sequence[Task], *, max_tokens: int, reasoning: bool = True) -> list[bool]:
    """Whether each task is answered rightly, greedily.

    Without `reasoning` the thinking that the prompt opens is closed at once, so the answer must come without it.
    TrainingError for an answer that failed, and for prompts that open no thinking which could be closed.
    """
    sampling = llm.default_sampling(temperature=0.0, max_tokens=max_tokens)
    chat = llm.model.chat
    prompts = [chat.encode(task.prompt) for task in tasks]
    starts = [chat.start_of_answer(prompt) for prompt in prompts]
    if not reasoning:
        assert llm.model.tokenizer is not None
        if Start.OPEN not in starts:
            raise TrainingError("this model's prompts open no thinking that could be closed: leave out --no-reasoning")
        closing = llm.model.tokenizer.encode(NO_REASONING, bos=False)
        prompts = [[*prompt, *closing] for prompt in prompts]
        starts = [Start.CLOSED] * len(tasks)
    outputs = llm.generate(prompts, sampling)
    for task, output in zip(tasks, outputs, strict=True):
        if output.error is not None:
            raise TrainingError(f"{task.where}: the answer failed: {output.error}")
    replies = [split_reply(output.text, start) for output, start in zip(outputs, starts, strict=True)]
    return [is_correct(task, reply.content) for task, reply in zip(tasks, replies, strict=True)]


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
