"""Every field of every request: supported, ignored with a reason, or refused with a reason. Read by the parser and
by /openapi.json alike.

null stands for an absent field, as OpenAI's clients send it. A field that is in no table is refused by name.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msds_serve.protocol.errors import bad_request, clip
from msds_serve.protocol.formats import response_format, structured_outputs
from msds_serve.protocol.kinds import (
    Kind,
    flag,
    free_object,
    integer,
    items,
    number,
    one_or_many,
    record,
    text,
    token_biases,
    token_ids,
    word,
)
from msds_serve.protocol.messages import messages, prompts
from msds_serve.protocol.tools import tool_choice, tools

MAX_TOKENS = 2**31 - 1  # counts are int32 on the device


@dataclass(frozen=True)
class Limits:
    """Sizes that bound what one request can ask for; the context and the body size are checked elsewhere."""

    max_choices: int = 128
    """`n` at most."""
    max_prompts: int = 1024
    """Prompts in one completions request."""
    max_answers: int = 2048
    """Prompts times `n`."""
    max_stops: int = 16
    """Stop strings; OpenAI takes 4."""
    max_stop_length: int = 1024
    """Characters of a stop string."""
    max_logit_bias: int = 1024
    """Tokens in logit_bias."""
    max_prompt_ids: int = 2**20
    """Ids in one prompt, so that lists far beyond the context are refused before they are looked at."""


@dataclass(frozen=True)
class Field:
    """A supported field."""

    kind: Kind
    doc: str
    required: bool = False


@dataclass(frozen=True)
class Ignored:
    """A field that is accepted and has no effect, because leaving it out changes nothing that it promises."""

    kind: Kind
    reason: str


@dataclass(frozen=True)
class Refused:
    """A field that asks for something we do not do: a 400, except for null and the values that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Table:
    """The fields of one request body."""

    supported: Mapping[str, Field]
    ignored: Mapping[str, Ignored] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The checked values of the fields that are given; raises the 400 of the first fault."""
        values: dict[str, Any] = {}
        for name, value in body.items():
            if name in self.supported:
                if value is not None:
                    values[name] = self.supported[name].kind(value, name)
            elif name in self.ignored:
                if value is not None:
                    self.ignored[name].kind(value, name)
            elif name in self.refused:
                refused = self.refused[name]
                if value is not None and not any(_same(value, one) for one in refused.neutral):
                    raise bad_request(f"{name} is not supported: {refused.reason}", param=name)
            else:
                raise self._unknown(name)
        for name, entry in self.supported.items():
            if entry.required and name not in values:
                raise bad_request(f"{name} is missing", param=name)
        return values

    def _unknown(self, name: str) -> Exception:
        near = difflib.get_close_matches(name[:100], [*self.supported, *self.ignored], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return bad_request(f"unknown field {clip(name)}{hint}", param=name[:100])


def _same(value: Any, other: Any) -> bool:
    """JSON's equality: 1.0 is 1, and true is neither."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _sampling(limits: Limits) -> dict[str, Field]:
    """What both generating endpoints take."""
    stop = text(1, limits.max_stop_length)
    return {
        "n": Field(integer(1, limits.max_choices), "Answers per prompt."),
        # OpenAI's range. Nothing above 2 has a use, and a percentage typed for a fraction should not pass in silence.
        "temperature": Field(number(0, 2), "0 takes the most likely token. Default: the checkpoint's, else 1."),
        "top_p": Field(number(0, 1), "Keep the fewest most likely tokens with this probability together."),
        "top_k": Field(integer(-1, MAX_TOKENS), "Keep this many most likely tokens; 0 or -1 keeps all."),
        "min_p": Field(number(0, 1), "Keep tokens at least this many times as likely as the best one."),
        "repetition_penalty": Field(number(0.01, 100), "Of tokens in prompt and output; 1 is off."),
        "presence_penalty": Field(number(-2, 2), "Subtracted once from the logits of tokens in the output."),
        "frequency_penalty": Field(number(-2, 2), "Subtracted once per occurrence in the output."),
        "seed": Field(integer(-(2**63), 2**64 - 1), "Same seed, prompt and parameters: same tokens."),
        "min_tokens": Field(
            integer(0, MAX_TOKENS),
            "The text does not end before so many tokens, unless response_format, structured_outputs or tools leave "
            "nothing else.",
        ),
        "stop": Field(
            one_or_many(stop, items(stop, 0, limits.max_stops, "stop strings")), "Strings that end the text."
        ),
        "stop_token_ids": Field(token_ids(0, 1024), "Token ids that end the text."),
        "include_stop_str_in_output": Field(flag(), "Keep the stop string in the text."),
        "ignore_eos": Field(flag(), "Go on after end-of-sequence tokens."),
        "skip_special_tokens": Field(flag(), "Leave special tokens out of the text; default true."),
        "logit_bias": Field(token_biases(limits.max_logit_bias), "Added to the logits of these token ids."),
        "prompt_logprobs": Field(
            integer(0, 20), "Log-probabilities of the prompt's tokens, with so many alternatives."
        ),
        "response_format": Field(
            response_format(),
            "What the text must be: text, a JSON object, or JSON that a schema describes; in a chat, after the "
            "reasoning. A schema is kept exactly, strict or not; one that cannot be kept is refused. An answer that "
            "runs out of tokens is cut, with finish_reason length.",
        ),
        "structured_outputs": Field(
            structured_outputs(),
            "The same in other forms: json (a schema), regex (Rust's syntax, the whole text), choice (one of these "
            "texts), grammar (Lark's syntax, begins with start). This or response_format.",
        ),
        "priority": Field(integer(-(2**31), MAX_TOKENS), "Requests with a lower number go first; default 0."),
        "stream": Field(flag(), "Send the answer as server-sent events."),
        "stream_options": Field(
            record({"include_usage": flag(), "continuous_usage_stats": flag(), "include_obfuscation": flag()}),
            "include_usage: a last chunk with the usage; continuous_usage_stats: usage in every chunk; both need "
            "stream. include_obfuscation: only false.",
        ),
    }


