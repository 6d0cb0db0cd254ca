"""/v1/completions: one or several prompts, each with `n` answers, as one JSON answer or a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from msds.engine.async_engine import Update
from msds.engine.sequence import GenerationSequence
from msds_serve.metrics import TokenClock
from msds_serve.protocol.errors import bad_request
from msds_serve.protocol.logprobs import LegacyLogprobs, prompt_entries
from msds_serve.protocol.requests import CompletionRequest
from msds_serve.protocol.responses import CachedTokens, Head, completion, completion_choice, join_legacy, usage
from msds_serve.protocol.streaming import Chunk, CompletionStream
from msds_serve.service import Service


class CompletionRun:
    """One completions request under way: `prepare`, then either `answer` or `chunks`."""

    def __init__(self, service: Service, request: CompletionRequest, head: Head) -> None:
        self._service = service
        self._request = request
        self._head = head
        self._clocks: dict[int, TokenClock] = {}
        self._stream: CompletionStream | None = None
        self._num_choices = len(request.prompts) * request.params.n

    @property
    def usage(self) -> dict[str, object] | None:
        """Token counts of the stream so far."""
        return None if self._stream is None else self._stream.usage

    async def prepare(self) -> CompletionRun:
        """Encode and queue; everything that can be refused is refused here."""
        request = self._request
        self._service.check_model(request.model)
        self._service.check_count(self._num_choices, "prompt" if len(request.prompts) > 1 else "n")
        await self._service.check_constraint(request.params, request.places)
        self._prompts = await asyncio.to_thread(
            lambda: [self._encode(*prompt) for prompt in enumerate(request.prompts)]
        )
        self._sources = []
        for index, ids in enumerate(self._prompts):
            info = self._service.info(prompt_index=index, priority=request.priority)
            places = replace(request.places, prompt=self._field(index))
            source = self._service.generate(ids, request.params, info, places)
            self._sources.append(source)
            self._clocks[index] = TokenClock(self._service.metrics, len(ids))
        self._updates: asyncio.Queue[Update | BaseException | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(source)) for source in self._sources]
        try:
            self._first = await self._next()
        except BaseException:
            await self.close()
            raise
        return self

    async def answer(self) -> dict[str, object]:
        """The whole text_completion."""
        request = self._request
        texts = [""] * self._num_choices
        pieces: list[list[Any]] = [[] for _ in texts]
        begun: set[int] = set()
        finished: dict[int, GenerationSequence] = {}
        builders = self._builders()
        async for sequence, delta in self._all():
            choice = self._choice(sequence)
            if request.echo and choice not in begun:
                ids = self._prompts[sequence.info.prompt_index]
                texts[choice] = self._prompt_text(ids)
                if builders is not None:
                    pieces[choice].append(builders[choice].push(ids, sequence.prompt_logprobs))
            begun.add(choice)
            texts[choice] += delta.text
            if builders is not None and delta.token_logprobs is not None:
                pieces[choice].append(builders[choice].push(delta.token_ids, delta.token_logprobs))
            if delta.finish_reason is not None:
                finished[choice] = sequence
        choices = []
        for index, text in enumerate(texts):
            logprobs = join_legacy(pieces[index]) if builders is not None else None
            reason = finished[index].finish_reason
            assert reason is not None
            choice_body = completion_choice(index, text, reason, logprobs=logprobs)
            if request.show_prompt_logprobs:
                token_bytes = self._service.tokenizer.token_bytes
                choice_body["prompt_logprobs"] = prompt_entries(finished[index].prompt_logprobs, token_bytes)
            choices.append(choice_body)
        prompt_tokens = sum(len(ids) for ids in self._prompts)
        completion_tokens = sum(sequence.num_output for sequence in finished.values())
        cached = CachedTokens()
        for sequence in finished.values():
            cached.saw(sequence.info.prompt_index, sequence.num_cached_tokens)
        counts = usage(prompt_tokens, completion_tokens, cached_tokens=cached.total)
        return completion(self._head, choices, counts)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The stream's text_completion objects."""
        request = self._request
        assert request.stream is not None
        self._stream = stream = CompletionStream(
            self._head,
            request.stream,
            num_choices=self._num_choices,
            logprobs=self._builders(),
            prompt_tokens=sum(len(ids) for ids in self._prompts),
        )
        begun: set[int] = set()
        async for sequence, delta in self._all():
            choice = self._choice(sequence)
            stream.cached_tokens.saw(sequence.info.prompt_index, sequence.num_cached_tokens)
            if choice not in begun:
                begun.add(choice)
                if request.echo:
                    ids = self._prompts[sequence.info.prompt_index]
                    for chunk in stream.echo(choice, self._prompt_text(ids), ids, sequence.prompt_logprobs or None):
                        yield chunk
            for chunk in stream.push(choice, delta.text, delta.token_ids, delta.token_logprobs):
                yield chunk
            if delta.finish_reason is not None:
                for chunk in stream.finish(choice, delta.finish_reason):
                    yield chunk
        for chunk in stream.close():
            yield chunk

    async def close(self) -> None:
        """Give up what is still being generated."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _encode(self, index: int, prompt: str | tuple[int, ...]) -> list[int]:
        field = self._field(index)
        if isinstance(prompt, str):
            self._service.check_length(len(prompt), field)
            ids = self._service.tokenizer.encode(prompt, bos=self._request.add_special_tokens)
            if not ids:
                raise bad_request(f"{field} is empty and this model has no token to begin with", param=field)
            return ids
        self._service.check_ids(prompt, field)
        return list(prompt)

    def _field(self, index: int) -> str:
        """Where a prompt stands in the request."""
        return "prompt" if len(self._request.prompts) == 1 else f"prompt[{index}]"

    def _prompt_text(self, ids: list[int]) -> str:
        skip = self._request.params.skip_special_tokens
        return self._service.tokenizer.decode(ids, skip_special_tokens=skip)

    def _builders(self) -> list[LegacyLogprobs] | None:
        """One per choice, where log-probabilities are asked for."""
        if self._request.legacy_logprobs is None:
            return None
        tokenizer = self._service.tokenizer
        hidden = tokenizer.special_ids if self._request.params.skip_special_tokens else frozenset[int]()
        top = self._request.legacy_logprobs
        return [LegacyLogprobs(tokenizer.token_bytes, top, hidden) for _ in range(self._num_choices)]

    def _choice(self, sequence: GenerationSequence) -> int:
        return sequence.info.prompt_index * self._request.params.n + sequence.choice_index

    async def _pump(self, source: AsyncIterator[Update]) -> None:
        try:
            async for update in source:
                self._updates.put_nowait(update)
            self._updates.put_nowait(None)
        except Exception as error:
            self._updates.put_nowait(error)

    async def _next(self) -> Update | None:
        """The next update of any prompt; None when a prompt has ended. Raises what a prompt raised."""
        update = await self._updates.get()
        if isinstance(update, BaseException):
            raise update
        return update

    async def _all(self) -> AsyncIterator[Update]:
        open_prompts, update = len(self._prompts), self._first
        while open_prompts:
            if update is None:
                open_prompts -= 1
            else:
                if update[1].token_id is not None:
                    self._clocks[update[0].info.prompt_index].tick(update[0].id)
                yield update
            if open_prompts:
                update = await self._next()
