"""Answers as chunks of a stream, and the framing of server-sent events.

A stream is: per choice a first chunk with the role, deltas, one chunk with the finish reason; then, where asked for,
one chunk without choices that has the usage; then [DONE]. Where usage was asked for, it is null in all other chunks,
or what has been used so far with continuous_usage_stats. A failure after the first byte is an event with an OpenAI
error object, then [DONE]: never a silent end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msds_serve.protocol.answers import AnswerDelta, AnswerOptions, finish_reason, make_readers
from msds_serve.protocol.errors import ApiError
from msds_serve.protocol.logprobs import LegacyLogprobs
from msds_serve.protocol.requests import StreamOptions
from msds_serve.protocol.responses import CachedTokens, Head, join_legacy, usage

if TYPE_CHECKING:
    from msds.engine.sampler import TokenLogprobs

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"

Chunk = dict[str, Any]


def event(chunk: Mapping[str, Any]) -> bytes:
    """One server-sent event. A NaN or infinity in it is a bug, and raises ValueError instead of breaking clients."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event for a failure in the middle of a stream; the client's library raises it. [DONE] follows."""
    return event(error.body())


class _Stream:
    """What streams of both endpoints share: open choices, and usage while it grows."""

    kind: str

    def __init__(self, head: Head, options: StreamOptions, *, num_choices: int, prompt_tokens: int) -> None:
        self._head = head.as_object(self.kind)
        self._options = options
        self._open = set(range(num_choices))
        self._prompt_tokens = prompt_tokens
        self.cached_tokens = CachedTokens()

    @property
    def usage(self) -> dict[str, Any]:
        """What has been used so far; after the last token, the usage of the whole request."""
        completion_tokens, reasoning_tokens = self._counts()
        return usage(
            self._prompt_tokens,
            completion_tokens,
            cached_tokens=self.cached_tokens.total,
            reasoning_tokens=reasoning_tokens,
        )

    def close(self) -> list[Chunk]:
        """The usage chunk, where asked for. Every choice must be finished."""
        if self._open:
            raise RuntimeError(f"choices {sorted(self._open)} of the stream {self._head['id']} are not finished")
        return [self._head | {"choices": [], "usage": self.usage}] if self._options.include_usage else []

    def _counts(self) -> tuple[int, int | None]:
        raise NotImplementedError

    def _chunk(self, choice: Mapping[str, Any]) -> Chunk:
        chunk = self._head | {"choices": [dict(choice)]}
        if self._options.continuous_usage_stats:
            return chunk | {"usage": self.usage}
        return chunk | {"usage": None} if self._options.include_usage else chunk

    def _require_open(self, choice: int) -> None:
        if choice not in self._open:
            raise RuntimeError(f"choice {choice} of the stream {self._head['id']} is finished or does not exist")


