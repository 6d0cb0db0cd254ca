"""Chat messages of a request, and prompts of the completions endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msds.errors import PromptError
from msds.text.messages import ROLES, check_messages
from msds_serve.protocol.errors import bad_request, clip
from msds_serve.protocol.kinds import Kind, Schema, items, nullable, refuse, text, token_ids

MAX_MESSAGES = 10_000
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "prefix")
# OpenAI's answers carry these, so a client that sends an answer back sends them too, empty
_EMPTY_KEYS = ("refusal", "audio", "annotations", "function_call")

_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_CALLS = {"type": "array", "items": _CALL}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_FIELDS: Schema = {
    "name": nullable({"type": "string"}),
    "tool_call_id": nullable({"type": "string"}),
    "reasoning_content": nullable({"type": "string"}),
    "reasoning": nullable({"type": "string"}),
    "prefix": nullable({"type": "boolean"}),
    **{key: {"type": ["null", "array"], "maxItems": 0} for key in _EMPTY_KEYS},
}


def _message(roles: Sequence[str], content: Schema, *, calls: Schema, required: Sequence[str]) -> Schema:
    properties = {"role": {"type": "string", "enum": list(roles)}, "content": content, "tool_calls": calls, **_FIELDS}
    names = ["role", *required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


_NO_CALLS: Schema = {"type": ["null", "array"], "maxItems": 0}
_OTHERS = [role for role in ROLES if role != "assistant"]
_MESSAGE: Schema = {
    "anyOf": [
        _message(_OTHERS, _CONTENT, calls=_NO_CALLS, required=["content"]),
        _message(["assistant"], _CONTENT, calls=nullable(_CALLS), required=["content"]),
        # who calls tools need not say anything besides
        _message(["assistant"], nullable(_CONTENT), calls=_CALLS | {"minItems": 1}, required=["tool_calls"]),
    ]
}


def messages() -> Kind:
    """A conversation. Text parts are joined; other parts, unknown roles and unknown fields are refused by name.

    `name`, `tool_call_id` and `reasoning_content` go to the chat template, which may or may not read them; a `prefix`
    that it does not read is refused when the prompt is made.
    """

    def check(value: Any, where: str) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
            refuse(value, where, f"a list of 1 to {MAX_MESSAGES} messages")
        for position, message in enumerate(value):
            if isinstance(message, dict):
                _check_keys(message, f"{where}[{position}]")
        try:
            check_messages(value)
        except PromptError as error:
            raise bad_request(str(error), param=where) from None
        return tuple(value)

    return Kind({"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}, check)


def _check_keys(message: dict[str, Any], where: str) -> None:
    for key, value in message.items():
        if key in _EMPTY_KEYS:
            if value is not None and value != []:
                raise bad_request(f"{where}.{key} is not supported; leave it out", param=f"{where}.{key}")
        elif key not in _KEYS:
            known = ", ".join(_KEYS)
            raise bad_request(f"{where} has the unknown field {clip(key)}; known: {known}", param=f"{where}.{key}")
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if not isinstance(message.get(key), (str, type(None))):
            refuse(message[key], f"{where}.{key}", "a string")
    if not isinstance(message.get("prefix"), (bool, type(None))):
        refuse(message["prefix"], f"{where}.prefix", "true or false")
    content = message.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") == "text" and len(part) > 2:
            extra = next(key for key in part if key not in ("type", "text"))
            place = f"{where}.content[{number}]"
            raise bad_request(f"{place} has the unknown field {clip(extra)}; known: type, text", param=place)


def prompts(maximum: int, max_ids: int) -> Kind:
    """One prompt or a list of them, each a text or a list of token ids; as a tuple of texts and tuples of ids."""
    short = token_ids(1, max_ids)

    def check_ids(value: Any, where: str) -> tuple[int, ...]:
        if isinstance(value, list) and len(value) > max_ids:
            raise bad_request(
                f"{where} has {len(value)} token ids, far more than the context of the model holds; shorten the prompt",
                param=where,
                code="context_length_exceeded",
            )
        checked: tuple[int, ...] = short(value, where)
        return checked

    ids = Kind(short.schema, check_ids)
    legal = f"a text, a list of token ids, or a list of 1 to {maximum} texts or lists of token ids"
    many = items(text(), 1, maximum, "texts"), items(ids, 1, maximum, "lists of token ids")

    def check(value: Any, where: str) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not value:
            refuse(value, where, legal)
        if isinstance(value[0], (int, float)) and not isinstance(value[0], bool):
            return (ids(value, where),)
        if not isinstance(value[0], (str, list)):
            refuse(value[0], f"{where}[0]", "a text, a token id or a list of token ids")
        kind = many[0] if isinstance(value[0], str) else many[1]
        checked: tuple[str | tuple[int, ...], ...] = kind(value, where)
        return checked

    return Kind({"anyOf": [{"type": "string"}, ids.schema, many[0].schema, many[1].schema]}, check)
