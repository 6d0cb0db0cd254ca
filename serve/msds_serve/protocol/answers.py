"""One chat answer: from the engine's text and tokens to reasoning, content, calls, finish reason and token counts.

Streaming and non-streaming read answers through the same object, which gives the same result however the text comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msds.text.reasoning import ReasoningParser, ReasoningTokens, Start
from msds.text.tools import CallDelta, Layout, ToolCallParser
from msds_serve.protocol.errors import server_error
from msds_serve.protocol.logprobs import TokenBytes, chat_entry

if TYPE_CHECKING:
    from msds.engine.sampler import TokenLogprobs


@dataclass(frozen=True)
class AnswerOptions:
    """How the answers of one request are read.

    start: where the rendered prompt leaves the model (`msds.text.reasoning.start_after`). layout: of its tool calls;
    None when the request offers no tools or chooses "none". top_logprobs: None for no log-probabilities.
    """

    token_bytes: TokenBytes
    start: Start = Start.CLOSED
    layout: Layout | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What one push adds; empty parts mean nothing."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerReader:
    """Reads one answer. `call_seed` makes the ids of its calls: the same seed, the same ids."""

    def __init__(self, options: AnswerOptions, call_seed: str) -> None:
        self._options = options
        self._reasoning = ReasoningParser(options.start)
        self._reasoning_tokens = ReasoningTokens(options.start)
        self._tools: ToolCallParser | None = None
        if options.layout is not None:
            limit = None if options.parallel_tool_calls else 1
            self._tools = ToolCallParser(options.layout, lambda index: call_id(call_seed, index), max_calls=limit)
        self._entries: list[TokenLogprobs] = []
        self._num_shown = 0
        self.completion_tokens = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far that are reasoning, the one that ends `</think>` included."""
        return self._reasoning_tokens.count

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning_content is a text rather than null."""
        return self._reasoning.has_reasoning

    @property
    def is_done(self) -> bool:
        """Whether the answer is over although the model may go on: the caller ends the generation, with "stop"."""
        return self._tools is not None and self._tools.is_done

    def push(
        self, text: str, token_ids: Sequence[int] = (), logprobs: Sequence[TokenLogprobs] | None = None
    ) -> AnswerDelta:
        """Take text that is final and the tokens that came with it; either may be empty."""
        for token_id in token_ids:
            self._reasoning_tokens.observe(self._options.token_bytes(token_id))
        self.completion_tokens += len(token_ids)
        self._entries += logprobs or ()
        split = self._reasoning.push(text)
        return self._delta(split.reasoning, split.content, finish=False)

    def finish(self) -> AnswerDelta:
        """What was held back."""
        split = self._reasoning.finish()
        return self._delta(split.reasoning, split.content, finish=True)

    def finish_reason(self, reason: str) -> str:
        """OpenAI's word for the engine's: "stop", "length", or "tool_calls" where the model stopped after calls.

        An answer that was cut ("length") stays so even if it holds calls: the last may be partial. "error" raises the
        500 that fails the request.
        """
        reason = finish_reason(reason)
        return "tool_calls" if reason == "stop" and self._tools is not None and self._tools.num_calls else reason

    def _delta(self, reasoning: str, content: str, *, finish: bool) -> AnswerDelta:
        calls: tuple[CallDelta, ...] = ()
        if self._tools is not None:
            pieces = [self._tools.push(content)] + ([self._tools.finish()] if finish else [])
            content = "".join(piece.content for piece in pieces)
            calls = tuple(call for piece in pieces for call in piece.calls)
        if not self._options.include_reasoning:
            reasoning = ""
        return AnswerDelta(reasoning, content, calls, self._take_logprobs(finish))

    def _take_logprobs(self, finish: bool) -> list[dict[str, Any]]:
        """Entries that may be shown now. Hidden reasoning hides its tokens too; they are the first of the answer."""
        if not self._options.include_reasoning:
            if self._reasoning.is_undecided and not finish:
                return []
            self._num_shown = max(self._num_shown, self.reasoning_tokens)
        shown, self._num_shown = self._entries[self._num_shown :], max(self._num_shown, len(self._entries))
        if self._options.top_logprobs is None:
            return []
        return [chat_entry(entry, self._options.token_bytes, self._options.top_logprobs) for entry in shown]


def make_readers(options: AnswerOptions, call_seed: str, num_choices: int) -> list[AnswerReader]:
    """A reader per choice of one request; the ids of their calls follow from the seed and the choice."""
    return [AnswerReader(options, f"{call_seed}.{choice}") for choice in range(num_choices)]


def call_id(seed: str, index: int) -> str:
    """ "call_" and 24 characters that follow from the seed and the number of the call."""
    return "call_" + hashlib.sha256(f"{seed}\0{index}".encode()).hexdigest()[:24]


def finish_reason(reason: str) -> str:
    """The engine's finish reason as a completion shows it; "error" raises the 500."""
    if reason not in ("stop", "length"):
        raise server_error("the numbers of this answer broke while it was generated; the log says why")
    return reason
