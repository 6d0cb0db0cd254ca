"""Whatever arrives, the answer is a good one or an OpenAI error: never a 500, and the service goes on.

Bodies are drawn in three ways: any JSON, a valid body with a few values replaced by hostile ones, and bytes that were
damaged. The engine is real, its runner rigged, so that what is accepted is also served.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from msds_serve.app import create_app
from msds_serve.protocol.fields import Limits, chat_table, completion_table, detokenize_table, tokenize_table
from msds_serve.service import Service, ServiceOptions
from tests.serve.rigged import rigged_llm, write_rigged_folder

USER = [{"role": "user", "content": "what?"}]
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": USER, "max_tokens": 2, "n": 1, "tools": [TOOL]},
    "/v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 2, "logprobs": 1, "echo": True},
    "/tokenize": {"messages": USER, "chat_template_kwargs": {}},
    "/detokenize": {"tokens": [5, 6]},
}
FIELDS = {
    "/v1/chat/completions": [*chat_table(Limits()).supported, *chat_table(Limits()).refused],
    "/v1/completions": [*completion_table(Limits()).supported, *completion_table(Limits()).refused],
    "/tokenize": list(tokenize_table().supported),
    "/detokenize": list(detokenize_table(Limits()).supported),
}
ALLOWED = {400, 401, 404, 405, 413, 415, 429}

NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 0.5, 1.5, 2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, -1e308, 5e-324, -0.0]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(),
    st.floats(),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["\ud800", "\udfff\ud800", "\x00", "<｜end▁of▁sentence｜>", "{{ 1 }}", "a" * 3000, "tiny"]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANY = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
DEEP = st.integers(1, 3000).map(lambda depth: json.loads("[" * min(depth, 900) + "]" * min(depth, 900)))
PARTS = st.sampled_from(
    [
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}],
        [{"role": "assistant", "tool_calls": [{"id": 1}]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "assistant", "content": ""}, {"role": "assistant", "content": "x"}],
        [{"role": "system", "content": "x" * 900}],
        [[5] * 2000, [6]],
        [[], [5]],
        {"include_usage": True},
        {"type": "json_schema", "json_schema": {}},
        [TOOL] * 200,
        {"5": 100, "6": -100},
        {"thinking": [[]], "content": 1},
    ]
)
HOSTILE = st.one_of(SCALARS, PARTS, ANY, DEEP)
PATHS = st.sampled_from(sorted(VALID))


@pytest.fixture(scope="module")
def client(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("fuzzed") / "model"
    write_rigged_folder(tiny("llama_base", tokenizer=True), folder)
    llm, _ = rigged_llm(folder, max_model_len=128, max_num_seqs=8, max_waiting=64)
    service = Service(llm, ServiceOptions(model_names=("tiny",), max_body_bytes=20_000, request_timeout=30))
    with TestClient(create_app(service), raise_server_exceptions=False) as client:
        yield client
    assert service.engine.stats.referenced_blocks == 0


def check(response: Any) -> None:
    """A good answer, or a refusal in OpenAI's shape; a stream without a failure in it."""
    if response.status_code == 200:
        assert '"server_error"' not in response.text
        return
    assert response.status_code in ALLOWED, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 2000
    assert error["param"] is None or isinstance(error["param"], str)


def post(client: TestClient, path: str, data: bytes, **headers: str) -> Any:
    return client.post(path, content=data, headers={"content-type": "application/json"} | headers)


fuzz = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@fuzz
@given(path=PATHS, data=st.data())
def test_valid_bodies_with_hostile_values(client: TestClient, path: str, data: st.DataObject) -> None:
    names = st.one_of(st.sampled_from(FIELDS[path]), st.sampled_from(FIELDS[path]), TEXTS)
    changes = data.draw(st.dictionaries(names, HOSTILE, min_size=1, max_size=3))
    body = VALID[path] | changes
    check(post(client, path, json.dumps(body).encode()))


@fuzz
@given(path=PATHS, body=ANY)
def test_any_json(client: TestClient, path: str, body: Any) -> None:
    check(post(client, path, json.dumps(body, ensure_ascii=True).encode()))


@fuzz
@given(
    path=PATHS,
    at=st.integers(0, 200),
    count=st.integers(0, 20),
    junk=st.one_of(
        st.binary(max_size=6), st.sampled_from([b'"n":1,"n":2,', b"[" * 5000, b"1" * 5000, b"\xff\xfe", b"\0"])
    ),
    kind=st.sampled_from(["application/json", "text/plain", "multipart/form-data", "", "application/json; charset=x"]),
)
def test_damaged_bytes(client: TestClient, path: str, at: int, count: int, junk: bytes, kind: str) -> None:
    data = json.dumps(VALID[path]).encode()
    at = min(at, len(data))
    check(post(client, path, data[:at] + junk + data[at + count :], **{"content-type": kind}))


@fuzz
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"]),
    path=st.one_of(
        st.sampled_from(
            [*VALID, "/v1/models", "/v1/models/tiny", "/v1/models/%ff%00", "/health", "/metrics", "//", "/v1"]
        ),
        st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="?#\\%[]"), max_size=12),
    ),
    headers=st.dictionaries(
        st.sampled_from(["authorization", "content-length", "accept", "x-request-id", "origin", "transfer-encoding"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=8),
        max_size=3,
    ),
)
def test_any_path_and_method(client: TestClient, method: str, path: str, headers: dict[str, str]) -> None:
    url = "http://testserver/" + path.lstrip("/")
    check(client.request(method, url, headers=headers))


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/v1/chat/completions", b""),
        ("/v1/chat/completions", b"null"),
        ("/v1/completions", b'{"model":"tiny","prompt":"\\ud800","max_tokens":1}'),
        ("/v1/completions", b'{"model":"tiny","prompt":"a","max_tokens":1e400}'),
        ("/v1/completions", b'{"model":"tiny","prompt":"a","temperature":NaN}'),
        ("/v1/completions", b'{"model":"tiny","prompt":"a","n":128,"max_tokens":2147483647}'),
        ("/v1/completions", b'{"model":"tiny","prompt":[' + b"[1]," * 1023 + b'[1]],"n":3}'),
        ("/v1/completions", b'{"model":"tiny","prompt":"a","model":"b"}'),
        ("/v1/completions", '{"model":"tiny","prompt":"ä"}'.encode("latin-1")),
        ("/v1/completions", '{"model":"tiny","prompt":"ä"}'.encode("utf-16")),
        ("/tokenize", b'{"prompt":' + b"[" * 9000 + b"]" * 9000 + b"}"),
        ("/detokenize", b'{"tokens":[2147483648]}'),
    ],
)
def test_known_nastinesses_are_refused(client: TestClient, path: str, data: bytes) -> None:
    response = post(client, path, data)
    check(response)
    assert response.status_code in ALLOWED
