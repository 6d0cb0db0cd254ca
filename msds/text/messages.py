"""Chat messages as clients send them, checked and brought into the form that chat templates expect."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msds.errors import PromptError
from msds.text.tokenizer import require_unicode

ROLES = ("system", "developer", "user", "assistant", "tool")

# the assistant's own markers: templates look for them in its content, and the model wrote them as tokens
THINK_MARKERS = ("<think>", "</think>")


class ToolArguments(str):
    """The arguments of a tool call: JSON text that `tojson` writes as an object, not as a string.

    Some templates concatenate the arguments as text (DeepSeek), others pass them through `tojson` (Qwen),
    while OpenAI clients always send text. This is right for both. `value` is the object: kept apart, because
    JSON can spell a control token with escapes, which show only once it is parsed.
    """

    value: Any

    def __new__(cls, text: str, value: Any) -> "ToolArguments":
        arguments = super().__new__(cls, text)
        arguments.value = value
        return arguments


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of the messages with content joined to a string; raises PromptError naming the message."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise PromptError("messages is empty; give at least one message")
    return [_check_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def quote_strings(value: Any, quote: Callable[[str], str]) -> Any:
    """A JSON value with every string in it, keys too, passed through `quote`."""
    if isinstance(value, ToolArguments):
        return ToolArguments(quote_strings(str(value), quote), quote_strings(value.value, quote))
    if isinstance(value, str):
        require_unicode(value)
        return quote(value)
    if isinstance(value, Mapping):
        return {quote_strings(str(key), quote): quote_strings(inner, quote) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [quote_strings(inner, quote) for inner in value]
    return value


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    # an absent tool_calls and a null one differ for templates that ask `'tool_calls' in message`
    checked = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    tool_calls = message.get("tool_calls")
    if tool_calls:
        if role != "assistant":
            raise PromptError(f"{where}.tool_calls: only the assistant calls tools, not {role}")
        checked["tool_calls"] = _check_tool_calls(tool_calls, f"{where}.tool_calls")
    content = message.get("content")
    if content is not None:
        checked["content"] = _join_content(content, f"{where}.content")
    elif role == "assistant" and tool_calls:
        checked["content"] = None  # templates ask `content is none` here
    else:
        raise PromptError(f"{where}.content is null; a message of role {role} needs text")
    return checked


def _join_content(content: object, where: str) -> str:
    """A string, or the concatenation of text parts; nothing is put between them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise PromptError(f"{where} must be text or a list of text parts, not {type(content).__name__}")
    texts: list[str] = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise PromptError(f"{where}[{number}] has type {kind!r}; only text parts are supported")
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{where}[{number}].text must be a string, not {part.get('text')!r}")
        texts.append(part["text"])
    return "".join(texts)


def _check_tool_calls(tool_calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, Sequence) or isinstance(tool_calls, (str, bytes)):
        raise PromptError(f"{where} must be a list, not {type(tool_calls).__name__}")
    return [_check_tool_call(call, f"{where}[{number}]") for number, call in enumerate(tool_calls)]


def _check_tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise PromptError(f"{where} must be an object with a function")
    if not isinstance(function.get("name"), str):
        raise PromptError(f"{where}.function.name must be a string, not {function.get('name')!r}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, Mapping):
        arguments = ToolArguments(json.dumps(arguments, ensure_ascii=False), arguments)
    elif isinstance(arguments, str):
        arguments = _parsable(arguments or "{}")
    else:
        kind = type(arguments).__name__
        raise PromptError(f"{where}.function.arguments must be JSON text or an object, not {kind}")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _parsable(text: str) -> str:
    """ToolArguments for JSON, else the text as it is: models write broken calls, clients return them."""
    try:
        return ToolArguments(text, json.loads(text))
    except ValueError:
        return text
