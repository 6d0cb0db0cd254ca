"""The forms of a constraint, as frozen data: two that are equal share one compiled grammar.

A form writes itself in llguidance's notation: named parts, each a grammar in Lark's syntax or a JSON Schema. A part
refers to another as `@name`; the whole begins with the part `ANSWER`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msds.errors import ConstraintError

if TYPE_CHECKING:
    from msds.constraints.schemas import SchemaCheck
    from msds.text.tokenizer import Tokenizer

ANSWER = "answer"

Parts = dict[str, dict[str, Any]]
"""Name of a part -> {"lark_grammar": text} or {"json_schema": schema}."""

MAX_SCHEMA = 2**18
"""Characters of a schema: a larger one takes seconds to compile."""

MAX_LINES = 1000
"""Of a grammar: llguidance follows a chain of rules by recursion, on a stack of `grammars.STACK_BYTES`."""

# `stop` takes tokens back that were sent; a rule's own limits on its tokens and its temperature are not kept
_UNSUPPORTED = re.compile(r"\b(stop|max_tokens|temperature)\s*=")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')

# at any one place of a JSON text: a blank, or a line break and an indentation. A model that loops in whitespace gets on
_WHITESPACE = r" |\r?\n[ \t]{0,40}"


@dataclass(frozen=True)
class Constraint:
    """Base of every form."""

    def parts(self, tokenizer: Tokenizer, name: str = ANSWER) -> Parts:
        """The form in llguidance's notation; its entry is called `name`."""
        raise NotImplementedError

    def check(self, accepts: SchemaCheck) -> None:
        """ConstraintError for schemas that cannot be kept. accepts: tries one, see `schemas.check_schema`."""


@dataclass(frozen=True)
class AnyText(Constraint):
    """Any text without control tokens."""

    def parts(self, tokenizer: Tokenizer, name: str = ANSWER) -> Parts:
        return {name: {"lark_grammar": "start: /(?s:.*)/"}}


@dataclass(frozen=True, init=False)
class JsonSchema(Constraint):
    """A JSON text that is valid under this schema (draft 2020-12).

    schema: a mapping, or True for any JSON. Properties come in the order of the schema, those that only
    `additionalProperties` or `patternProperties` describe after them. What cannot be kept exactly is refused by name:
    `not`, `if`, `uniqueItems`, `contains`, look-around in `pattern`, remote references, and others.
    """

    text: str

    def __init__(self, schema: Mapping[str, Any] | bool) -> None:
        """ConstraintError for what is no JSON."""
        if schema is not True and not isinstance(schema, Mapping):
            raise ConstraintError(f"the schema is of type {type(schema).__name__}; it must be a mapping, or True")
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except RecursionError:
            raise ConstraintError("the schema is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise ConstraintError(f"the schema is not JSON: {error}") from None
        if len(text) > MAX_SCHEMA:
            raise ConstraintError(f"the schema has {len(text)} characters; the limit is {MAX_SCHEMA}")
        object.__setattr__(self, "text", text)

    @property
    def schema(self) -> Any:
        """The schema, a copy of its own."""
        return json.loads(self.text)

    def parts(self, tokenizer: Tokenizer, name: str = ANSWER) -> Parts:
        return {name: {"json_schema": with_whitespace(self.schema)}}

    def check(self, accepts: SchemaCheck) -> None:
        from msds.constraints.schemas import check_schema

        check_schema(self.schema, accepts)


class JsonObject(JsonSchema):
    """Any JSON object."""

    def __init__(self) -> None:
        super().__init__({"type": "object"})


@dataclass(frozen=True)
class Grammar(Constraint):
    """A text of this context-free grammar in Lark's syntax, as llguidance reads it; it begins with the rule `start`.

    `<[id]>` stands for a control token. A schema may stand in it (`%json {...}`).
    """

    lark: str

    def __post_init__(self) -> None:
        _require_text("the grammar", self.lark)

    def parts(self, tokenizer: Tokenizer, name: str = ANSWER) -> Parts:
        return {name: {"lark_grammar": self.lark}}

    def check(self, accepts: SchemaCheck) -> None:
        if self.lark.count("\n") > MAX_LINES or self.lark.count("$ref") > MAX_LINES:
            raise ConstraintError(f"the grammar is too large: more than {MAX_LINES} lines or $ref")
        found = _UNSUPPORTED.search(_STRING.sub('""', self.lark))
        if found or "patternProperties" in self.lark:
            word = found.group(1) if found else "patternProperties"
            raise ConstraintError(f"the grammar uses {word}, which is not supported; write it as rules")


@dataclass(frozen=True)
class Regex(Constraint):
    r"""A text that this regular expression matches as a whole. Rust's syntax: no look-around, no back references;
    `.` is no newline."""

    pattern: str

    def __post_init__(self) -> None:
        _require_text("the regular expression", self.pattern)

    def parts(self, tokenizer: Tokenizer, name: str = ANSWER) -> Parts:
        from llguidance import regex_to_lark

        return {name: {"lark_grammar": f"start: /{regex_to_lark(self.pattern)}/"}}


@dataclass(frozen=True, init=False)
class Choice(Constraint):
    """One of these texts."""

    options: tuple[str, ...]

    def __init__(self, options: Sequence[str]) -> None:
        """ConstraintError unless they are non-empty strings, at least one."""
        if isinstance(options, str) or not isinstance(options, Sequence) or not options:
            raise ConstraintError(f"the choice is {options!r}; it must be a list of texts")
        for option in options:
            _require_text("a text of the choice", option)
        object.__setattr__(self, "options", tuple(options))

    def parts(self, tokenizer: Tokenizer, name: str = ANSWER) -> Parts:
        return {name: {"lark_grammar": "start: " + " | ".join(map(lark_string, self.options))}}


def with_whitespace(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """The schema with the whitespace that its JSON text may hold."""
    return {**(schema if isinstance(schema, Mapping) else {}), "x-guidance": {"whitespace_pattern": _WHITESPACE}}


def lark_string(text: str) -> str:
    """A text as a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def lark_text(text: str, tokenizer: Tokenizer) -> str:
    """A text as a sequence of Lark: its control tokens by their ids, what is between them as strings."""
    return " ".join(
        f"<[{tokenizer.control_ids[piece]}]>" if is_control else lark_string(piece)
        for piece, is_control in tokenizer.controls.split(text)
    )


def _require_text(what: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConstraintError(f"{what} is {value!r}; it must be a non-empty string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConstraintError(f"{what} holds a lone surrogate; surrogates come in pairs") from None
