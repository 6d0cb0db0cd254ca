"""From conversations to training batches: which tokens count, how texts are grouped, in what order. No tensors.

A batch of step i is a function of (examples, seed, i) alone, so a run that resumes sees what an uninterrupted one sees.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msds.errors import MsdsError, TrainingError
from msds.text.chat_format import ChatFormat
from msds.text.reasoning import END_THINK, THINK, Start
from msds.text.tokenizer import Tokenizer

Array = npt.NDArray[Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """messages, of which the last is the assistant's, and the tools they were offered. where: file and line."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None
    where: str = "a conversation"


@dataclass(frozen=True)
class Example:
    """A text to learn from. num_prompt: so many tokens at its beginning are given, the others are to be predicted."""

    token_ids: tuple[int, ...]
    num_prompt: int
    where: str = "a text"


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, content) of the lines that hold something; TrainingError for a file or a line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON strings may hold what else ends a line in Unicode
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path} is not text in UTF-8, from byte {error.start} on") from None
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except ValueError as error:
            raise TrainingError(f"{where} is not JSON: {error}") from None
        yield where, content


def read_conversations(path: Path) -> list[Conversation]:
    """JSON lines of {"messages": [..., {"role": "assistant", "content": "..."}]}; TrainingError names the line.

    Of a conversation the last answer is learned. It may have "reasoning_content", as answers of the service have;
    "tools" may stand beside the messages.
    """
    conversations = []
    for where, content in json_lines(path):
        try:
            messages, tools = content["messages"], content.get("tools")
            last = messages[-1]
            is_good = last["role"] == "assistant" and isinstance(last["content"], str)
            is_good = is_good and isinstance(last.get("reasoning_content", ""), str) and not last.get("tool_calls")
        except (AttributeError, KeyError, TypeError, IndexError):
            is_good = False
        if not is_good:
            raise TrainingError(
                f'{where}: it must be {{"messages": [...]}} whose last message is the assistant\'s, with a text as '
                "content, perhaps one as reasoning_content, and no tool_calls"
            )
        conversations.append(Conversation(messages, tools, where))
    if not conversations:
        raise TrainingError(f"{path} holds no conversation")
    return conversations


def encode_conversation(conversation: Conversation, tokenizer: Tokenizer, chat: ChatFormat) -> Example:
    """The last message is the answer to be learned, end token included; what comes before is rendered as a prompt.

    Where the prompt ends inside an open think block, the answer goes on from there. TrainingError, which names the
    line, where the answer does not fit to that, or the template cannot show the prompt.
    """
    messages, tools, where = conversation.messages, conversation.tools, conversation.where
    if tokenizer.eos_id is None:
        raise TrainingError("the tokenizer names no eos_token: an answer could not learn to end")
    try:
        prompt = chat.encode(messages[:-1], tools=tools)
    except MsdsError as error:
        raise TrainingError(f"{where}: {error}") from None
    start = chat.start_of_answer(prompt, with_tools=bool(tools))
    answer = _answer_text(messages[-1], start, where)
    if start is Start.OPEN:
        opened = tokenizer.decode(prompt, skip_special_tokens=False)
        answer = answer.removeprefix(THINK)
        if opened.endswith("\n"):
            answer = answer.removeprefix("\n")
    # markers in an answer are meant: it is training data, not what a user typed
    ids = tokenizer.encode(answer, bos=False)
    if ids[-1:] != [tokenizer.eos_id]:
        ids = [*ids, tokenizer.eos_id]
    return Example((*prompt, *ids), len(prompt), where)


def _answer_text(message: Mapping[str, Any], start: Start, where: str) -> str:
    """What the assistant writes, its thinking in DeepSeek-R1's form."""
    content: str = message["content"]
    reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if start is Start.CLOSED:
            raise TrainingError(f"{where}: reasoning_content is given, but this model's prompt leaves no place for it")
        return f"{THINK}\n{reasoning}\n{END_THINK}\n\n{content}"
    if start is Start.OPEN and END_THINK not in content:
        raise TrainingError(
            f"{where}: this model's prompt ends inside its thinking, but the answer has none and would be learned as "
            f'a thought: add "reasoning_content", which may be empty, or begin content with {THINK}...{END_THINK}'
        )
    return content


