"""From conversations to training batches: which tokens count, how texts are grouped, in what order. No tensors.

A batch of step i is a function of (examples, seed, i) alone, so a run that resumes sees what an uninterrupted one sees.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msds.errors import TrainingError
from msds.text.chat_format import ChatFormat
from msds.text.tokenizer import Tokenizer

Array = npt.NDArray[Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Example:
    """A text to learn from. num_prompt: so many tokens at its beginning are given, the others are to be predicted."""

    token_ids: tuple[int, ...]
    num_prompt: int


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that hold something, numbered from 1; TrainingError when it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path} is not text in UTF-8, from byte {error.start} on") from None
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error}") from None
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def read_line(path: Path, number: int, line: str) -> Any:
    """What a line of JSON says; TrainingError names the line and the column."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{path}, line {number} is not JSON: {error}") from None


def read_conversations(path: Path) -> list[Messages]:
    """JSON lines of {"messages": [..., {"role": "assistant", "content": "..."}]}; TrainingError names the line."""
    conversations: list[Messages] = []
    for number, line in numbered_lines(path):
        content = read_line(path, number, line)
        try:
            messages = content["messages"]
            is_good = messages[-1]["role"] == "assistant" and isinstance(messages[-1]["content"], str)
        except (KeyError, TypeError, IndexError):
            is_good = False
        if not is_good:
            raise TrainingError(
                f'{path}, line {number}: it must be {{"messages": [...]}} whose last message is the assistant\'s'
            )
        conversations.append(messages)
    if not conversations:
        raise TrainingError(f"{path} holds no conversation")
    return conversations


def encode_conversation(messages: Messages, tokenizer: Tokenizer, chat: ChatFormat) -> Example:
    """The last message is the answer to be learned, end token included; what comes before is rendered as a prompt.

    Where the prompt ends inside an open think block, an answer that begins with the think tag goes on from there.
    """
    prompt = chat.encode(messages[:-1])
    answer = messages[-1]["content"]
    opened = tokenizer.decode(prompt, skip_special_tokens=False)
    for opening in ("<think>\n", "<think>"):
        if opened.endswith(opening) and answer.startswith(opening):
            answer = answer[len(opening) :]
            break
    if tokenizer.eos_id is None:
        raise TrainingError("the tokenizer names no eos_token: an answer could not learn to end")
    # markers in an answer are meant: it is training data, not what a user typed
    ids = tokenizer.encode(answer, bos=False)
    return Example((*prompt, *ids, tokenizer.eos_id), len(prompt))


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
                f"text {longest} has {len(examples[longest].token_ids)} tokens, but the longest training length is "
                f"{self.lengths[-1]}: raise it, or leave the text out"
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
