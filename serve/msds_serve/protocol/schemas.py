"""JSON Schemas of what the service answers, for /openapi.json."""

from __future__ import annotations

from typing import Any

from msds_serve.protocol.kinds import Schema, nullable

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}


def _object(optional: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _words(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _head(kind: str) -> dict[str, Schema]:
    return {
        "id": _STRING,
        "object": _words(kind),
        "created": _INTEGER,
        "model": _STRING,
        "system_fingerprint": _STRING,
    }


_TOKEN: dict[str, Schema] = {"token": _STRING, "logprob": _NUMBER, "bytes": _list(_INTEGER)}
_CHAT_LOGPROBS = _object(
    content=_list(_object((), **_TOKEN, top_logprobs=_list(_object((), **_TOKEN)))), refusal={"type": "null"}
)
_LEGACY_LOGPROBS = _object(
    tokens=_list(_STRING),
    token_logprobs=_list(nullable(_NUMBER)),
    top_logprobs=_list(nullable({"type": "object", "additionalProperties": _NUMBER})),
    text_offset=_list(_INTEGER),
)
_PROMPT_TOKEN = _object(logprob=_NUMBER, rank=_INTEGER, decoded_token=_STRING)
_PROMPT_LOGPROBS = _list(nullable({"type": "object", "additionalProperties": _PROMPT_TOKEN}))
_FINISH = _words("stop", "length", "tool_calls")
_CALL = _object(id=_STRING, type=_words("function"), function=_object(name=_STRING, arguments=_STRING))
_CALL_DELTA = _object(
    ("id", "type"),
    index=_INTEGER,
    id=_STRING,
    type=_words("function"),
    function=_object(("name",), name=_STRING, arguments=_STRING),
)
_MESSAGE = _object(
    ("reasoning_content", "tool_calls"),
    role=_words("assistant"),
    content=nullable(_STRING),
    refusal={"type": "null"},
    reasoning_content=nullable(_STRING),
    tool_calls=_list(_CALL),
)
_DELTA = _object(
    ("role", "content", "reasoning_content", "tool_calls"),
    role=_words("assistant"),
    content=_STRING,
    reasoning_content=_STRING,
    tool_calls=_list(_CALL_DELTA),
)
_CHAT_CHOICE = _object(index=_INTEGER, message=_MESSAGE, logprobs=nullable(_ref("ChatLogprobs")), finish_reason=_FINISH)
_CHUNK_CHOICE = _object(
    index=_INTEGER, delta=_DELTA, logprobs=nullable(_ref("ChatLogprobs")), finish_reason=nullable(_FINISH)
)
_TEXT_CHOICE = _object(
    ("prompt_logprobs",),
    index=_INTEGER,
    text=_STRING,
    logprobs=nullable(_LEGACY_LOGPROBS),
    finish_reason=nullable(_words("stop", "length")),
    prompt_logprobs=_PROMPT_LOGPROBS,
)

RESPONSES: dict[str, Any] = {
    "Error": _object(error=_object(message=_STRING, type=_STRING, param=nullable(_STRING), code=nullable(_STRING))),
    "Usage": _object(
        ("completion_tokens_details",),
        prompt_tokens=_INTEGER,
        completion_tokens=_INTEGER,
        total_tokens=_INTEGER,
        prompt_tokens_details=_object(cached_tokens=_INTEGER),
        completion_tokens_details=_object(reasoning_tokens=_INTEGER),
    ),
    "ChatLogprobs": _CHAT_LOGPROBS,
    "ChatCompletion": _object(
        ("prompt_logprobs",),
        **_head("chat.completion"),
        choices=_list(_CHAT_CHOICE),
        usage=_ref("Usage"),
        prompt_logprobs=_PROMPT_LOGPROBS,
    ),
    "ChatCompletionChunk": _object(
        ("usage",), **_head("chat.completion.chunk"), choices=_list(_CHUNK_CHOICE), usage=nullable(_ref("Usage"))
    ),
    "Completion": _object(
        ("usage",), **_head("text_completion"), choices=_list(_TEXT_CHOICE), usage=nullable(_ref("Usage"))
    ),
    "Model": _object(
        id=_STRING,
        object=_words("model"),
        created=_INTEGER,
        owned_by=_STRING,
        root=_STRING,
        max_model_len=_INTEGER,
    ),
    "ModelList": _object(object=_words("list"), data=_list(_ref("Model"))),
    "Tokenized": _object(
        ("token_strs",), count=_INTEGER, max_model_len=_INTEGER, tokens=_list(_INTEGER), token_strs=_list(_STRING)
    ),
    "Detokenized": _object(prompt=_STRING),
    "Status": {"type": "object", "properties": {"status": _STRING}, "required": ["status"]},
    "Version": {"type": "object", "properties": {"version": _STRING}, "required": ["version"]},
}
