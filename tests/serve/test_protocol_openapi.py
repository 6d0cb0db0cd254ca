"""The OpenAPI document promises what the parser does, and describes what is answered."""

import json
import math
import re

import pytest

from msds_serve.protocol.errors import ApiError, server_error
from msds_serve.protocol.fields import Limits, chat_table, completion_table, detokenize_table, tokenize_table
from msds_serve.protocol.openapi import openapi
from msds_serve.protocol.requests import StreamOptions
from msds_serve.protocol.responses import detokenized, model_list, tokenized
from tests.serve.test_protocol_answers import TEXTS, options, stream_chat, token_bytes, whole_chat
from tests.serve.test_protocol_completions import stream_text

DOCUMENT = openapi(version="1.0", models=["m", "alias"], keys=True)
SCHEMAS = DOCUMENT["components"]["schemas"]
TABLES = {
    "ChatRequest": chat_table(Limits()),
    "CompletionRequest": completion_table(Limits()),
    "TokenizeRequest": tokenize_table(),
    "DetokenizeRequest": detokenize_table(Limits()),
}
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def fits(schema, value):
    """Whether a value fits a schema, for the keywords that the document uses."""
    if "$ref" in schema:
        return fits(SCHEMAS[schema["$ref"].rpartition("/")[2]], value)
    if "anyOf" in schema:
        return any(fits(option, value) for option in schema["anyOf"])
    if "enum" in schema and not any(type(value) is type(legal) and value == legal for legal in schema["enum"]):
        return False
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if not any(isinstance(whole, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)) for kind in kinds):
        return False
    if isinstance(value, dict):
        if not all(re.search(schema.get("propertyNames", {}).get("pattern", ""), name) for name in value):
            return False
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", ())) and all(
            fits(properties[name], item) if name in properties else more is True or (more and fits(more, item))
            for name, item in value.items()
        )
    if isinstance(value, list):
        count = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return count and all(fits(schema.get("items", {}), item) for item in value)
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0) and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        above = value > schema.get("exclusiveMinimum", -math.inf)
        return above and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return True


def references(value):
    if isinstance(value, dict):
        yield from ([value["$ref"]] if "$ref" in value else [])
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_it_is_one_closed_json_document():
    assert DOCUMENT["openapi"] == "3.1.0"
    json.dumps(DOCUMENT, allow_nan=False)
    assert {reference.rpartition("/")[2] for reference in references(DOCUMENT)} <= set(SCHEMAS)
    assert DOCUMENT["security"] == [{"key": []}]
    assert "security" not in openapi(version="1.0", models=["m"])


@pytest.mark.parametrize("name", TABLES)
def test_requests_are_those_of_the_tables(name):
    table, schema = TABLES[name], SCHEMAS[name]
    assert set(schema["properties"]) == {*table.supported, *table.ignored, *table.refused}
    assert all(entry["description"] for entry in schema["properties"].values())
    assert schema["additionalProperties"] is False
    for field, refused in table.refused.items():
        for value in (None, *refused.neutral):
            assert fits(schema["properties"][field], value)
            table.read(minimal(name) | {field: value})


def minimal(name):
    return {
        "ChatRequest": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
        "CompletionRequest": {"model": "m", "prompt": "x"},
        "TokenizeRequest": {"prompt": "x"},
        "DetokenizeRequest": {"tokens": [1]},
    }[name]


VALUES = [
    *(True, 0, 1, -1, 2, 3, 21, 129, 0.5, 2.5, -3.5, 1e300, 10**30, "", "a", "auto", [], ["a"], [1], [[1]], [""], {}),
    *(
        {"1": 5},
        {"x": 5},
        {"1": 500},
        {"type": "json_object"},
        {"type": "text"},
        {"type": "x"},
        {"include_usage": True},
    ),
    *([{"role": "user", "content": "x"}], [{"role": "robot", "content": "x"}], {"include_usage": 1}),
    *([{"type": "function", "function": {"name": "f"}}], [{"type": "function"}], [True], [-1], 2**31, "flex"),
]


@pytest.mark.parametrize("name", TABLES)
def test_fields_and_schemas_agree(name):
    """What the schema refuses the parser refuses; what the parser takes the schema allows."""
    table, schema = TABLES[name], SCHEMAS[name]
    for field, entry in {**table.supported, **table.ignored}.items():
        for value in VALUES:
            if field == "model":
                continue
            try:
                entry.kind(value, field)
                taken = True
            except ApiError:
                taken = False
            promised = fits(schema["properties"][field], value)
            assert promised == taken, (field, value)


@pytest.mark.parametrize("text", TEXTS)
def test_answers_fit_their_schemas(text):
    for answers in (options(), options(top_logprobs=None, include_reasoning=False)):
        assert fits(SCHEMAS["ChatCompletion"], whole_chat(answers, [text]))
        for stream in (StreamOptions(), StreamOptions(True, True)):
            for chunk in stream_chat(answers, [text], stream=stream):
                assert fits(SCHEMAS["ChatCompletionChunk"], chunk)


def test_other_answers_fit_their_schemas():
    for chunk in stream_text(["a", ""], echo=True):
        assert fits(SCHEMAS["Completion"], chunk)
    assert fits(SCHEMAS["ModelList"], model_list(["m"], created=1, max_model_len=5))
    assert fits(SCHEMAS["Tokenized"], tokenized([65], max_model_len=5, token_bytes=token_bytes))
    assert fits(SCHEMAS["Detokenized"], detokenized(""))
    assert fits(SCHEMAS["Error"], server_error().body())
    assert not fits(SCHEMAS["Error"], {"error": {"message": 1}})
