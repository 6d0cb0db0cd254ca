"""Whole answers as OpenAI's JSON objects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msds.text.tools import CallDelta
from msds_serve.protocol.answers import AnswerDelta, AnswerReader, finish_reason
from msds_serve.protocol.logprobs import TokenBytes, prompt_entries, token_text

if TYPE_CHECKING:
    from msds.engine.sampler import TokenLogprobs


@dataclass(frozen=True)
class Head:
    """What every object of one response repeats. created: Unix time in seconds. id: see `response_id`.

    call_seed: what the ids of tool calls follow from, since the client may choose the id, the same one for every turn.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str
    call_seed: str

    def as_object(self, kind: str) -> dict[str, Any]:
        """The first fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def response_id(endpoint: str, request_id: str) -> str:
    """ "chatcmpl-..." or "cmpl-...": the request's id under OpenAI's prefix, so that logs and answers agree."""
    return {"chat": "chatcmpl-", "completion": "cmpl-"}[endpoint] + request_id


def system_fingerprint(parts: Mapping[str, object]) -> str:
    """ "fp_" and 12 characters that change when anything does that can change a seeded answer.

    parts: name -> value; by policy the version of msds, the config, dtype and plan, whether the engine is
    deterministic, and the count of weight updates. Not the load, the batch or the speculation, which change nothing.
    """
    text = json.dumps({name: str(value) for name, value in parts.items()}, sort_keys=True)
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]


class CachedTokens:
    """Tokens of a request's prompts that were found in the cache."""

    def __init__(self) -> None:
        self._of_prompts: dict[int, int] = {}

    def saw(self, prompt: int, tokens: int) -> None:
        """So many of a prompt; of its answers, the one that found most counts."""
        self._of_prompts[prompt] = max(tokens, self._of_prompts.get(prompt, 0))

    @property
    def total(self) -> int:
        """Of all prompts."""
        return sum(self._of_prompts.values())


def usage(
    prompt_tokens: int, completion_tokens: int, *, cached_tokens: int = 0, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """The usage object. reasoning_tokens: None on the completions endpoint, which does not know reasoning."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts


def chat_choice(
    index: int,
    reader: AnswerReader,
    deltas: Sequence[AnswerDelta],
    reason: str,
    *,
    include_reasoning: bool,
    with_logprobs: bool,
) -> dict[str, Any]:
    """One choice of a chat completion, from all that its reader returned; `reason` is the engine's.

    content is null only beside calls. reasoning_content is a text where there was thinking, else null, and is left
    out where the request says so.
    """
    content = "".join(delta.content for delta in deltas)
    calls = join_calls(call for delta in deltas for call in delta.calls)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if include_reasoning:
        reasoning = "".join(delta.reasoning for delta in deltas)
        message["reasoning_content"] = reasoning if reader.has_reasoning else None
    if calls:
        message["tool_calls"] = calls
    entries = [entry for delta in deltas for entry in delta.logprobs]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": entries, "refusal": None} if with_logprobs else None,
        "finish_reason": reader.finish_reason(reason),
    }


def join_calls(deltas: Iterable[CallDelta]) -> list[dict[str, Any]]:
    """The calls that their pieces make up."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.id is not None:
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls


def completion_choice(
    index: int, text: str, reason: str, *, logprobs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One choice of a text completion; `text` includes an echoed prompt."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(reason)}


def join_legacy(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several pieces of `LegacyLogprobs`, such as those of prompt and answer, as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for piece in pieces for value in piece[name]] for name in names}


def chat_completion(
    head: Head,
    choices: Sequence[Mapping[str, Any]],
    counts: Mapping[str, Any],
    *,
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None,
    token_bytes: TokenBytes | None = None,
) -> dict[str, Any]:
    """A chat.completion; prompt_logprobs, where asked for, need token_bytes."""
    body = head.as_object("chat.completion") | {"choices": list(choices), "usage": dict(counts)}
    if prompt_logprobs is not None and token_bytes is not None:
        body["prompt_logprobs"] = prompt_entries(prompt_logprobs, token_bytes)
    return body


def completion(head: Head, choices: Sequence[Mapping[str, Any]], counts: Mapping[str, Any]) -> dict[str, Any]:
    """A text_completion."""
    return head.as_object("text_completion") | {"choices": list(choices), "usage": dict(counts)}


def model_list(names: Sequence[str], *, created: int, max_model_len: int) -> dict[str, Any]:
    """/v1/models: the served names; the first is the model's own, the others are aliases of it."""
    return {"object": "list", "data": [model_object(name, names[0], created, max_model_len) for name in names]}


def model_object(name: str, root: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One model of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "msds",
        "root": root,
        "max_model_len": max_model_len,
    }


def tokenized(token_ids: Sequence[int], *, max_model_len: int, token_bytes: TokenBytes | None = None) -> dict[str, Any]:
    """/tokenize; token_strs where token_bytes is given."""
    body: dict[str, Any] = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": list(token_ids)}
    if token_bytes is not None:
        body["token_strs"] = [token_text(id_, token_bytes(id_)) for id_ in token_ids]
    return body


def detokenized(text: str) -> dict[str, Any]:
    """/detokenize."""
    return {"prompt": text}
