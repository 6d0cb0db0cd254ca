"""What a request asks of the text of its answer, as a constraint: `response_format` and `structured_outputs`.

Whether a constraint can be kept is known when it is compiled; one that cannot is a 400 then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msds.constraints import Choice, Constraint, Grammar, JsonObject, JsonSchema, Regex
from msds.errors import ConstraintError
from msds_serve.protocol.errors import bad_request
from msds_serve.protocol.kinds import Kind, flag, free_object, items, record, refuse, text, word

MAX_GRAMMAR = 100_000
"""Characters of a grammar or a regular expression."""

MAX_OPTIONS = 1000
"""Texts of a choice."""

_SCHEMA = record(
    {"name": text(1, 64), "description": text(), "schema": free_object(), "strict": flag()},
    required=("name", "schema"),
)
_FORMATS = {
    "text": record({"type": word("text")}, required=("type",)),
    "json_object": record({"type": word("json_object")}, required=("type",)),
    "json_schema": record({"type": word("json_schema"), "json_schema": _SCHEMA}, required=("type", "json_schema")),
}
_OUTPUTS: Mapping[str, tuple[Kind, Callable[[Any], Constraint]]] = {
    "json": (free_object(), JsonSchema),
    "regex": (text(1, MAX_GRAMMAR), Regex),
    "choice": (items(text(1, MAX_GRAMMAR), 1, MAX_OPTIONS, "non-empty strings"), Choice),
    "grammar": (text(1, MAX_GRAMMAR), Grammar),
}
_OUTPUT_FIELDS = record({name: kind for name, (kind, _) in _OUTPUTS.items()})


def response_format() -> Kind:
    """text (None), json_object or json_schema. A schema is kept whether it is `strict` or not."""

    def check(value: Any, where: str) -> Constraint | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(kind, str) or kind not in _FORMATS:
            legal = "an object whose type is one of " + ", ".join(_FORMATS)
            refuse(kind if isinstance(value, dict) else value, where, legal)
        fields = _FORMATS[kind](value, where)
        if kind == "text":
            return None
        if kind == "json_object":
            return JsonObject()
        return _build(JsonSchema, fields["json_schema"]["schema"], f"{where}.json_schema.schema")

    return Kind({"anyOf": [kind.schema for kind in _FORMATS.values()]}, check)


def structured_outputs() -> Kind:
    """An object with exactly one of json, regex, choice and grammar."""

    def check(value: Any, where: str) -> Constraint:
        fields = _OUTPUT_FIELDS(value, where)
        if len(fields) != 1:
            legal = "an object with exactly one of " + ", ".join(_OUTPUTS)
            refuse(value, where, legal)
        [(name, content)] = fields.items()
        return _build(_OUTPUTS[name][1], content, f"{where}.{name}")

    one_each = [
        {
            "type": "object",
            "properties": {other: {"type": "null"} for other in _OUTPUTS} | {name: kind.schema},
            "required": [name],
            "additionalProperties": False,
        }
        for name, (kind, _) in _OUTPUTS.items()
    ]
    return Kind({"anyOf": one_each}, check)


def _build(form: Callable[[Any], Constraint], content: Any, where: str) -> Constraint:
    try:
        return form(content)
    except ConstraintError as error:
        raise bad_request(f"{where}: {error}", param=where) from None