_IGNORED = {
    "user": Ignored(text(), "a label for the caller's own statistics"),
    "metadata": Ignored(free_object(), "labels for stored completions; nothing is stored here"),
    "store": Ignored(flag(), "asks OpenAI to keep the completion for its own tools; nothing is kept here"),
    "service_tier": Ignored(word("auto", "default", "flex", "scale", "priority", "fast"), "a price class"),
    "safety_identifier": Ignored(text(), "a label for abuse reports"),
    "prompt_cache_key": Ignored(text(), "a routing hint; the prefix cache needs none"),
    "prompt_cache_retention": Ignored(word("in_memory", "24h"), "a hint; the cache keeps what fits"),
    "prompt_cache_options": Ignored(free_object(), "a hint; the cache keeps what fits"),
}
_CHAT_ONLY_IGNORED = {
    "prediction": Ignored(free_object(), "a hint for speed that does not change the answer"),
}

_TO_FORMAT = "use structured_outputs"
_REFUSED = {
    "best_of": Refused("ask for n answers and choose with logprobs", (1,)),
    "suffix": Refused("the served models do not fill in the middle", ("",)),
    "use_beam_search": Refused("answers are sampled", (False,)),
    "length_penalty": Refused("it belongs to beam search", (1,)),
    "early_stopping": Refused("it belongs to beam search", (False,)),
    "logits_processors": Refused("code does not come over the network"),
    "bad_words": Refused("use logit_bias", ([],)),
    "allowed_token_ids": Refused("use logit_bias or structured_outputs"),
    "truncate_prompt_tokens": Refused("a prompt is never cut in silence; shorten it"),
    "spaces_between_special_tokens": Refused("text is the exact bytes of its tokens", (True,)),
    "guided_json": Refused(_TO_FORMAT),
    "guided_regex": Refused(_TO_FORMAT),
    "guided_choice": Refused(_TO_FORMAT),
    "guided_grammar": Refused(_TO_FORMAT),
    "return_token_ids": Refused("use /tokenize, or logprobs for the bytes of each token", (False,)),
    "return_tokens_as_token_ids": Refused("use /tokenize, or logprobs for the bytes of each token", (False,)),
    "request_id": Refused("send it as the header X-Request-Id"),
    "cache_salt": Refused("the prefix cache is shared by all requests"),
}
_CHAT_REFUSED = {
    "echo": Refused("it belongs to /v1/completions", (False,)),
    "functions": Refused("it is deprecated; use tools", ([],)),
    "function_call": Refused("it is deprecated; use tool_choice", ("none", "auto")),
    "modalities": Refused("the served models write text", (["text"],)),
    "audio": Refused("the served models write text"),
    "moderation": Refused("there is no moderation model here"),
    "reasoning_effort": Refused("switch thinking with chat_template_kwargs, as the model's template defines it"),
    "verbosity": Refused("say it in the prompt"),
    "web_search_options": Refused("the server does not reach the network"),
    "chat_template": Refused("a template is a program; only the checkpoint's own is run"),
    "continue_final_message": Refused("use /v1/completions with the text so far", (False,)),
    "documents": Refused("put them into messages, or into chat_template_kwargs if the template reads them", ([],)),
    "mm_processor_kwargs": Refused("the served models read text"),
}

