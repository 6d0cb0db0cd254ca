"""/v1/chat/completions: from a checked request to one JSON answer or a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from msds.engine.async_engine import Update
from msds_serve.metrics import TokenClock
from msds_serve.protocol.answers import AnswerDelta, AnswerOptions, make_readers
from msds_serve.protocol.requests import ChatRequest
from msds_serve.protocol.responses import CachedTokens, Head, chat_choice, chat_completion, usage
from msds_serve.protocol.streaming import ChatStream, Chunk
from msds_serve.service import ChatPrompt, Service


class ChatRun:
    """One chat request under way: `prepare`, then either `answer` or `chunks`."""

    def __init__(self, service: Service, request: ChatRequest, head: Head) -> None:
        self._service = service
        self._request = request
        self._head = head
        self._stream: ChatStream | None = None

    @property
    def usage(self) -> dict[str, object] | None:
        """Token counts of the stream so far."""
        return None if self._stream is None else self._stream.usage

    async def prepare(self) -> ChatRun:
        """Check what the protocol cannot, render, and queue; everything that can be refused is refused here."""
        request = self._request
        self._service.check_model(request.model)
        self._service.check_count(request.params.n, "n")
        self._prompt: ChatPrompt = await self._service.chat_prompt(request)
        self._answers = AnswerOptions(
            token_bytes=self._service.tokenizer.token_bytes,
            start=self._prompt.start,
            layout=self._prompt.layout,
            parallel_tool_calls=request.parallel_tool_calls,
            include_reasoning=request.include_reasoning,
            top_logprobs=request.params.logprobs,
        )
        info = self._service.info(priority=request.priority, start=self._prompt.start)
        params = replace(request.params, constraint=self._prompt.constraint)
        self._updates = self._service.generate(self._prompt.token_ids, params, info, request.places)
        self._clock = TokenClock(self._service.metrics, len(self._prompt.token_ids))
        self._first = await anext(self._updates)
        return self

    async def answer(self) -> dict[str, object]:
        """The whole chat.completion."""
        request, num_choices = self._request, self._request.params.n
        readers = make_readers(self._answers, self._head.call_seed, num_choices)
        deltas: list[list[AnswerDelta]] = [[] for _ in range(num_choices)]
        reasons: dict[int, str] = {}
        cached, prompt_logprobs = CachedTokens(), None
        async for sequence, delta in self._all():
            choice = sequence.choice_index
            if choice in reasons:
                continue
            deltas[choice].append(readers[choice].push(delta.text, delta.token_ids, delta.token_logprobs))
            if delta.finish_reason is not None or readers[choice].is_done:
                reasons[choice] = delta.finish_reason or "stop"
                deltas[choice].append(readers[choice].finish())
                cached.saw(0, sequence.num_cached_tokens)
                prompt_logprobs = prompt_logprobs or sequence.prompt_logprobs
            if len(reasons) == num_choices:
                break
        choices = [
            chat_choice(
                index,
                readers[index],
                deltas[index],
                reasons[index],
                include_reasoning=request.include_reasoning,
                with_logprobs=request.params.logprobs is not None,
            )
            for index in range(num_choices)
        ]
        counts = usage(
            len(self._prompt.token_ids),
            sum(reader.completion_tokens for reader in readers),
            cached_tokens=cached.total,
            reasoning_tokens=sum(reader.reasoning_tokens for reader in readers),
        )
        shown = prompt_logprobs if request.params.prompt_logprobs is not None else None
        token_bytes = self._service.tokenizer.token_bytes
        return chat_completion(self._head, choices, counts, prompt_logprobs=shown, token_bytes=token_bytes)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The stream's chat.completion.chunk objects."""
        assert self._request.stream is not None
        self._stream = stream = ChatStream(
            self._head,
            self._answers,
            self._request.stream,
            num_choices=self._request.params.n,
            prompt_tokens=len(self._prompt.token_ids),
        )
        finished: set[int] = set()
        async for sequence, delta in self._all():
            choice = sequence.choice_index
            if choice in finished:
                continue
            stream.cached_tokens.saw(0, sequence.num_cached_tokens)
            for chunk in stream.push(choice, delta.text, delta.token_ids, delta.token_logprobs):
                yield chunk
            if delta.finish_reason is not None or stream.readers[choice].is_done:
                finished.add(choice)
                for chunk in stream.finish(choice, delta.finish_reason or "stop"):
                    yield chunk
            if len(finished) == self._request.params.n:
                break
        for chunk in stream.close():
            yield chunk

    async def close(self) -> None:
        """Give up what is still being generated."""
        await self._updates.aclose()

    async def _all(self) -> AsyncIterator[Update]:
        """Every update, the first again, each token counted."""
        update = self._first
        while True:
            if update[1].token_id is not None:
                self._clock.tick(update[0].id)
            yield update
            try:
                update = await anext(self._updates)
            except StopAsyncIteration:
                return
