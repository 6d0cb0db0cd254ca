"""One answer being generated: its tokens, its text, and when it ends. No tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msds.engine.sampler import Sampled, SequenceState, TokenLogprobs
from msds.sampling import SamplingParams
from msds.text.detokenizer import Detokenizer
from msds.text.stops import StopMatcher
from msds.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer, with OpenAI's names."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Output:
    """One finished answer.

    text: what the tokens say, cut before a stop string; empty without a tokenizer. token_ids: every generated id, the
    end token included. finish_reason: "stop" (end token or stop string), "length" (max_tokens or the context), or
    "error" (`error` says what broke; the tokens before it stand). logprobs: one per token, where asked for.
    prompt_logprobs: one per prompt token, None for the first, where asked for.
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


class GenerationSequence:
    """The state of one answer between steps."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        prompt_index: int,
        choice_index: int,
        max_tokens: int,
        eos_ids: Collection[int],
        vocab_size: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.prompt_index = prompt_index
        self.choice_index = choice_index
        self.max_tokens = max_tokens
        self.output_ids: list[int] = []
        self.num_computed = 0
        self.block_table: tuple[int, ...] = ()
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self.state = SequenceState(
            params,
            seed=seed,
            choice=choice_index,
            prompt_ids=prompt_ids,
            end_ids=() if params.ignore_eos else eos_ids,
            vocab_size=vocab_size,
        )
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens) if tokenizer else None
        )
        self._stops = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None

    def accept(self, sampled: Sampled) -> str:
        """Take the next token; returns the text that may be shown now. Sets finish_reason where the answer ends."""
        if sampled.error is not None:
            return self.fail(sampled.error)
        token = sampled.token_id
        self.output_ids.append(token)
        self.state.observe(token)
        if sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs)
        is_end = token in self._end_ids
        delta = ""
        if self._detokenizer is not None and (not is_end or self.params.include_stop_str_in_output):
            armed = len(self.output_ids) >= self.params.min_tokens
            delta = self._stops.push(self._detokenizer.push((token,)), armed=armed)
        if is_end or self._stops.stopped is not None:
            return self._finish("stop", delta)
        if len(self.output_ids) >= self.max_tokens:
            return self._finish("length", delta)
        self._text.append(delta)
        return delta

    def fail(self, message: str) -> str:
        """End this answer alone, keeping what was generated; returns the text that was held back."""
        self.error = message
        return self._finish("error", "")

    def output(self) -> Output:
        """The finished answer."""
        assert self.finish_reason is not None
        return Output(
            text="".join(self._text),
            token_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason,
            usage=Usage(len(self.prompt_ids), len(self.output_ids)),
            prompt_index=self.prompt_index,
            choice_index=self.choice_index,
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
            error=self.error,
        )

    def _finish(self, reason: str, delta: str) -> str:
        """Close the text: a cut character becomes one U+FFFD, what might have begun a stop string is text after all."""
        self.finish_reason = reason
        if self._stops.stopped is None:
            if self._detokenizer is not None:
                delta += self._stops.push(self._detokenizer.finish())
            if self._stops.stopped is None:
                delta += self._stops.finish()
        self._text.append(delta)
        return delta
