"""JSON Schemas: which ones are refused, and where in a schema the fault is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msds.errors import ConstraintError

SchemaCheck = Callable[[Any], "str | None"]
"""Tries one schema: what is wrong with it, or None."""

MAX_DEPTH = 128
"""Levels of schemas inside schemas; more is refused, because it is read by recursion."""

MAX_SCHEMAS = 2048
"""Schemas inside a schema, properties for the most part: compiling takes a second or two with so many."""

MAX_REFERENCES = 1000
"""Of `$ref` in one schema: llguidance follows a chain of them by recursion, on a stack of `grammars.STACK_BYTES`."""

MAX_PATTERNS = 64
"""Of patternProperties in one schema: each is compared with each."""

_MAX_POINTER = 200  # characters of a pointer in a message
_MAX_TRIES = 200  # subschemas that are tried one by one to find a fault

# keywords that hold one schema, a list of them, or a mapping to them
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# keywords beside which `required` may speak of properties that `properties` does not show
_COMPOSING = ("$ref", "anyOf", "oneOf", "allOf", "patternProperties")

_REFERENCED = ("$defs", "definitions")


def check_schema(schema: Any, accepts: SchemaCheck) -> None:
    """ConstraintError, with the place as a JSON pointer, for a schema that no text or no grammar can keep.

    Beyond what `accepts` finds, refused are: `required` with a name that is missing in the `properties` beside it,
    which is a slip of the pen far more often than a wish for any value; `minProperties` above 1, because names that
    only `additionalProperties` allows may be repeated; llguidance's own `x-guidance`.
    """
    _check_own(schema)
    fault = accepts(schema)
    if fault is None:
        return
    place = _locate(schema, accepts, fault)
    if "coerce_one_of" in fault:  # a setting of llguidance, which no request can make
        fault = "oneOf is supported only where no value can fit two of its schemas; use anyOf"
    raise _fault(place, fault)


def _check_own(schema: Any) -> None:
    open_schemas = [("#", schema, 0)]
    num_references = num_patterns = num_schemas = 0
    while open_schemas:
        path, value, depth = open_schemas.pop()
        if depth > MAX_DEPTH:
            raise ConstraintError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        children = [(f"{path}/{step}", child, depth + 1) for step, child in _children(value)]
        open_schemas += children
        num_schemas += len(children)
        if num_schemas > MAX_SCHEMAS:
            raise ConstraintError(f"the schema is too large: more than {MAX_SCHEMAS} properties and other schemas")
        if not isinstance(value, dict):
            continue
        num_references += "$ref" in value
        patterns = value.get("patternProperties")
        num_patterns += len(patterns) if isinstance(patterns, dict) else 0
        if num_references > MAX_REFERENCES or num_patterns > MAX_PATTERNS:
            raise ConstraintError(
                f"the schema is too large: more than {MAX_REFERENCES} $ref or {MAX_PATTERNS} patternProperties"
            )
        _check_object(path, value)


def _check_object(path: str, value: dict[str, Any]) -> None:
    if "x-guidance" in value:
        raise _fault(path, "x-guidance is not supported; leave it out")
    if isinstance(value.get("minProperties"), (int, float)) and value["minProperties"] > 1:
        raise _fault(path, "minProperties above 1 is not supported; use required")
    properties, required = value.get("properties"), value.get("required")
    composed = any(keyword in value for keyword in _COMPOSING)
    if isinstance(properties, dict) and isinstance(required, list) and not composed:
        for name in required:
            if isinstance(name, str) and name not in properties:
                raise _fault(
                    path,
                    f"required names {name[:100]!r}, which properties does not describe; describe it there, "
                    "{} allows any value",
                )


def _fault(path: str, message: str) -> ConstraintError:
    shown = path if len(path) <= _MAX_POINTER else f"...{path[-_MAX_POINTER:]}"
    return ConstraintError(f"the schema at {shown}: {message}")


def _locate(schema: Any, accepts: SchemaCheck, fault: str) -> str:
    """Pointer to the innermost subschema that has the same fault when it stands alone."""
    path, tries = "#", 0
    shared = {name: schema[name] for name in _REFERENCED if isinstance(schema, dict) and name in schema}
    children = _children(schema)
    while (entry := next(children, None)) is not None and tries < _MAX_TRIES:
        step, child = entry
        tries += 1
        alone = {**shared, **child} if isinstance(child, dict) and not step.startswith(_REFERENCED) else child
        if accepts(alone) == fault:
            path, children = f"{path}/{step}", _children(child)
    return path


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    """(step of a pointer, subschema) of every schema directly inside this one."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _ONE:
            yield keyword, value
        elif keyword in _LISTS and isinstance(value, list):
            yield from ((f"{keyword}/{number}", child) for number, child in enumerate(value))
        elif keyword in _MAPPINGS and isinstance(value, dict):
            for name, child in value.items():
                yield f"{keyword}/{_escape(name)}", child


def _escape(name: str) -> str:
    return name[:100].replace("~", "~0").replace("/", "~1")
