"""Request bodies, from bytes to frozen dataclasses. Whatever the bytes are, the outcome is a request or a 400."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from msds.config import GenerationConfig
from msds.errors import SamplingError
from msds.sampling import SamplingParams
from msds.text.chat import GIVEN
from msds_serve.protocol.errors import Places, bad_request, clip, from_exception
from msds_serve.protocol.fields import Limits, chat_table, completion_table, detokenize_table, tokenize_table
from msds_serve.protocol.tools import ToolChoice, settle_choice

COMPLETION_MAX_TOKENS = 16
"""Default of /v1/completions, as OpenAI documents it; chat takes the rest of the context."""

_MAX_DIGITS = 1000

# fields that mean in SamplingParams what they mean here
_SAMPLING_FIELDS = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logit_bias"),
    *("skip_special_tokens", "prompt_logprobs"),
)


@dataclass(frozen=True)
class StreamOptions:
    """How a stream reports usage: in a last chunk of its own, and in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A checked /v1/chat/completions body. stream: None for one JSON answer.

    logprobs and a constraint are asked for through `params`; `places` says by which fields.
    tools are as they came, for the template; `tool_choice` is settled, so "none" also stands for no tools. With "none"
    the template gets no tools and no calls are parsed.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...]
    params: SamplingParams
    stream: StreamOptions | None
    tools: tuple[Mapping[str, Any], ...]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    places: Places
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    include_reasoning: bool
    priority: int


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A checked /v1/completions body: prompts are texts or tuples of ids; choices number prompts times params.n.

    `legacy_logprobs` is what the answer's logprobs object shows; `params.prompt_logprobs` also covers echo.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    params: SamplingParams
    stream: StreamOptions | None
    echo: bool
    legacy_logprobs: int | None
    show_prompt_logprobs: bool
    add_special_tokens: bool
    places: Places
    priority: int


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest:
    """A checked /tokenize body: either `prompt` or `messages` is given."""

    model: str | None
    prompt: str | None
    messages: tuple[Mapping[str, Any], ...] | None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    return_token_strs: bool = False


@dataclass(frozen=True, kw_only=True)
class DetokenizeRequest:
    """A checked /detokenize body."""

    model: str | None
    tokens: tuple[int, ...]
    skip_special_tokens: bool = False


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object in a body: UTF-8, finite numbers, no key twice, and no lone surrogate anywhere."""
    try:
        body = json.loads(
            data.decode("utf-8"), parse_int=_integer, parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, not {clip(body)}")
    if b"\\u" in data:  # JSON's only way to spell a surrogate
        _require_unicode(body)
    return body


def parse_chat(
    body: Mapping[str, Any], *, generation: GenerationConfig | None = None, limits: Limits | None = None
) -> ChatRequest:
    """A chat request. generation: the checkpoint's sampling defaults. ApiError 400 names the field that is wrong."""
    values = chat_table(limits or Limits()).read(body)
    older, newer = values.get("max_tokens"), values.get("max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        raise bad_request(
            f"max_tokens is {older} and max_completion_tokens is {newer}; give one of them", param="max_tokens"
        )
    limit_field = "max_completion_tokens" if older is None else "max_tokens"
    top = values.get("top_logprobs")
    if top is not None and not values.get("logprobs"):
        raise bad_request(f"top_logprobs is {top}, but logprobs is not true", param="top_logprobs")
    stream = _stream_options(values)
    tools = values.get("tools", ())
    choice = settle_choice(values.get("tool_choice"), tools)
    constraint_field = _constraint_field(values)
    if constraint_field is not None and choice.forces_call:
        raise bad_request(
            f"{constraint_field} and a tool_choice that forces a call contradict each other; give one of them",
            param=constraint_field,
        )
    return ChatRequest(
        model=values["model"],
        messages=values["messages"],
        params=_params(
            values,
            generation,
            limit_field=limit_field,
            max_tokens=values.get(limit_field),
            logprobs=(top or 0) if values.get("logprobs") else None,
        ),
        stream=stream,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=values.get("parallel_tool_calls", True),
        places=Places("messages", limit_field, constraint_field),
        template_kwargs=_template_kwargs(values),
        add_generation_prompt=values.get("add_generation_prompt", True),
        include_reasoning=values.get("include_reasoning", True),
        priority=values.get("priority", 0),
    )