_COMPLETION_REFUSED = {
    "max_completion_tokens": Refused("it belongs to /v1/chat/completions; use max_tokens"),
    "messages": Refused("it belongs to /v1/chat/completions; use prompt"),
}

_MODEL = Field(text(1, 512), "Name of the model, as /v1/models lists it.", required=True)
_TEMPLATE_KWARGS = Field(free_object(), 'Variables for the chat template, such as {"thinking": true}.')
_GENERATION_PROMPT = Field(flag(), "Whether the prompt ends by opening the assistant's turn; default true.")
_MAX_TOKENS = integer(1, MAX_TOKENS)


@functools.cache
def chat_table(limits: Limits) -> Table:
    """/v1/chat/completions."""
    supported = {
        "model": _MODEL,
        "messages": Field(messages(), "The conversation.", required=True),
        "max_completion_tokens": Field(_MAX_TOKENS, "Tokens to generate at most; default: the rest of the context."),
        "max_tokens": Field(_MAX_TOKENS, "Older name of max_completion_tokens."),
        "logprobs": Field(flag(), "Log-probabilities of the chosen tokens."),
        "top_logprobs": Field(integer(0, 20), "Also of so many most likely ones; needs logprobs true."),
        "tools": Field(
            tools(),
            "Functions that the model may call. Arguments fit their parameters where a call is forced, where "
            "response_format is given, and where any function is strict.",
        ),
        "tool_choice": Field(
            tool_choice(),
            "Whether and what it must call; default auto where there are tools. required: one call or more; a function "
            "by name: one call of it. finish_reason is tool_calls in both cases.",
        ),
        "parallel_tool_calls": Field(flag(), "false ends the answer after one call; default true."),
        "chat_template_kwargs": _TEMPLATE_KWARGS,
        "add_generation_prompt": _GENERATION_PROMPT,
        "include_reasoning": Field(flag(), "false leaves reasoning_content out; default true."),
        **_sampling(limits),
    }
    return Table(supported, _IGNORED | _CHAT_ONLY_IGNORED, _REFUSED | _CHAT_REFUSED)


@functools.cache
def completion_table(limits: Limits) -> Table:
    """/v1/completions."""
    supported = {
        "model": _MODEL,
        "prompt": Field(
            prompts(limits.max_prompts, limits.max_prompt_ids), "Texts or lists of token ids.", required=True
        ),
        "max_tokens": Field(_MAX_TOKENS, "Tokens to generate at most; default 16, as OpenAI's."),
        "logprobs": Field(integer(0, 5), "Log-probabilities of the chosen and of so many most likely tokens."),
        "echo": Field(flag(), "Put the prompt before the text; with logprobs, the prompt's too."),
        "add_special_tokens": Field(flag(), "Put the tokenizer's BOS before a text; default true."),
        **_sampling(limits),
    }
    return Table(supported, _IGNORED, _REFUSED | _COMPLETION_REFUSED)


@functools.cache
def tokenize_table() -> Table:
    """/tokenize: a text, or a conversation as the chat endpoint would render it."""
    return Table(
        {
            "model": Field(text(1, 512), "Name of the model; may be left out."),
            "prompt": Field(text(), "A text; this or messages."),
            "messages": Field(messages(), "A conversation; this or prompt."),
            "tools": Field(tools(), "Functions that the template describes."),
            "chat_template_kwargs": _TEMPLATE_KWARGS,
            "add_generation_prompt": _GENERATION_PROMPT,
            "add_special_tokens": Field(flag(), "Put the tokenizer's BOS before a text; default true."),
            "return_token_strs": Field(flag(), "Also the text of each token; default false."),
        }
    )


@functools.cache
def detokenize_table(limits: Limits) -> Table:
    """/detokenize."""
    return Table(
        {
            "model": Field(text(1, 512), "Name of the model; may be left out."),
            "tokens": Field(token_ids(0, limits.max_prompt_ids), "Token ids.", required=True),
            "skip_special_tokens": Field(flag(), "Leave special tokens out; default false."),
        }
    )