class ChatStream(_Stream):
    """Turns what the engine produces into chat.completion.chunk objects, for choices that come interleaved."""

    kind = "chat.completion.chunk"

    def __init__(
        self, head: Head, answers: AnswerOptions, options: StreamOptions, *, num_choices: int, prompt_tokens: int
    ) -> None:
        super().__init__(head, options, num_choices=num_choices, prompt_tokens=prompt_tokens)
        self.readers = make_readers(answers, head.call_seed, num_choices)
        self._with_logprobs = answers.top_logprobs is not None
        self._begun: set[int] = set()
        self._held: dict[int, list[dict[str, Any]]] = {}  # log-probabilities whose text is still held back

    def push(
        self,
        choice: int,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> list[Chunk]:
        """Chunks for text that is final and the tokens that came with it; none when all of it is held back.

        When `readers[choice].is_done` is true afterwards, end this choice: abort it in the engine and `finish` it
        with "stop".
        """
        self._require_open(choice)
        return self._deltas(choice, self.readers[choice].push(text, token_ids, logprobs))

    def finish(self, choice: int, reason: str) -> list[Chunk]:
        """The last chunks of a choice, for the engine's finish reason; ApiError for "error"."""
        self._require_open(choice)
        finish_reason(reason)
        delta = self.readers[choice].finish()
        self._open.remove(choice)
        chunks = self._deltas(choice, delta, flush=True)
        return [*chunks, self._choice(choice, {}, None, self.readers[choice].finish_reason(reason))]

    def _counts(self) -> tuple[int, int | None]:
        return (
            sum(reader.completion_tokens for reader in self.readers),
            sum(reader.reasoning_tokens for reader in self.readers),
        )

    def _deltas(self, choice: int, delta: AnswerDelta, *, flush: bool = False) -> list[Chunk]:
        entries = self._held.pop(choice, []) + delta.logprobs
        first = choice not in self._begun
        if not delta and not (flush and (entries or first)):
            if entries:
                self._held[choice] = entries
            return []
        body: dict[str, Any] = {"role": "assistant"} if first else {}
        self._begun.add(choice)
        if delta.reasoning:
            body["reasoning_content"] = delta.reasoning
        if delta.content or (first and not delta.calls and not delta.reasoning):
            body["content"] = delta.content
        if delta.calls:
            body["tool_calls"] = _merge_calls(delta)
        return [self._choice(choice, body, entries, None)]

    def _choice(
        self, choice: int, delta: Mapping[str, Any], entries: list[dict[str, Any]] | None, reason: str | None
    ) -> Chunk:
        logprobs = {"content": entries, "refusal": None} if self._with_logprobs and entries is not None else None
        return self._chunk({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason})


class CompletionStream(_Stream):
    """Turns what the engine produces into text_completion chunks.

    Choices are numbered prompt * n + choice. prompt_tokens: of all prompts together. logprobs: one builder per choice,
    or None.
    """

    kind = "text_completion"

    def __init__(
        self,
        head: Head,
        options: StreamOptions,
        *,
        num_choices: int,
        prompt_tokens: int,
        logprobs: Sequence[LegacyLogprobs] | None = None,
    ) -> None:
        super().__init__(head, options, num_choices=num_choices, prompt_tokens=prompt_tokens)
        self._builders = logprobs
        self._held: dict[int, list[Mapping[str, Any]]] = {}
        self._completion_tokens = 0

    def echo(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None = None
    ) -> list[Chunk]:
        """The chunk with the prompt, before any `push`; its tokens are no completion tokens."""
        return self._text(choice, text, token_ids, logprobs)

    def push(
        self, choice: int, text: str, token_ids: Sequence[int] = (), logprobs: Sequence[TokenLogprobs] | None = None
    ) -> list[Chunk]:
        """Chunks for text that is final and the tokens that came with it."""
        self._completion_tokens += len(token_ids)
        return self._text(choice, text, token_ids, logprobs)

    def finish(self, choice: int, reason: str) -> list[Chunk]:
        """The last chunk of a choice, for the engine's finish reason; ApiError for "error"."""
        self._require_open(choice)
        word = finish_reason(reason)
        self._open.remove(choice)
        return [self._choice(choice, "", self._held.pop(choice, []), word)]

    def _counts(self) -> tuple[int, int | None]:
        return self._completion_tokens, None

    def _text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None
    ) -> list[Chunk]:
        self._require_open(choice)
        pieces = self._held.pop(choice, [])
        if self._builders is not None and token_ids:
            pieces.append(self._builders[choice].push(token_ids, logprobs or ()))
        if not text:
            if pieces:
                self._held[choice] = pieces
            return []
        return [self._choice(choice, text, pieces, None)]

    def _choice(self, choice: int, text: str, pieces: Sequence[Mapping[str, Any]], reason: str | None) -> Chunk:
        logprobs = join_legacy(pieces) if pieces else None
        return self._chunk({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason})


def _merge_calls(delta: AnswerDelta) -> list[dict[str, Any]]:
    """One entry per call: id, type and name with its first piece, arguments with every one."""
    entries: dict[int, dict[str, Any]] = {}
    for call in delta.calls:
        entry = entries.setdefault(call.index, {"index": call.index, "function": {"arguments": ""}})
        if call.id is not None:
            entry |= {"id": call.id, "type": "function"}
            entry["function"] = {"name": call.name, "arguments": ""}
        entry["function"]["arguments"] += call.arguments
    return list(entries.values())
