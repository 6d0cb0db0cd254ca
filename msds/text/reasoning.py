"""Reasoning and answer: one stream of text split at the end of thinking.

The split works on text, after the detokenizer and the stop strings, not on token ids: the markers are one token in
some vocabularies (R1, V3.1, Qwen3) and plain text in others (V3), a speculative step delivers several tokens at once,
and a stop string may end the text in the middle of a token. What text cannot know is where the answer *starts*, and
that is read from the ids of the prompt (`start_after`): there a `<think>` that a user typed is no control token.

Whitespace: at both edges of the reasoning, and between `</think>` and the answer, it is layout and is dropped.
Everywhere else the text is passed on as it is. However the text is cut into pieces, the joined result is the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from msds.text.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"
SPACE = " \t\r\n"
"""Whitespace that is layout. ASCII alone, so that tokens can be looked at byte by byte."""


class Start(Enum):
    """What the prompt leaves open: thinking is `OPEN`, it is `CLOSED` (or unknown to the template), or the model
    decides by writing `<think>` first or not (`MODEL`)."""

    OPEN = "open"
    CLOSED = "closed"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What a piece of text adds to the reasoning and to the content; either may be empty."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Splits the text of one answer as it arrives.

    The first `</think>` ends the reasoning, a second one is content. A `<think>` that repeats the prompt's, as the
    first word of the answer, is dropped. Text that may be part of a marker is held back; without a `</think>` all of
    it is reasoning.
    """

    def __init__(self, start: Start) -> None:
        self._state = {Start.OPEN: self._opening, Start.CLOSED: self._content, Start.MODEL: self._undecided}[start]
        self._held = ""
        self._has_opened = start is Start.OPEN

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning. Constraints on the answer are in force when this is false
        and `is_undecided` is too."""
        return self._state in (self._opening, self._leading, self._reasoning)

    @property
    def is_undecided(self) -> bool:
        """Whether it is still open if the model thinks at all."""
        return self._state == self._undecided

    @property
    def has_reasoning(self) -> bool:
        """Whether there is, or was, an open `<think>`: `reasoning_content` is then text, else null."""
        return self._has_opened

    def push(self, text: str) -> ReasoningDelta:
        """What this piece adds."""
        reasoning: list[str] = []
        content: list[str] = []
        self._held += text
        state = None
        while state != self._state:  # a state takes what it can from the held text and may hand over to the next
            state = self._state
            delta = state()
            reasoning.append(delta.reasoning)
            content.append(delta.content)
        return ReasoningDelta("".join(reasoning), "".join(content))

    def finish(self) -> ReasoningDelta:
        """What was held back; no text may follow."""
        held, self._held = self._held, ""
        if self.in_reasoning:
            if self._state != self._reasoning:
                held = held.lstrip(SPACE)
            return ReasoningDelta(reasoning=held.rstrip(SPACE))
        return ReasoningDelta(content=held)

    def _undecided(self) -> ReasoningDelta:
        text = self._held.lstrip(SPACE)
        if text.startswith(THINK):
            self._held = text.removeprefix(THINK)
            self._state, self._has_opened = self._leading, True
        elif not THINK.startswith(text):
            self._state = self._content
        return ReasoningDelta()

    def _opening(self) -> ReasoningDelta:
        text = self._held.lstrip(SPACE)
        if text.startswith(THINK):
            self._held = text.removeprefix(THINK)
            self._state = self._leading
        elif not THINK.startswith(text):
            self._state = self._leading
        return ReasoningDelta()

    def _leading(self) -> ReasoningDelta:
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._reasoning
        return ReasoningDelta()

    def _reasoning(self) -> ReasoningDelta:
        reasoning, marker, rest = self._held.partition(END_THINK)
        if marker:
            self._held, self._state = rest, self._between
            return ReasoningDelta(reasoning=reasoning.rstrip(SPACE))
        sure = len(reasoning) - partial_end(reasoning, (END_THINK,))
        shown = reasoning[:sure].rstrip(SPACE)
        self._held = reasoning[len(shown) :]
        return ReasoningDelta(reasoning=shown)

    def _between(self) -> ReasoningDelta:
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._content
        return ReasoningDelta()

    def _content(self) -> ReasoningDelta:
        held, self._held = self._held, ""
        return ReasoningDelta(content=held)


class ReasoningTokens:
    """Counts the tokens of one answer that are reasoning: all up to and including the one that ends `</think>`.

    It looks at the bytes of each token by itself, so the count does not depend on how text was held back or cut, and
    never exceeds the number of tokens. Markers are ASCII, so bytes can be matched as Latin-1.
    """

    def __init__(self, start: Start) -> None:
        self._parser = ReasoningParser(start)
        self._pending = 0
        self.count = 0

    def observe(self, token: bytes) -> None:
        """Take the bytes of the next token; b"" for one that is not text."""
        if self._parser.is_undecided:
            self._pending += 1
        elif self._parser.in_reasoning:
            self.count += 1
        self._parser.push(token.decode("latin-1"))
        if self._pending and not self._parser.is_undecided:
            self.count += self._pending if self._parser.has_reasoning else 0
            self._pending = 0


def start_after(prompt_ids: Sequence[int], tokenizer: Tokenizer, template: str) -> Start:
    """Where an answer to this prompt starts. `template`: the text of the chat template that rendered it.

    Where the markers are control tokens, the last control token of the prompt decides, so neither a user's text nor an
    earlier turn can. Where they are plain text, a prompt that ends with one decides. A prompt that leaves it open is
    up to the model, if its template knows thinking at all.
    """
    tail: list[int] = []
    spellings = {id_: spelling for spelling, id_ in tokenizer.control_ids.items()}
    for id_ in reversed(prompt_ids):
        if id_ in spellings:
            if spellings[id_] in (THINK, END_THINK):
                return Start.OPEN if spellings[id_] == THINK else Start.CLOSED
            break
        tail.append(id_)
    if THINK not in tokenizer.control_ids:
        text = tokenizer.decode(reversed(tail), continuation=True).rstrip(SPACE)
        if text.endswith(THINK):
            return Start.OPEN
        if text.endswith(END_THINK):
            return Start.CLOSED
    return Start.MODEL if THINK in template or END_THINK in template else Start.CLOSED


def partial_end(text: str, markers: Collection[str]) -> int:
    """Length of the longest end of `text` that begins one of the markers without being all of it."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(marker) > length and marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