class Batches:
    """Batches of `sequences` texts of like length, padded to the smallest of `lengths` that holds them.

    Texts are shuffled in each pass, taken in pools of several batches, sorted by length within a pool, and the batches
    of a pool are shuffled again. TrainingError for a text that is longer than the longest length.
    """

    POOL = 16

    def __init__(self, examples: Sequence[Example], *, sequences: int, lengths: Sequence[int], seed: int) -> None:
        self.lengths = tuple(sorted(lengths))
        longest = max(range(len(examples)), key=lambda index: len(examples[index].token_ids))
        if len(examples[longest].token_ids) > self.lengths[-1]:
            raise TrainingError(
                f"{examples[longest].where} has {len(examples[longest].token_ids)} tokens, but the longest training "
                f"length is {self.lengths[-1]}: raise it, or leave the text out"
            )
        if len(examples) < sequences:
            raise TrainingError(f"{len(examples)} texts do not fill a batch of {sequences}: lower the batch size")
        self.examples = examples
        self.sequences = sequences
        self.seed = seed
        self.batches_per_pass = len(examples) // sequences
        self._pass = -1
        self._order: list[list[int]] = []

    def __getitem__(self, index: int) -> dict[str, Array]:
        """Batch 0, 1, 2, ...: passes follow each other, the last texts that fill no batch wait for the next pass."""
        number, place = divmod(index, self.batches_per_pass)
        if number != self._pass:
            self._pass, self._order = number, self._arrange(number)
        return build_batch([self.examples[one] for one in self._order[place]], self.lengths)

    def _arrange(self, number: int) -> list[list[int]]:
        chance = random.Random(f"{self.seed}:{number}")
        order = list(range(len(self.examples)))
        chance.shuffle(order)
        batches: list[list[int]] = []
        pool = self.sequences * self.POOL
        usable = self.batches_per_pass * self.sequences
        for start in range(0, usable, pool):
            part = sorted(order[start : min(start + pool, usable)], key=lambda i: len(self.examples[i].token_ids))
            cut = [part[at : at + self.sequences] for at in range(0, len(part), self.sequences)]
            chance.shuffle(cut)
            batches += cut
        return batches


def digest(texts: Iterable[Sequence[int]]) -> str:
    """Tells lists of token sequences apart, order included."""
    found = hashlib.sha256()
    for ids in texts:
        found.update(np.array([len(ids), *ids], np.int64).tobytes())
    return found.hexdigest()


def build_batch(examples: Sequence[Example], lengths: Sequence[int]) -> dict[str, Array]:
    """tokens, positions, weights [S, Q], query_lens, sequence_share [S]; Q is the smallest length that holds all.

    weights are 1 / targets of the batch, so they sum to 1 (see `msds.train.losses`).
    """
    longest = max(len(example.token_ids) for example in examples)
    queries = next(length for length in sorted(lengths) if length >= longest)
    count = len(examples)
    batch: dict[str, Array] = {
        "tokens": np.zeros((count, queries), np.int32),
        "positions": np.tile(np.arange(queries, dtype=np.int32), (count, 1)),
        "query_lens": np.array([len(example.token_ids) for example in examples], np.int32),
        "weights": np.zeros((count, queries), np.float32),
        "sequence_share": np.full(count, 1 / count, np.float32),
    }
    for row, example in enumerate(examples):
        length = len(example.token_ids)
        batch["tokens"][row, :length] = example.token_ids
        batch["weights"][row, max(1, example.num_prompt) : length] = 1.0
    batch["weights"] /= batch["weights"].sum()
    return batch


def split_batch(batch: Mapping[str, Array], parts: int) -> list[dict[str, Array]]:
    """Micro-batches of equal size that keep the whole batch's normalisation; TrainingError if it does not divide."""
    count = len(batch["query_lens"])
    if count % parts:
        raise TrainingError(f"a batch of {count} texts does not divide into {parts} micro-batches")
    size = count // parts
    return [{name: array[at : at + size] for name, array in batch.items()} for at in range(0, count, size)]
