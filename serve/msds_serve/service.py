"""What the HTTP surface stands on: one model behind an AsyncEngine, and how requests become prompts for it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msds import __version__
from msds.constraints import Constraint
from msds.engine.async_engine import AsyncEngine, EngineStoppedError, Update
from msds.engine.engine import EXPIRED
from msds.engine.schedule_types import QueueFullError
from msds.engine.sequence import GenerationSequence, RequestInfo
from msds.errors import ConstraintError, ContextLengthError, OptionError, TokenizerError
from msds.llm import LLM
from msds.sampling import SamplingParams
from msds.text.chat_format import ChatFormat
from msds.text.reasoning import Start
from msds.text.tokenizer import Tokenizer
from msds.text.tools import Layout
from msds_serve.bodies import Bodies
from msds_serve.metrics import Metrics
from msds_serve.protocol.errors import (
    ApiError,
    Places,
    bad_request,
    context_length_exceeded,
    model_not_found,
    overloaded,
    server_error,
    timed_out,
    unavailable,
)
from msds_serve.protocol.fields import Limits
from msds_serve.protocol.requests import ChatRequest, TokenizeRequest
from msds_serve.protocol.responses import system_fingerprint
from msds_serve.protocol.tools import call_constraint

RETRY_AFTER_SECONDS = 5

_KEY = re.compile(r"[!-~]+")
_ORIGIN = re.compile(r"https?://[^/\s?#*]+")


@dataclass(frozen=True)
class ServiceOptions:
    """How the service behaves; engine options are the LLM's.

    model_names: names that requests may use, the first is the model's own. api_keys: empty for none needed.
    max_body_bytes: larger bodies are refused. request_timeout: seconds until a request is ended, None for never.
    stall_seconds: a step longer than this turns /ready to 503. drain_seconds: how long a stop waits for requests.
    cors_origins: web origins whose pages may use the service, such as https://chat.example.org, or "*"; empty for none.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    request_timeout: float | None = 600.0
    stall_seconds: float = 60.0
    drain_seconds: float = 30.0
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise OptionError(f"model_names is {self.model_names!r}: give at least one name, none of them empty")
        if any(not key for key in self.api_keys):
            raise OptionError("an API key is empty: leave it out, or every request would pass")
        if any(not _KEY.fullmatch(key) for key in self.api_keys):
            raise OptionError(
                "an API key holds a space or a character outside of ASCII, which no client can send in a header: use "
                "letters, digits and punctuation"
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise OptionError(
                    f"cors_origin is {origin!r}: give scheme, host and port alone, such as https://a.example, or *"
                )
        for name in ("max_body_bytes", "stall_seconds"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} is {getattr(self, name)!r}: it must be above 0")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise OptionError(
                f"request_timeout is {self.request_timeout!r}: it must be above 0, or None (on the command line 0) for "
                "no limit"
            )
        if not 0 <= self.drain_seconds < math.inf:
            raise OptionError(f"drain_seconds is {self.drain_seconds!r}: it must be a number of at least 0")


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation: its token ids, where they leave the model, the layout of calls to read, and what the
    answer must be."""

    token_ids: list[int]
    start: Start
    layout: Layout | None
    constraint: Constraint | None


class Service:
    """One LLM, served. `start` before the first request, `stop` after the last."""

    def __init__(self, llm: LLM, options: ServiceOptions) -> None:
        self.llm = llm
        self.options = options
        self.engine = AsyncEngine(llm.engine, update=llm.update_weights)
        self.metrics = Metrics(self)
        self.created = int(time.time())
        self.is_draining = False
        self.is_warm = False
        self.bodies = Bodies(options.max_body_bytes)
        self.limits = Limits(max_prompt_ids=4 * max(llm.max_model_len, 1024))
        self._chat = self._open_chat()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ApiError 400 where it has none."""
        tokenizer = self.llm.model.tokenizer
        if tokenizer is None:
            raise bad_request("this model has no tokenizer: only prompts of token ids can be served", param="prompt")
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """Changes when anything does that can change a seeded answer."""
        model = self.llm.model
        parts = {"msds": __version__, "config": model.config, "dtype": model.dtype, "plan": model.plan}
        return system_fingerprint(
            parts | {"weights": self.llm.num_weight_updates, "deterministic": self.llm.options.deterministic}
        )

    @property
    def unready_reason(self) -> str | None:
        """Why requests cannot be served now, or None."""
        if self.is_draining:
            return "the server is shutting down"
        if not self.engine.is_alive:
            failure = self.engine.failure
            return "the engine is not running" if failure is None else f"the engine is not running: {failure}"
        if not self.is_warm:
            return "the server is warming up"
        if self.engine.seconds_since_turn > self.options.stall_seconds:
            return f"the engine has been in one step for {self.engine.seconds_since_turn:.0f} s"
        return None

    def start(self) -> None:
        """Start the engine. Shapes that were not warmed up compile on first use."""
        self.engine.start()
        self.is_warm = True

    async def stop(self) -> None:
        """Refuse new requests, wait for running ones, stop the engine."""
        self.is_draining = True
        await self.engine.stop(drain_seconds=self.options.drain_seconds)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a model that is not served here."""
        if name is not None and name not in self.options.model_names:
            raise model_not_found(name, self.options.model_names)

    def check_count(self, answers: int, field: str) -> None:
        """ApiError 400 for more answers in one request than may ever wait: a retry would not help."""
        most = self.llm.options.max_waiting
        if most is not None and answers > most:
            raise bad_request(
                f"the request asks for {answers} answers, but at most {most} may wait: ask for fewer", param=field
            )

    def check_length(self, characters: int, field: str) -> None:
        """ApiError 400 for a text so long that no tokens of it fit, before seconds are spent on counting them.

        A token has at most as many characters as bytes, and a normaliser makes at most four characters into one.
        """
        most = 4 * self.llm.max_model_len * self._longest_token
        if characters > most:
            raise bad_request(
                f"the prompt has {characters} characters, far more than the context of {self.llm.max_model_len} tokens "
                "holds; shorten the prompt",
                param=field,
                code="context_length_exceeded",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes."""
        return max(len(self.tokenizer.token_bytes(id_)) for id_ in range(self.llm.model.config.vocab_size))

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """ApiError 400 for ids that the model does not have. field: where they stand."""
        size = self.llm.model.config.vocab_size
        for position, id_ in enumerate(token_ids if max(token_ids, default=0) >= size else ()):
            if id_ >= size:
                place = f"{field}[{position}]"
                raise bad_request(f"{place} is {id_}; the model has the tokens 0 to {size - 1}", param=place)

    def encode(self, request: TokenizeRequest) -> list[int]:
        """The token ids of a text or a conversation; ApiError or PromptError where there can be none."""
        if request.messages is None:
            text = request.prompt or ""
            self.check_length(len(text), "prompt")
            return self.tokenizer.encode(text, bos=request.add_special_tokens)
        return self._encode_chat(request, request.messages, request.tools)

    async def chat_prompt(self, request: ChatRequest) -> ChatPrompt:
        """Render and encode a conversation off the event loop. ApiError or PromptError for what cannot be rendered."""
        return await asyncio.to_thread(self._chat_prompt, request)

    @property
    def chat(self) -> ChatFormat:
        """How conversations are written; ApiError 400 where the model has no chat template."""
        if self._chat is None:
            raise bad_request("this model has no chat template: use /v1/completions", param="messages")
        return self._chat

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        info: RequestInfo,
        places: Places,
    ) -> AsyncGenerator[Update, None]:
        """The deltas of one prompt's answers. ApiError for what the engine refuses, and for answers that break.

        places: the request's fields that all this comes from.
        """
        updates = self.engine.generate(prompt_ids, params, info)
        try:
            async for sequence, delta in updates:
                if delta.finish_reason == "error":
                    raise self._failure(sequence, places)
                yield sequence, delta
        except ConstraintError as error:
            raise _unkept(str(error), places) from None
        except ContextLengthError as error:
            raise context_length_exceeded(error, places) from None
        except QueueFullError as error:
            raise overloaded(
                waiting=error.num_waiting,
                asked=error.num_new,
                limit=error.max_waiting,
                retry_after_seconds=RETRY_AFTER_SECONDS,
            ) from None
        except OptionError as error:
            raise bad_request(str(error)) from None
        except EngineStoppedError as error:
            raise unavailable(str(error), RETRY_AFTER_SECONDS) from None
        finally:
            await updates.aclose()  # aborts what is left

    def info(self, *, prompt_index: int = 0, priority: int = 0, start: Start = Start.CLOSED) -> RequestInfo:
        """What the engine should know of a request that arrives now."""
        timeout = self.options.request_timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        return RequestInfo(prompt_index=prompt_index, priority=priority, deadline=deadline, start=start)

    async def check_constraint(self, params: SamplingParams, places: Places) -> None:
        """ApiError 400 for a constraint that cannot be kept. Compiled, it is kept for the prompts of the request."""
        if params.constraint is None:
            return
        try:
            await asyncio.to_thread(self.engine.engine.compile, params.constraint)
        except ConstraintError as error:
            raise _unkept(str(error), places) from None

    def _failure(self, sequence: GenerationSequence, places: Places) -> ApiError:
        if sequence.error == EXPIRED and self.options.request_timeout is not None:
            return timed_out(self.options.request_timeout)
        if sequence.error is not None and sequence.error.startswith("the constraint "):
            return _unkept(sequence.error, places)
        return server_error(sequence.error or "the answer broke off")

    def _open_chat(self) -> ChatFormat | None:
        try:
            return self.llm.model.chat
        except TokenizerError:
            return None  # a base model, or none with a tokenizer: completions only

    def _encode_chat(
        self,
        request: ChatRequest | TokenizeRequest,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        self.check_length(_characters(messages), "messages")
        return self.chat.encode(
            messages,
            tools=tools or None,
            add_generation_prompt=request.add_generation_prompt,
            template_kwargs=request.template_kwargs,
        )

    def _chat_prompt(self, request: ChatRequest) -> ChatPrompt:
        tools = request.tools if request.tool_choice.kind != "none" else ()
        ids = self._encode_chat(request, request.messages, tools)
        start = self.chat.start_of_answer(ids, with_tools=bool(tools))
        layout, constraint = self.chat.layout if tools else None, request.params.constraint
        if layout is not None:
            parallel = request.parallel_tool_calls
            constraint = call_constraint(layout, tools, request.tool_choice, parallel=parallel, otherwise=constraint)
        return ChatPrompt(ids, start, layout, constraint)


def _unkept(reason: str, places: Places) -> ApiError:
    """400 for a constraint that cannot be kept."""
    if reason.startswith("tools["):
        return bad_request(reason, param="tools")
    return bad_request(f"{places.constraint or 'tools'}: {reason}", param=places.constraint or "tools")


def _characters(value: object) -> int:
    """Of all strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(part) for part in value.values())
    if isinstance(value, Sequence):
        return sum(_characters(part) for part in value)
    return 0
