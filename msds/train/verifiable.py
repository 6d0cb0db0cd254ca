"""Problems with an answer that can be checked: how they are read, and whether a reply is right. No tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from msds.errors import TrainingError
from msds.text.reasoning import ReasoningParser, Start
from msds.train.data import json_lines

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Task:
    """prompt: the messages up to the question. answer: what the reply must come to. kind: for reports. where: file and
    line."""

    prompt: tuple[Mapping[str, Any], ...]
    answer: str
    kind: str
    where: str = "a task"


@dataclass(frozen=True)
class Reply:
    """What a model wrote: the text as it is, and its reasoning and content as the service would split them."""

    text: str
    reasoning: str
    content: str


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a JSON-lines file: {"messages": [...], "answer": "...", "kind": "..."}; TrainingError names the line.

    A last message of the assistant is left out: it is how a training text answers. kind may be missing; tools are
    refused, for nobody would answer the calls.
    """
    tasks: list[Task] = []
    for where, fields in json_lines(path):
        try:
            messages: Sequence[Mapping[str, Any]] = fields["messages"]
            prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            task = Task(tuple(prompt), fields["answer"], fields.get("kind", "all"), where)
        except (KeyError, TypeError, IndexError, AttributeError):
            raise TrainingError(f'{where}: it must be {{"messages": [...], "answer": "..."}}') from None
        if not prompt:
            raise TrainingError(f"{task.where}: messages holds no question")
        if fields.get("tools"):
            raise TrainingError(f"{task.where}: tools are given, but calls are not answered here: leave them out")
        for name in ("answer", "kind"):
            if not isinstance(value := getattr(task, name), str):
                raise TrainingError(f"{task.where}: {name} is {value!r}: it must be a string")
        if not task.answer.strip():
            raise TrainingError(f"{task.where}: answer is {task.answer!r}: give what a right reply comes to")
        tasks.append(task)
    if not tasks:
        raise TrainingError(f"{path} holds no task")
    return tasks


def split_reply(text: str, start: Start) -> Reply:
    """Reasoning and content of an answer; start: where its prompt left the model."""
    parser = ReasoningParser(start)
    first, rest = parser.push(text), parser.finish()
    return Reply(text, first.reasoning + rest.reasoning, first.content + rest.content)


def is_correct(task: Task, content: str) -> bool:
    """Whether what follows the reasoning comes to the answer.

    A numeric answer is compared with the last number of the content, as numbers; any other with the whole content,
    but for spaces around it.
    """
    answer = task.answer.strip()
    if not _NUMBER.fullmatch(answer):
        return content.strip() == answer
    found = _NUMBER.findall(content)
    return bool(found) and _value(found[-1]) == _value(answer)


def _value(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))
