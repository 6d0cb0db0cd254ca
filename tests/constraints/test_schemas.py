"""JSON Schemas: what comes out is valid, what is valid may come out, and what cannot be kept is refused by place."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msds.constraints import JsonObject, JsonSchema
from msds.constraints.schemas import MAX_DEPTH, MAX_REFERENCES
from msds.errors import ConstraintError, SamplingError
from tests.constraints.kit import allowed, byte_level, feed, started, walk

# U+007F is legal in JSON and always written escaped here
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=4)


def leaves() -> st.SearchStrategy[tuple[Any, Any]]:
    """(schema, a value that is valid under it)"""
    values = st.one_of(st.none(), st.booleans(), st.integers(-999, 999), NAMES)
    return st.one_of(
        values.map(lambda value: ({"const": value}, value)),
        st.lists(values, min_size=1, max_size=3).map(lambda values: ({"enum": values}, values[0])),
        st.booleans().map(lambda value: ({"type": "boolean"}, value)),
        NAMES.map(lambda text: ({"type": "string", "maxLength": 4}, text)),
        st.integers(-50, 50).map(lambda n: ({"type": "integer", "minimum": -50, "maximum": 50}, n)),
        st.integers(-9, 9).map(lambda n: ({"type": ["number", "null"], "minimum": -9.5, "maximum": 9.5}, n / 2)),
    )


def nested(inner: st.SearchStrategy[tuple[Any, Any]]) -> st.SearchStrategy[tuple[Any, Any]]:
    @st.composite
    def objects(draw: st.DrawFn) -> tuple[Any, Any]:
        fields = draw(st.dictionaries(NAMES, inner, max_size=3))
        required = [name for name in fields if draw(st.booleans())]
        schema = {"type": "object", "properties": {name: field[0] for name, field in fields.items()}}
        value = {name: field[1] for name, field in fields.items() if name in required or draw(st.booleans())}
        more = draw(st.sampled_from([False, {"type": "null"}]))
        return schema | {"required": required, "additionalProperties": more}, value

    @st.composite
    def arrays(draw: st.DrawFn) -> tuple[Any, Any]:
        schema, value = draw(inner)
        least = draw(st.integers(0, 2))
        return {"type": "array", "items": schema, "minItems": least, "maxItems": 3}, [value] * max(least, 1)

    @st.composite
    def unions(draw: st.DrawFn) -> tuple[Any, Any]:
        (one, value), (other, _) = draw(inner), draw(inner)
        return {"anyOf": draw(st.permutations([one, other]))}, value

    @st.composite
    def references(draw: st.DrawFn) -> tuple[Any, Any]:
        schema, value = draw(inner)
        if "$defs" in json.dumps(schema):
            return schema, value
        node = {"type": "array", "prefixItems": [{"$ref": "#/$defs/x"}], "items": False, "minItems": 1}
        return node | {"$defs": {"x": schema}}, [value]

    return st.one_of(objects(), arrays(), unions(), references())


def hoisted(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """The pair with every $defs at the root, where references look for it, under a name of its own."""
    shared: dict[str, Any] = {}

    def lift(schema: Any) -> Any:
        if isinstance(schema, list):
            return [lift(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if "$defs" in schema:
            name = f"d{len(shared)}"
            shared[name] = None
            shared[name] = lift(schema["$defs"]["x"])
            lifted = {key: value for key, value in schema.items() if key != "$defs"}
            return lifted | {"prefixItems": [{"$ref": f"#/$defs/{name}"}]}
        plain = ("const", "enum", "required")
        return {key: value if key in plain else lift(value) for key, value in schema.items()}

    schema = lift(pair[0])
    return (schema | {"$defs": shared} if shared else schema), pair[1]


PAIRS = st.recursive(leaves(), nested, max_leaves=6).map(hoisted)


@settings(max_examples=60)
@given(pair=PAIRS, noise=st.integers(0, 2**32 - 1))
def test_random_logits_give_valid_json(pair: tuple[Any, Any], noise: int) -> None:
    answer = walk(byte_level(), JsonSchema(pair[0]), noise=noise, likely=['"}],'], steps=600)
    if answer.reason == "length":  # rare: whitespace everywhere
        return
    assert answer.reason == "stop"
    jsonschema.validate(json.loads(answer.text), pair[0], jsonschema.Draft202012Validator)


@settings(max_examples=60)
@given(pair=PAIRS, compact=st.booleans())
def test_a_valid_text_may_come_out_and_end_and_no_other_prefix_may_end(pair: tuple[Any, Any], compact: bool) -> None:
    """Each value in each spelling is allowed token by token, so a constraint takes nothing from the model."""
    schema, value = pair
    separators = (",", ":") if compact else None
    ids = byte_level()._tokenizer.encode_plain(json.dumps(value, ensure_ascii=False, separators=separators))
    state = started(byte_level(), JsonSchema(schema))
    assert state.count_valid(ids) == len(ids)
    for count, id_ in enumerate(ids):
        whole = state._table.tokenizer.decode(ids[:count])
        assert not state.may_end or is_valid(whole, schema)
        state.accept(id_)
    assert state.may_end


def is_valid(text: str, schema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def test_json_objects() -> None:
    seen = 0
    for noise in range(12):
        answer = walk(byte_level(), JsonObject(), noise=noise, likely=['{}":,1'])
        if answer.reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
            seen += 1
    assert seen > 6


def test_names_may_be_in_any_script() -> None:
    schema = {"type": "object", "properties": {"城市": {"enum": ["北京", 'a\n"b']}}, "required": ["城市"]}
    answer = walk(byte_level(), JsonSchema(schema | {"additionalProperties": False}))
    assert list(json.loads(answer.text)) == ["城市"]


def test_whitespace_is_bounded() -> None:
    """A blank, or a line break and an indentation, so that a model that loops in whitespace gets on."""
    text = json.dumps({"a": [1, {"b": None}]}, indent=8)
    for whitespace in (" ", "\n", "\r\n", "\n" + "\t" * 40, "\n" + " " * 40):
        state = started(byte_level(), JsonObject())
        feed(byte_level(), state, "{" + whitespace + '"')
    state = started(byte_level(), JsonObject())
    feed(byte_level(), state, text)
    assert state.may_end
    for looping in ("{  ", "{\n\n", "{\n" + " " * 41):
        state = started(byte_level(), JsonObject())
        feed(byte_level(), state, looping[:-1])
        assert looping[-1].encode() not in allowed(byte_level(), state)


def test_large_schemas() -> None:
    """Many optional properties are kept to the end; schemas that would take long to compile are refused first."""
    names = [f"property {number}" for number in range(2000)]
    state = started(
        byte_level(), JsonSchema({"type": "object", "properties": {key: {"type": "string"} for key in names}})
    )
    feed(byte_level(), state, json.dumps({names[7]: "x", names[1999]: "y"}))
    assert state.may_end
    with pytest.raises(ConstraintError, match="more than 2048 properties"):
        started(byte_level(), JsonSchema({"type": "object", "properties": {key: {} for key in map(str, range(2049))}}))
    with pytest.raises(ConstraintError, match="characters; the limit is 262144"):
        JsonSchema({"enum": list(range(100_000))})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, ["#:", "not"]),
        ({"properties": {"a/b": {"items": {"anyOf": [{}, {"uniqueItems": True}]}}}}, ["a~1b/items/anyOf/1", "unique"]),
        ({"type": "object", "required": ["x"], "properties": {}}, ["#:", "'x'"]),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, ["#:", "'x'"]),
        ({"items": {"type": "object", "required": ["y"], "properties": {"x": {}}}}, ["#/items", "'y'"]),
        ({"$defs": {"d": {"type": "objekt"}}, "items": {"$ref": "#/$defs/d"}}, ["#/$defs/d:", "objekt"]),
        ({"$ref": "#/$defs/none"}, ["#:", "none"]),
        ({"$ref": "https://example.com/schema"}, ["#:", "example.com"]),
        ({"type": "integer", "minimum": 5, "maximum": 3}, ["#:", "minimum (5)"]),
        ({"type": "string", "pattern": "(?=a)b"}, ["#:", "look-around"]),
        ({"type": "string", "format": "no-such-format"}, ["#:", "no-such-format"]),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["#:", "oneOf", "use anyOf"]),
        ({"type": "object", "minProperties": 2}, ["#:", "minProperties"]),
        ({"x-guidance": {"lenient": True}, "not": {}}, ["#:", "x-guidance"]),
        ({"enum": []}, ["#:"]),
        ({"$ref": "#"}, ["no text"]),
        ({"patternProperties": {f"^{n}$": {} for n in range(99)}}, ["64 patternProperties"]),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_refused_with_the_place_and_the_reason(schema: Any, words: list[str]) -> None:
    with pytest.raises(ConstraintError) as caught:
        byte_level().compile(JsonSchema(schema))
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 700


def test_required_beside_other_keywords_is_no_slip() -> None:
    """`required` may speak of what a reference or a branch describes."""
    branches = {"properties": {"a": {"type": "null"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    for schema in ({"type": "object", "required": ["x"]}, {"type": "object", **branches}):
        byte_level().compile(JsonSchema(schema))


@pytest.mark.parametrize("schema", [False, [], "{}", None, {"a": {1, 2}}, {"const": float("nan")}])
def test_what_is_no_schema(schema: Any) -> None:
    with pytest.raises(SamplingError, match="schema"):
        JsonSchema(schema)


def test_schemas_that_would_overflow_the_stack_are_refused_or_kept() -> None:
    """llguidance recurses: what is let through must not end the process, which this test would show by dying."""
    deep: Any = {"type": "null"}
    for _ in range(MAX_DEPTH + 1):
        deep = {"anyOf": [deep]}
    with pytest.raises(ConstraintError, match="levels"):
        byte_level().compile(JsonSchema(deep))

    def chain(length: int) -> Any:
        links = {f"r{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/r{n + 1}"}}} for n in range(length)}
        return {"$ref": "#/$defs/r0", "$defs": {**links, f"r{length}": {"type": "null"}}}

    byte_level().compile(JsonSchema(chain(MAX_REFERENCES - 1)))
    with pytest.raises(ConstraintError, match="too large"):
        byte_level().compile(JsonSchema(chain(MAX_REFERENCES + 1)))
