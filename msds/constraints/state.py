"""The state of one answer under its constraint: which tokens may come next, and whether it may or must end.

When the constraint is in force. After thinking, where the prompt leaves the model inside it or the model opens it
first; else from the first token. What thinking is, `ReasoningParser` decides, on the text and by the prompt's `Start`,
here as for the client, so the constraint holds for exactly what the client gets as content. Inside the thinking every
token is allowed but those that close it and go on in the same token. Between `</think>` and the answer there may be
whitespace, which is dropped from the content. While it is open whether the model thinks, both are allowed.

Where the answer may not end, no end-of-sequence token is allowed, inside the thinking neither: an answer that the
model ended is whole.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from msds.text.reasoning import END_THINK, SPACE, ReasoningParser, Start, partial_end

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from msds.constraints.grammars import TokenTable

Bools: TypeAlias = npt.NDArray[np.bool_]

MAX_SPACES = 64
"""Characters of whitespace between `</think>` and the answer at most."""


class ConstraintState:
    """Made by `CompiledGrammar.start`; `accept` each token as it becomes final. One thread at a time."""

    def __init__(self, table: TokenTable, matcher: LLMatcher, start: Start, hidden: Collection[int]) -> None:
        self._table = table
        self._matcher = matcher
        self._hidden = hidden
        # None once the answer has begun: from there on the grammar alone decides
        self._parser = None if start is Start.CLOSED else ReasoningParser(start)
        self._tail = ""  # of the text before the answer, as much as may begin a marker
        self._num_spaces = 0
        self._can_be_answer = True  # whether the undecided text so far is one that the grammar takes
        self._mask: Bools | None = None

    @property
    def mask(self) -> Bools:
        """Ids [T] that may come next, end tokens aside; shared, not to be written to. ConstraintError: it is stuck."""
        if self._mask is None:
            self._mask = self._next_mask()
        return self._mask

    @property
    def may_end(self) -> bool:
        """Whether the answer is whole as it stands."""
        in_force = self._parser is None or (self._parser.is_undecided and self._can_be_answer)
        return in_force and not self._matcher.is_error() and self._matcher.is_accepting()

    @property
    def must_end(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self._parser is None and self.may_end and not self.mask.any()

    def accept(self, token_id: int) -> None:
        """Take a token that `mask` allows. One that it does not allow makes the next `mask` fail."""
        if self._parser is None:
            self._matcher.consume_token(token_id)
        else:
            self._take_before_answer(self._parser, token_id)
        self._mask = None

    def copy(self) -> ConstraintState:
        """An independent state at the same place."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._parser = copy.deepcopy(self._parser)
        return other

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, are allowed from here. The state is not changed."""
        ahead = self.copy()
        for count, token_id in enumerate(token_ids):
            if token_id >= self._table.size or not ahead.mask[token_id]:
                return count
            ahead.accept(token_id)
        return len(token_ids)

    def _next_mask(self) -> Bools:
        if self._parser is None:
            return self._table.allowed_by(self._matcher)
        if self._parser.in_reasoning:
            return self._table.thinking(partial_end(self._tail, (END_THINK,)))
        if self._parser.is_undecided:
            opening = self._table.opening(len(self._tail.lstrip(SPACE)))
            return opening | self._table.allowed_by(self._matcher) if self._can_be_answer else opening
        answer = self._table.allowed_by(self._matcher)
        return answer | self._table.spaces if self._num_spaces < MAX_SPACES else answer

    def _take_before_answer(self, parser: ReasoningParser, token_id: int) -> None:
        if not (parser.is_undecided or parser.in_reasoning):
            self._take_after_thinking(token_id)
            return
        text = "" if token_id in self._hidden else self._table.pieces[token_id].decode("latin-1")
        was_undecided = parser.is_undecided
        parser.push(text)
        self._tail = (self._tail + text)[-len(END_THINK) :]
        if not was_undecided:
            return
        if parser.has_reasoning:  # what the grammar has seen of `<think>` was no answer
            self._matcher.reset()
            return
        self._can_be_answer = self._can_be_answer and self._fits(token_id)
        if self._can_be_answer or not parser.is_undecided:
            self._matcher.consume_token(token_id)
        if not parser.is_undecided:
            self._parser = None

    def _take_after_thinking(self, token_id: int) -> None:
        if self._table.spaces[token_id] and not self._fits(token_id):
            self._num_spaces += len(self._table.pieces[token_id])
            return
        self._parser = None
        self._matcher.consume_token(token_id)

    def _fits(self, token_id: int) -> bool:
        """Whether the grammar takes the token."""
        return self._matcher.validate_tokens([token_id]) == 1
