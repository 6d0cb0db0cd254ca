"""Problems with an answer that can be checked: how they are read, and whether a reply is right. No tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msds.errors import TrainingError
from msds.train.data import numbered_lines, read_line

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Task:
    """prompt: the messages up to the question. answer: what the reply must come to. kind: for reports."""

    prompt: tuple[Mapping[str, Any], ...]
    answer: str
    kind: str


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a JSON-lines file: {"messages": [...], "answer": "...", "kind": "..."}; TrainingError names the line.

    A last message of the assistant is left out: it is how a training text answers. kind may be missing.
    """
    tasks: list[Task] = []
    for number, line in numbered_lines(path):
        fields = read_line(path, number, line)
        try:
            messages: Sequence[Mapping[str, Any]] = fields["messages"]
            prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            task = Task(tuple(prompt), fields["answer"], fields.get("kind", "all"))
        except (KeyError, TypeError, IndexError, AttributeError):
            raise TrainingError(f'{path}, line {number}: it must be {{"messages": [...], "answer": "..."}}') from None
        if not prompt:
            raise TrainingError(f"{path}, line {number}: messages holds no question")
        for name in ("answer", "kind"):
            if not isinstance(value := getattr(task, name), str):
                raise TrainingError(f"{path}, line {number}: {name} is {value!r}: it must be a string")
        tasks.append(task)
    if not tasks:
        raise TrainingError(f"{path} holds no task")
    return tasks


def visible(text: str) -> str:
    """A reply without its reasoning: what follows the first </think>; nothing if the reasoning never ends."""
    return text.split("</think>", 1)[1].strip() if "</think>" in text else ""


def is_correct(task: Task, text: str) -> bool:
    """Whether the reply after the reasoning comes to the answer.

    A numeric answer is compared with the last number of the reply, as numbers; any other with the whole reply.
    """
    reply = visible(text)
    if not _NUMBER.fullmatch(task.answer):
        return reply == task.answer
    found = _NUMBER.findall(reply)
    return bool(found) and float(found[-1].replace(",", "")) == float(task.answer.replace(",", ""))
