"""Tool calls as a constraint: the layout of the chat template, and in it the parameters of each function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msds.constraints.forms import (
    ANSWER,
    AnyText,
    Constraint,
    JsonSchema,
    Parts,
    lark_text,
    with_whitespace,
)
from msds.errors import ConstraintError
from msds.text.tools.layouts import Layout

if TYPE_CHECKING:
    from msds.constraints.schemas import SchemaCheck
    from msds.text.tokenizer import Tokenizer

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Function:
    """A function that may be called. parameters: schema of its arguments, an object. place: what errors call it."""

    name: str
    parameters: JsonSchema
    place: str = "tools"

    @classmethod
    def read(cls, function: Mapping[str, Any], place: str) -> Function:
        """OpenAI's form: {name, parameters}; without parameters it takes none. ConstraintError names `place`."""
        if not _NAME.fullmatch(function["name"]):
            raise ConstraintError(
                f"{place}.name is {function['name'][:100]!r}; it must be 1 to 64 letters, digits, _ and -"
            )
        parameters = function.get("parameters", _NO_PARAMETERS)
        kind = parameters.get("type", "object")
        if kind != "object":
            raise ConstraintError(f"{place}.parameters is a schema of type {kind!r}; arguments are an object")
        try:
            return cls(function["name"], JsonSchema({**parameters, "type": "object"}), place)
        except ConstraintError as error:
            raise ConstraintError(f"{place}.parameters: {error}") from None


@dataclass(frozen=True)
class ToolCalls(Constraint):
    """Calls of these functions, written as `layout` writes them.

    is_single: exactly one call instead of one or more. otherwise: what the answer may be instead of calls, None where
    it must call; after `AnyText` calls may follow.
    """

    layout: Layout
    functions: tuple[Function, ...]
    is_single: bool = False
    otherwise: Constraint | None = None

    def __post_init__(self) -> None:
        if not self.functions:
            raise ConstraintError("there are no functions to call")

    def parts(self, tokenizer: Tokenizer, name: str = ANSWER) -> Parts:
        layout = self.layout
        begin, closing = lark_text(layout.begin, tokenizer), lark_text(layout.closing, tokenizer)
        more = "" if self.is_single else f"({lark_text(layout.between, tokenizer)} call)*"
        rules = [
            f"calls: {lark_text(self._marker, tokenizer)} calls_rest",
            f"calls_rest: {'call' if layout.opening else 'call_rest'} {more} {closing}",
            f"call: {begin} call_rest",
            "call_rest: " + " | ".join(f"call_{number}" for number in range(len(self.functions))),
        ]
        parts: Parts = {}
        before, after = layout.call.removeprefix(layout.begin).split("ARGUMENTS")
        for number, function in enumerate(self.functions):
            head = lark_text(before.replace("NAME", function.name), tokenizer)
            rules.append(f"call_{number}: {head} @arguments_{number} {lark_text(after, tokenizer)}")
            parts[f"arguments_{number}"] = {"json_schema": with_whitespace(function.parameters.schema)}
        if self.otherwise is None:
            rules.append("start: calls")
        elif isinstance(self.otherwise, AnyText):
            rules += self._free_text(tokenizer)
        else:
            rules.append("start: calls | @otherwise")
            parts |= self.otherwise.parts(tokenizer, "otherwise")
        return {name: {"lark_grammar": "\n".join(rules)}, **parts}

    def check(self, accepts: SchemaCheck) -> None:
        for function in self.functions:
            try:
                function.parameters.check(accepts)
            except ConstraintError as error:
                raise ConstraintError(f"{function.place}.parameters: {error}") from None
        if self.otherwise is not None:
            self.otherwise.check(accepts)

    @property
    def _marker(self) -> str:
        """What the first call begins with."""
        return self.layout.opening or self.layout.begin

    def _free_text(self, tokenizer: Tokenizer) -> list[str]:
        """Text, and calls from the first marker on: a control token, which is in no text, or text that ends the rule
        at once (`lazy`)."""
        text = "TEXT: /(?s:.+)/"
        if self._marker in tokenizer.control_ids:
            return ["start: TEXT | TEXT calls | calls", text]
        lead = re.escape(self._marker).replace("/", "[/]")
        return ["start: TEXT | lead calls_rest", f"lead[lazy]: /(?s:.*){lead}/", text]
