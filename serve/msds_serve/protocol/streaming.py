"""Answers as chunks of a stream, and the framing of server-sent events.

A stream is: per choice a first chunk with the role, deltas, one chunk with the finish reason; then, where asked for,
one chunk without choices that has the usage; then [DONE]. Where usage was asked for, it is null in all other chunks,
or what has been used so far with continuous_usage_stats. A failure after the first byte is an event with an OpenAI
error object, then [DONE]: never a silent end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msds.engine.sampler import TokenLogprobs
from msds_serve.protocol.answers import AnswerDelta, AnswerOptions, AnswerReader, finish_reason
from msds_serve.protocol.errors import ApiError
from msds_serve.protocol.logprobs import LegacyLogprobs
from msds_serve.protocol.requests import StreamOptions
from msds_serve.protocol.responses import Head, join_legacy, usage

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"

Chunk = dict[str, Any]


def event(chunk: Mapping[str, Any]) -> bytes:
    """One server-sent event. A NaN or infinity in it is a bug, and raises ValueError instead of breaking clients."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event for a failure in the middle of a stream; the client's library raises it. [DONE] follows."""
    return event(error.body())


class _Usage:
    """Counts of a stream while it runs."""

    def __init__(self, options: StreamOptions, prompt_tokens: int, cached_tokens: int) -> None:
        self._options = options
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens

    def total(self, completion_tokens: int, reasoning_tokens: int | None) -> dict[str, Any]:
        return usage(
            self._prompt_tokens,
            completion_tokens,
            cached_tokens=self._cached_tokens,
            reasoning_tokens=reasoning_tokens,
        )

    def in_chunk(self, total: Mapping[str, Any]) -> Chunk:
        """What a chunk with choices says of usage."""
        if self._options.continuous_usage_stats:
            return {"usage": total}
        return {"usage": None} if self._options.include_usage else {}

    def last(self, chunk: Chunk, total: Mapping[str, Any]) -> list[Chunk]:
        """The chunk after all choices, if it was asked for."""
        return [chunk | {"choices": [], "usage": total}] if self._options.include_usage else []


class ChatStream:
    """Turns what the engine produces into chat.completion.chunk objects, for choices that come interleaved.

    prompt_tokens, cached_tokens: of the one prompt that all choices share. The ids of tool calls follow from the
    response id and the choice.
    """

    def __init__(
        self,
        head: Head,
        answers: AnswerOptions,
        options: StreamOptions,
        *,
        num_choices: int,
        prompt_tokens: int,
        cached_tokens: int = 0,
    ) -> None:
        self._head = head
        self._answers = answers
        self.readers = [AnswerReader(answers, f"{head.id}.{index}") for index in range(num_choices)]
        self._open = set(range(num_choices))
        self._begun: set[int] = set()
        self._held: dict[int, list[dict[str, Any]]] = {}  # log-probabilities whose text is still held back
        self._usage = _Usage(options, prompt_tokens, cached_tokens)

    @property
    def usage(self) -> dict[str, Any]:
        """What has been used so far; after the last token, the usage of the whole request."""
        return self._usage.total(
            sum(reader.completion_tokens for reader in self.readers),
            sum(reader.reasoning_tokens for reader in self.readers),
        )

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
        reason = self.readers[choice].finish_reason(reason)
        delta = self.readers[choice].finish()
        reason = self.readers[choice].finish_reason("stop") if reason == "stop" else reason
        self._open.remove(choice)
        chunks = self._deltas(choice, delta, flush=True)
        return [*chunks, self._chunk(choice, {}, None, reason)]

    def close(self) -> list[Chunk]:
        """The usage chunk, where asked for. Every choice must be finished."""
        if self._open:
            raise RuntimeError(f"choices {sorted(self._open)} of the stream {self._head.id} are not finished")
        return self._usage.last(self._head.as_object("chat.completion.chunk"), self.usage)

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
        return [self._chunk(choice, body, entries, None)]

    def _chunk(
        self, choice: int, delta: Mapping[str, Any], entries: list[dict[str, Any]] | None, reason: str | None
    ) -> Chunk:
        logprobs = None
        if self._answers.top_logprobs is not None and entries is not None:
            logprobs = {"content": entries, "refusal": None}
        body = {"index": choice, "delta": dict(delta), "logprobs": logprobs, "finish_reason": reason}
        head = self._head.as_object("chat.completion.chunk")
        return head | {"choices": [body]} | self._usage.in_chunk(self.usage)

    def _require_open(self, choice: int) -> None:
        if choice not in self._open:
            raise RuntimeError(f"choice {choice} of the stream {self._head.id} is finished or does not exist")


class CompletionStream:
    """Turns what the engine produces into text_completion chunks.

    Choices are numbered prompt * n + choice. prompt_tokens, cached_tokens: summed over the prompts. logprobs: one
    builder per choice, or None.
    """

    def __init__(
        self,
        head: Head,
        options: StreamOptions,
        *,
        num_choices: int,
        prompt_tokens: int,
        cached_tokens: int = 0,
        logprobs: Sequence[LegacyLogprobs] | None = None,
    ) -> None:
        self._head = head
        self._builders = logprobs
        self._open = set(range(num_choices))
        self._held: dict[int, list[Mapping[str, Any]]] = {}
        self._completion_tokens = 0
        self._usage = _Usage(options, prompt_tokens, cached_tokens)

    @property
    def usage(self) -> dict[str, Any]:
        """What has been used so far."""
        return self._usage.total(self._completion_tokens, None)

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
        return [self._chunk(choice, "", self._held.pop(choice, []), word)]

    def close(self) -> list[Chunk]:
        """The usage chunk, where asked for. Every choice must be finished."""
        if self._open:
            raise RuntimeError(f"choices {sorted(self._open)} of the stream {self._head.id} are not finished")
        return self._usage.last(self._head.as_object("text_completion"), self.usage)

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
        return [self._chunk(choice, text, pieces, None)]

    def _chunk(self, choice: int, text: str, pieces: Sequence[Mapping[str, Any]], reason: str | None) -> Chunk:
        logprobs = join_legacy(pieces) if pieces else None
        body = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        head = self._head.as_object("text_completion")
        return head | {"choices": [body]} | self._usage.in_chunk(self.usage)

    def _require_open(self, choice: int) -> None:
        if choice not in self._open:
            raise RuntimeError(f"choice {choice} of the stream {self._head.id} is finished or does not exist")


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
