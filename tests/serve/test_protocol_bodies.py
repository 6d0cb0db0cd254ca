"""Bodies as bytes, the small endpoints, and any body at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_serve.protocol.errors import ApiError
from msds_serve.protocol.fields import Limits, chat_table, completion_table
from msds_serve.protocol.requests import parse_body, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from tests.serve.test_protocol_requests import TOOL, USER, refused


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1, "a": 2}', "'a' twice"),
        (b'{"a": "\\ud800"}', "U+D800"),
        (b'{"a": [{"\\udfff": 1}]}', "U+DFFF"),
        (b'{"a": "\xff"}', "0xff"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of 5000 digits"),
    ],
)
def test_bodies(data, part):
    with pytest.raises(ApiError) as caught:
        parse_body(data)
    assert caught.value.status == 400
    assert part in caught.value.message


def test_a_body_with_all_of_unicode():
    body = {"model": "m", "messages": [{"role": "user", "content": "你好 👩‍🚀"}]}
    assert parse_body(json.dumps(body).encode()) == body
    assert parse_body(json.dumps(body, ensure_ascii=False).encode()) == body


def test_tokenize_and_detokenize():
    assert parse_tokenize({"prompt": "a"}).prompt == "a"
    request = parse_tokenize({"messages": USER, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}})
    assert (request.messages, request.add_generation_prompt) == (tuple(USER), False)
    for body, param in [
        ({}, "prompt"),
        ({"prompt": "a", "messages": USER}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "x": 1}, "x"),
    ]:
        assert refused(lambda body=body: parse_tokenize(body))[0] == param
    assert parse_detokenize({"tokens": [1, 2]}).tokens == (1, 2)
    for body in ({}, {"tokens": "1"}, {"tokens": [True]}, {"tokens": [-1]}, {"tokens": [2**31]}):
        assert refused(lambda body=body: parse_detokenize(body))[0].startswith("tokens")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [*chat_table(Limits()).supported, *completion_table(Limits()).supported, "best_of", "user", "x"]
)
STRUCTURED = st.sampled_from(
    [USER, [TOOL], {"type": "json_object"}, {"type": "function", "function": {"name": "f"}}, True, 1]
)


def failure(parse, body):
    try:
        parse(body)
    except ApiError as error:
        json.dumps(error.body(), allow_nan=False).encode()
        return error
    return None


@given(st.dictionaries(NAMES, JSON | STRUCTURED, max_size=6))
def test_nothing_but_a_request_or_a_400_comes_out(fields):
    base = {"model": "m", "messages": USER, "prompt": "a"}
    for parse, own in (
        (parse_chat, "prompt"),
        (parse_completion, "messages"),
        (parse_tokenize, ""),
        (parse_detokenize, ""),
    ):
        body = {name: value for name, value in (base | fields).items() if name != own or name in fields}
        error = failure(parse, body)
        assert error is None or error.status == 400
