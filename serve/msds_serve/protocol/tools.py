"""What a request asks of the form of its answer: tools, the choice among them, and the response format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msds_serve.protocol.errors import bad_request, clip
from msds_serve.protocol.kinds import Kind, flag, free_object, items, record, refuse, text, word

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_TOOLS = 128
MAX_GRAMMAR = 100_000


@dataclass(frozen=True)
class ToolChoice:
    """kind: "none", "auto", "required" or "function"; name: the function of the last, else None."""

    kind: str
    name: str | None = None

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.kind in ("required", "function")


@dataclass(frozen=True)
class ResponseFormat:
    """A constraint on the answer: kind "json_object", "json_schema" or "grammar".

    json_schema: `schema` is the JSON Schema, `name` the request's word for it. grammar: `grammar` is its text in
    Lark's syntax. Whether it can be compiled is known later, and an impossible one is a 400 then.
    """

    kind: str
    schema: Mapping[str, Any] | None = None
    name: str | None = None
    strict: bool = False
    grammar: str | None = None


def _function_name() -> Kind:
    def check(value: Any, where: str) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            refuse(value, where, "a name of 1 to 64 letters, digits, _ and -")
        return value

    return Kind({"type": "string", "pattern": f"^{_NAME.pattern}$"}, check)


_FUNCTION = record(
    {"name": _function_name(), "description": text(), "parameters": free_object(), "strict": flag()},
    required=("name",),
)
_TOOL = record({"type": word("function"), "function": _FUNCTION}, required=("type", "function"))
_TOOLS = items(_TOOL, 0, MAX_TOOLS, "tools")


def tools() -> Kind:
    """A list of function tools with distinct names; an empty one is none."""

    def check(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
        checked: tuple[Mapping[str, Any], ...] = _TOOLS(value, where)
        seen: set[str] = set()
        for position, tool in enumerate(checked):
            name = tool["function"]["name"]
            if name in seen:
                raise bad_request(f"{where}[{position}].function.name {name!r} is there twice", param=where)
            seen.add(name)
        return checked

    return Kind(_TOOLS.schema, check)


_NAMED = record(
    {"type": word("function"), "function": record({"name": _function_name()}, required=("name",))},
    required=("type", "function"),
)
_CHOICES = word("none", "auto", "required")


def tool_choice() -> Kind:
    """ "none", "auto", "required", or one function by name."""

    def check(value: Any, where: str) -> ToolChoice:
        if isinstance(value, str):
            return ToolChoice(_CHOICES(value, where))
        return ToolChoice("function", _NAMED(value, where)["function"]["name"])

    return Kind({"anyOf": [_CHOICES.schema, _NAMED.schema]}, check)


_SCHEMA_NAME = record(
    {"name": _function_name(), "description": text(), "schema": free_object(), "strict": flag()},
    required=("name", "schema"),
)
_FORMATS = {
    "text": record({"type": word("text")}, required=("type",)),
    "json_object": record({"type": word("json_object")}, required=("type",)),
    "json_schema": record({"type": word("json_schema"), "json_schema": _SCHEMA_NAME}, required=("type", "json_schema")),
    "grammar": record({"type": word("grammar"), "grammar": text(1, MAX_GRAMMAR)}, required=("type", "grammar")),
}


def response_format() -> Kind:
    """text (None), json_object, json_schema, or a grammar in Lark's syntax."""

    def check(value: Any, where: str) -> ResponseFormat | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(kind, str) or kind not in _FORMATS:
            legal = "an object whose type is one of " + ", ".join(_FORMATS)
            refuse(kind if isinstance(value, dict) else value, where, legal)
        fields = _FORMATS[kind](value, where)
        if kind == "text":
            return None
        inner = fields.get("json_schema", {})
        return ResponseFormat(
            kind,
            schema=inner.get("schema"),
            name=inner.get("name"),
            strict=inner.get("strict", False),
            grammar=fields.get("grammar"),
        )

    return Kind({"anyOf": [kind.schema for kind in _FORMATS.values()]}, check)


def settle_choice(choice: ToolChoice | None, offered: tuple[Mapping[str, Any], ...]) -> ToolChoice:
    """The choice in force, checked against the tools that are offered."""
    if choice is None:
        return ToolChoice("auto" if offered else "none")
    if not offered and choice.kind != "none":
        raise bad_request(f"tool_choice is {choice.name or choice.kind!r}, but there are no tools", param="tool_choice")
    names = [tool["function"]["name"] for tool in offered]
    if choice.name is not None and choice.name not in names:
        raise bad_request(
            f"tool_choice names the function {clip(choice.name)}, which is not among the tools", param="tool_choice"
        )
    return choice
