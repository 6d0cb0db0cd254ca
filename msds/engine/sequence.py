"""One answer being generated: its tokens, its text, and when it ends. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msds.engine.sampler import Sampled, SequenceState, TokenLogprobs
from msds.engine.speculation import Speculation
from msds.sampling import SamplingParams
from msds.text.detokenizer import Detokenizer
from msds.text.reasoning import Start
from msds.text.stops import StopMatcher
from msds.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer, with OpenAI's names. cached_tokens: prompt tokens that the prefix cache had."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Output:
    """One finished answer.

    text: what the tokens say, cut before a stop string; empty without a tokenizer. token_ids: every generated id, the
    end token included. finish_reason: "stop" (end token, stop string or a fulfilled constraint), "length" (max_tokens
    or the context), "abort" (given up by its owner), or "error" (`error` says what broke; the tokens before it stand).
    logprobs: one per token, where asked for. prompt_logprobs: one per prompt token, None for the first, likewise.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    prompt_index: int
    choice_index: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer: its token (None where it ended without one) and the text that became final.

    logprobs: of the token, where asked for. finish_reason: set on the last delta of an answer.
    """

    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: str | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token, or nothing."""
        return () if self.token_id is None else (self.token_id,)

    @property
    def token_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The log-probabilities of `token_ids`, where asked for."""
        return None if self.logprobs is None else (self.logprobs,)


Listener = Callable[["GenerationSequence", Delta], None]
"""Called by the engine's thread after each step of a sequence; what it raises ends the whole run."""


@dataclass(frozen=True)
class RequestInfo:
    """What a request says about all its sequences besides sampling.

    prompt_index: place among the prompts of one call. priority: lower goes first. deadline: monotonic seconds. start:
    where the prompt leaves the model, as a constraint must know; a chat's comes from `ChatFormat.start_of_answer`.
    """

    prompt_index: int = 0
    priority: int = 0
    deadline: float | None = None
    start: Start = Start.CLOSED


class GenerationSequence:
    """The state of one answer between steps; satisfies `schedule_types.Schedulable`.

    token_ids: prompt, then output. num_computed, block_table, replica, num_cached_tokens are the scheduler's.
    """

    def __init__(
        self,
        id: int,
        prompt_ids: Sequence[int],
        state: SequenceState,
        *,
        info: RequestInfo,
        choice_index: int,
        max_tokens: int,
        end_ids: Collection[int],
        tokenizer: Tokenizer | None,
        speculation: Speculation | None = None,
    ) -> None:
        params = state.params
        self.id = id
        self.params: SamplingParams = params
        self.state = state
        self.info = info
        self.choice_index = choice_index
        self.token_ids = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.max_total_tokens = self.num_prompt + max_tokens
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.replica = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self._speculation = speculation
        self._hidden_of = -1  # the position whose state the next is
        self._hidden: npt.NDArray[np.float32] | None = None
        self._end_ids = frozenset(end_ids) | frozenset(params.stop_token_ids)
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens) if tokenizer else None
        )
        self._stops = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def priority(self) -> int:
        """Lower goes first."""
        return self.info.priority

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds after which the answer is of no use."""
        return self.info.deadline

    @property
    def cache_salt(self) -> bytes:
        """One engine serves one model with one set of options, and clears its prefix cache when weights change."""
        return b""

    @property
    def allow_prefix_reuse(self) -> bool:
        """Logits of every prompt token need every prompt token computed."""
        return self.params.prompt_logprobs is None

    @property
    def num_lookahead(self) -> int:
        """Draft tokens for the next round: a draft stands on the state of the token before the last one."""
        if self._speculation is None or self.num_computed != len(self.token_ids) - 1:
            return 0
        return self._speculation.num_lookahead if self.hidden_of(self.num_computed - 1) is not None else 0

    def keep_hidden(self, position: int, hidden: npt.NDArray[np.float32]) -> None:
        """Remember the model's state [D] of the last token that was computed, for drafts and MTP entries."""
        if self._speculation is not None:
            self._hidden_of, self._hidden = position, hidden.copy()

    def hidden_of(self, position: int) -> npt.NDArray[np.float32] | None:
        """The state of the token at `position`, if it is the one that is remembered."""
        return self._hidden if position == self._hidden_of else None

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None

    def accept(self, sampled: Sampled) -> Delta:
        """Take the next token. Sets finish_reason where the answer ends."""
        if sampled.error is not None:
            return self.end("error", sampled.error)
        token = sampled.token_id
        self.token_ids.append(token)
        self.state.observe(token)
        if sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs)
        is_end = token in self._end_ids
        text = ""
        if self._detokenizer is not None and (not is_end or self.params.include_stop_str_in_output):
            armed = self.num_output >= self.params.min_tokens
            text = self._stops.push(self._detokenizer.push((token,)), armed=armed)
        if is_end or self._stops.stopped is not None or self.state.must_end:
            text = self._close("stop", text)
        elif len(self.token_ids) >= self.max_total_tokens:
            text = self._close("length", text)
        self._text.append(text)
        return Delta(token, text, sampled.logprobs, self.finish_reason)

    def end(self, reason: str, error: str | None = None) -> Delta:
        """End the answer without another token, keeping what was generated."""
        self.error = error
        text = self._close(reason, "")
        self._text.append(text)
        return Delta(None, text, None, reason)

    def output(self) -> Output:
        """The finished answer."""
        assert self.finish_reason is not None
        return Output(
            text="".join(self._text),
            token_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason,
            usage=Usage(self.num_prompt, self.num_output, self.num_cached_tokens),
            prompt_index=self.info.prompt_index,
            choice_index=self.choice_index,
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
            error=self.error,
        )

    def _close(self, reason: str, text: str) -> str:
        """The last text: a cut character becomes one U+FFFD, what might have begun a stop string is text after all."""
        self.finish_reason = reason
        if self._stops.stopped is None and self._detokenizer is not None:
            text += self._stops.push(self._detokenizer.finish())
        if self._stops.stopped is None:
            text += self._stops.finish()
        return text