def parse_completion(
    body: Mapping[str, Any], *, generation: GenerationConfig | None = None, limits: Limits | None = None
) -> CompletionRequest:
    """A completions request; as `parse_chat`."""
    limits = limits or Limits()
    values = completion_table(limits).read(body)
    prompts = values["prompt"]
    answers = len(prompts) * values.get("n", 1)
    if answers > limits.max_answers:
        raise bad_request(
            f"{len(prompts)} prompts with n {values.get('n', 1)} are {answers} answers; the limit is "
            f"{limits.max_answers}",
            param="n",
        )
    stream = _stream_options(values)
    legacy = values.get("logprobs")
    echo = values.get("echo", False)
    asked = values.get("prompt_logprobs")
    if echo and legacy is not None:
        values["prompt_logprobs"] = max(legacy, asked or 0)
    return CompletionRequest(
        model=values["model"],
        prompts=prompts,
        params=_params(
            values,
            generation,
            limit_field="max_tokens",
            max_tokens=values.get("max_tokens", COMPLETION_MAX_TOKENS),
            logprobs=legacy,
        ),
        stream=stream,
        echo=echo,
        legacy_logprobs=legacy,
        show_prompt_logprobs=asked is not None,
        add_special_tokens=values.get("add_special_tokens", True),
        places=Places("prompt", "max_tokens", _constraint_field(values), is_default="max_tokens" not in values),
        priority=values.get("priority", 0),
    )


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """A tokenize request."""
    values = tokenize_table().read(body)
    if ("prompt" in values) == ("messages" in values):
        raise bad_request("give either prompt or messages", param="prompt")
    only_chat = ("tools", "chat_template_kwargs", "add_generation_prompt")
    wrong = only_chat if "prompt" in values else ("add_special_tokens",)
    for name in wrong:
        if name in values:
            raise bad_request(f"{name} does not go with {'prompt' if 'prompt' in values else 'messages'}", param=name)
    return TokenizeRequest(
        model=values.get("model"),
        prompt=values.get("prompt"),
        messages=values.get("messages"),
        tools=values.get("tools", ()),
        template_kwargs=_template_kwargs(values),
        add_generation_prompt=values.get("add_generation_prompt", True),
        add_special_tokens=values.get("add_special_tokens", True),
        return_token_strs=values.get("return_token_strs", False),
    )


def parse_detokenize(body: Mapping[str, Any], *, limits: Limits | None = None) -> DetokenizeRequest:
    """A detokenize request."""
    values = detokenize_table(limits or Limits()).read(body)
    return DetokenizeRequest(
        model=values.get("model"),
        tokens=values["tokens"],
        skip_special_tokens=values.get("skip_special_tokens", False),
    )


def _params(
    values: Mapping[str, Any],
    generation: GenerationConfig | None,
    *,
    limit_field: str,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    least = values.get("min_tokens", 0)
    if max_tokens is not None and least > max_tokens:
        raise bad_request(
            f"min_tokens is {least}, more than {limit_field}, which is {max_tokens}"
            + ("" if limit_field in values else " by default"),
            param="min_tokens",
        )
    given = {name: values[name] for name in _SAMPLING_FIELDS if name in values}
    field = _constraint_field(values)
    constraint = None if field is None else values[field]
    try:
        return SamplingParams.from_generation_config(
            generation or GenerationConfig(), **given, max_tokens=max_tokens, logprobs=logprobs, constraint=constraint
        )
    except SamplingError as error:
        raise from_exception(error) from None


def _constraint_field(values: Mapping[str, Any]) -> str | None:
    """The field that constrains the text; a response_format of text does not."""
    given = [name for name in ("response_format", "structured_outputs") if values.get(name) is not None]
    if len(given) == 2:
        raise bad_request("response_format and structured_outputs are given; give one of them", param=given[1])
    return given[0] if given else None


def _stream_options(values: Mapping[str, Any]) -> StreamOptions | None:
    streams = values.get("stream", False)
    options = values.get("stream_options")
    if options is not None and not streams:
        raise bad_request("stream_options is given, but stream is not true", param="stream_options")
    if not streams:
        return None
    if values.get("prompt_logprobs") is not None:
        raise bad_request("prompt_logprobs does not go with stream; leave one of them out", param="prompt_logprobs")
    options = dict(options or {})
    if options.pop("include_obfuscation", False):
        place = "stream_options.include_obfuscation"
        raise bad_request(f"{place} is not supported; leave it out or false", param=place)
    return StreamOptions(**options)


def _template_kwargs(values: Mapping[str, Any]) -> Mapping[str, Any]:
    kwargs: Mapping[str, Any] = values.get("chat_template_kwargs", {})
    for name in GIVEN:
        if name in kwargs:
            raise bad_request(
                f"chat_template_kwargs must not set {name}, which the server gives to the template",
                param=f"chat_template_kwargs.{name}",
            )
    return kwargs


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:  # Python takes time that grows with their square, and refuses thousands
        raise bad_request(f"the body has an integer of {len(digits)} digits, more than any field takes")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise bad_request(f"the body has the number {name}, which JSON does not know")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise bad_request(f"the body has the key {clip(key)} twice in one object")
            seen.add(key)
    return result


def _require_unicode(body: dict[str, Any]) -> None:
    """Refuse lone surrogates, which JSON can spell and UTF-8 cannot; without recursion, whatever the depth."""
    open_values: list[Any] = [body]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            open_values += value.keys()
            open_values += value.values()
        elif isinstance(value, list):
            open_values += value
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                found = f"U+{ord(value[error.start]):04X}"
                raise bad_request(f"the body has the lone surrogate {found}; surrogates come in pairs") from None
