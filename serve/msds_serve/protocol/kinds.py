"""Kinds of values in a request: each checks a JSON value and states itself as JSON Schema.

One object does both, so that what /openapi.json promises is what is accepted. JSON has one type of number: 3.0 is the
integer 3, as in JSON Schema; true and false are never numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from msds_serve.protocol.errors import bad_request, clip

Schema = dict[str, Any]

MAX_TOKEN_ID = 2**31 - 1  # ids are int32 on the device
_BIASED = re.compile("(0|[1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Kind:
    """check(value, where) returns the value in its final type or raises the 400 that names `where`."""

    schema: Schema
    check: Callable[[Any, str], Any]

    def __call__(self, value: Any, where: str) -> Any:
        """The checked value."""
        return self.check(value, where)


def refuse(value: object, where: str, legal: str) -> NoReturn:
    """Raise the 400 for a value, saying what is legal."""
    raise bad_request(f"{where} is {clip(value)}; it must be {legal}", param=where)


def flag() -> Kind:
    """true or false."""

    def check(value: Any, where: str) -> bool:
        if not isinstance(value, bool):
            refuse(value, where, "true or false")
        return value

    return Kind({"type": "boolean"}, check)


def integer(minimum: int, maximum: int | None = None) -> Kind:
    """An integer in a range."""
    legal = f"an integer >= {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"

    def check(value: Any, where: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(value, where, legal)
        if value < minimum or (maximum is not None and value > maximum):
            refuse(value, where, legal)
        return value

    return Kind({"type": "integer", "minimum": minimum} | ({} if maximum is None else {"maximum": maximum}), check)


def number(minimum: float, maximum: float) -> Kind:
    """A finite number in a range."""
    legal = f"a number from {minimum:g} to {maximum:g}"

    def check(value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse(value, where, legal)
        try:
            result = float(value)
        except OverflowError:
            refuse(value, where, legal)
        if not math.isfinite(result) or not minimum <= result <= maximum:
            refuse(value, where, legal)
        return result

    return Kind({"type": "number", "minimum": minimum, "maximum": maximum}, check)


def text(minimum: int = 0, maximum: int | None = None) -> Kind:
    """A string with so many characters."""
    legal = "a non-empty string" if minimum == 1 else "a string"
    legal += "" if maximum is None else f" of at most {maximum} characters"

    def check(value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) < minimum or (maximum is not None and len(value) > maximum):
            refuse(value, where, legal)
        return value

    schema: Schema = {"type": "string"} | ({"minLength": minimum} if minimum else {})
    return Kind(schema | ({} if maximum is None else {"maxLength": maximum}), check)


def word(*words: str) -> Kind:
    """One of these strings."""

    def check(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in words:
            refuse(value, where, "one of " + ", ".join(words))
        return value

    return Kind({"type": "string", "enum": list(words)}, check)


def items(kind: Kind, minimum: int, maximum: int, what: str) -> Kind:
    """A list of values of one kind, as a tuple. `what` names them, in the plural."""

    def check(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not minimum <= len(value) <= maximum:
            refuse(value, where, f"a list of {minimum} to {maximum} {what}")
        return tuple(kind(item, f"{where}[{position}]") for position, item in enumerate(value))

    schema = {"type": "array", "items": kind.schema, "minItems": minimum, "maxItems": maximum}
    return Kind(schema, check)


def token_ids(minimum: int, maximum: int) -> Kind:
    """A list of token ids, as a tuple. Long lists of plain integers are checked without looking at each in Python."""
    slow = items(TOKEN_ID, minimum, maximum, "token ids")

    def check(value: Any, where: str) -> tuple[int, ...]:
        plain = isinstance(value, list) and minimum <= len(value) <= maximum and set(map(type, value)) == {int}
        if plain and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
            return tuple(value)
        checked: tuple[int, ...] = slow(value, where)
        return checked

    return Kind(slow.schema, check)


def one_or_many(kind: Kind, many: Kind) -> Kind:
    """One value or a list of them, always as a tuple."""

    def check(value: Any, where: str) -> tuple[Any, ...]:
        return tuple(many(value, where)) if isinstance(value, list) else (kind(value, where),)

    return Kind({"anyOf": [kind.schema, many.schema]}, check)


def free_object() -> Kind:
    """Any JSON object."""

    def check(value: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            refuse(value, where, "an object")
        return value

    return Kind({"type": "object", "additionalProperties": True}, check)


def record(fields: Mapping[str, Kind], *, required: tuple[str, ...] = ()) -> Kind:
    """An object with these fields and no others; those that are null or absent are left out of the result."""

    def check(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(value, where, "an object")
        for key in value:
            if key not in fields:
                raise bad_request(
                    f"{where} has the unknown field {clip(key)}; known: {', '.join(fields)}", param=f"{where}.{key}"
                )
        for key in required:
            if value.get(key) is None:
                raise bad_request(f"{where}.{key} is missing", param=f"{where}.{key}")
        return {key: fields[key](item, f"{where}.{key}") for key, item in value.items() if item is not None}

    properties = {key: kind.schema if key in required else nullable(kind.schema) for key, kind in fields.items()}
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return Kind(schema | ({"required": list(required)} if required else {}), check)


def token_biases(maximum: int) -> Kind:
    """An object from token ids, written as strings, to numbers from -100 to 100."""
    bias = number(-100, 100)

    def check(value: Any, where: str) -> dict[int, float]:
        if not isinstance(value, dict) or len(value) > maximum:
            refuse(value, where, f"an object of at most {maximum} token ids and numbers")
        for key in value:
            if not _BIASED.fullmatch(key):
                raise bad_request(f"{where} has the key {clip(key)}; keys are token ids such as '42'", param=where)
        return {int(key): bias(item, f"{where}.{key}") for key, item in value.items()}

    schema = {"type": "object", "propertyNames": {"pattern": f"^{_BIASED.pattern}$"}, "maxProperties": maximum}
    return Kind(schema | {"additionalProperties": bias.schema}, check)


def nullable(schema: Schema) -> Schema:
    """The schema or null: OpenAI's clients send null for what is not given."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


TOKEN_ID = integer(0, MAX_TOKEN_ID)
