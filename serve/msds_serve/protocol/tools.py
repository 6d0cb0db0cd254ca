"""Tools, and the choice among them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msds.constraints import AnyText, Constraint, Function, ToolCalls
from msds.text.tools.layouts import Layout
from msds_serve.protocol.errors import bad_request, clip
from msds_serve.protocol.kinds import Kind, flag, free_object, items, record, refuse, text, word

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_TOOLS = 128


@dataclass(frozen=True)
class ToolChoice:
    """kind: "none", "auto", "required" or "function"; name: the function of the last, else None."""

    kind: str
    name: str | None = None

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.kind in ("required", "function")


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


def call_constraint(
    layout: Layout,
    offered: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    parallel: bool,
    otherwise: Constraint | None,
) -> Constraint | None:
    """What the answer of a model that is offered tools must be; None where it is free.

    A forced choice is calls and nothing else: one of the named function, or one and, with `parallel`, more of any. With
    "auto" the answer may also be what `otherwise` says. Where nothing says so and a function is `strict`, it is any
    text and then calls, of all functions with arguments that fit their schemas. ConstraintError names the tool.
    """
    functions = tuple(
        Function.read(tool["function"], f"tools[{number}].function")
        for number, tool in enumerate(offered)
        if choice.name in (None, tool["function"]["name"])
    )
    single = choice.name is not None or not parallel
    if choice.forces_call:
        return ToolCalls(layout, functions, is_single=single)
    if otherwise is None and any(tool["function"].get("strict") for tool in offered):
        otherwise = AnyText()
    return None if otherwise is None else ToolCalls(layout, functions, is_single=single, otherwise=otherwise)
