"""The HTTP surface over a real engine with a tiny model: answers, streams, refusals, and what a failure leaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from httpx import Client
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from msds_serve.app import create_app
from msds_serve.bodies import Bodies
from msds_serve.protocol.errors import ApiError
from msds_serve.request_log import RequestLog
from msds_serve.service import Service
from tests.serve.conftest import mesh_of

USER = [{"role": "user", "content": "hello there"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(client: Client, **fields: Any) -> Any:
    return client.post(CHAT, json={"model": "tiny", "messages": USER, "max_tokens": 12, "temperature": 0, **fields})


def events(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream, which must end with [DONE]."""
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def metric(client: Client, name: str) -> float:
    """The sum of the samples whose names begin so."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def wait_until_idle(client: Client) -> None:
    """Until no request is left, which then holds no block of the cache."""
    deadline = time.monotonic() + 20
    while metric(client, "msds_requests_running") or metric(client, "msds_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert metric(client, "msds_cache_usage_ratio") == 0


class TestProbes:
    def test_health_ready_version(self, client: Client) -> None:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json() == {"status": "ready"}
        assert client.get("/version").json()["system_fingerprint"].startswith("fp_")

    def test_models(self, client: Client) -> None:
        listed = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["tiny", "alias"]
        assert client.get("/v1/models/alias").json()["root"] == "tiny"
        assert client.get("/v1/models/other").status_code == 404

    def test_openapi_names_the_routes(self, client: Client) -> None:
        paths = client.get("/openapi.json").json()["paths"]
        assert {CHAT, COMPLETIONS, "/v1/models", "/tokenize", "/metrics"} <= set(paths)

    def test_metrics_count(self, client: Client) -> None:
        before = metric(client, "msds_generation_tokens_total")
        assert chat(client, ignore_eos=True).json()["usage"]["completion_tokens"] == 12
        assert metric(client, "msds_generation_tokens_total") == before + 12
        assert metric(client, "msds_time_to_first_token_seconds_count") > 0


class TestChat:
    def test_an_answer(self, client: Client) -> None:
        body = chat(client).json()
        assert body["object"] == "chat.completion"
        (choice,) = body["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"n": 3, "temperature": 1, "seed": 5},
            {"logprobs": True, "top_logprobs": 2},
            {"ignore_eos": True, "max_tokens": 30, "frequency_penalty": 0.5},
        ],
        ids=["plain", "choices", "logprobs", "penalties"],
    )
    def test_a_stream_says_what_the_whole_answer_says(self, client: Client, fields: dict[str, Any]) -> None:
        whole = chat(client, **fields).json()
        body = {"model": "tiny", "messages": USER, "max_tokens": 12, "temperature": 0, **fields}
        chunks = events(client, CHAT, body | {"stream_options": {"include_usage": True}})
        assert chunks[-1]["choices"] == []
        assert {k: v for k, v in chunks[-1]["usage"].items() if k != "prompt_tokens_details"} == {
            k: v for k, v in whole["usage"].items() if k != "prompt_tokens_details"
        }
        for choice in whole["choices"]:
            mine = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == choice["index"]]
            assert next(c["delta"].get("role") for c in mine) == "assistant"
            for part in ("content", "reasoning_content"):
                joined = "".join(c["delta"].get(part) or "" for c in mine)
                assert joined == (choice["message"].get(part) or "")
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
            if choice["logprobs"] is not None:
                entries = [entry for c in mine for entry in (c["logprobs"] or {}).get("content") or []]
                assert [e["token"] for e in entries] == [e["token"] for e in choice["logprobs"]["content"]]

    def test_seeds(self, client: Client) -> None:
        def text(seed: int) -> str:
            message = chat(client, temperature=1, seed=seed, ignore_eos=True).json()["choices"][0]["message"]
            return str(message)

        assert text(3) == text(3)
        assert text(3) != text(4)

    def test_the_prefix_cache_shows_in_usage(self, client: Client) -> None:
        messages = [{"role": "user", "content": "the same long words again and again " * 2}]
        first = chat(client, messages=messages).json()
        second = chat(client, messages=messages).json()
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert second["choices"] == first["choices"]


class TestCompletions:
    def test_texts_ids_and_lists_of_either(self, client: Client) -> None:
        def texts(prompt: Any) -> list[str]:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}
            return [choice["text"] for choice in client.post(COMPLETIONS, json=body).json()["choices"]]

        ids = client.post("/tokenize", json={"prompt": "one two"}).json()["tokens"]
        assert texts("one two") == texts(ids) == texts([ids]) == texts(["one two"])
        assert texts(["one two", "three"]) == texts("one two") + texts("three")

    def test_echo_with_logprobs(self, client: Client) -> None:
        body = {"model": "tiny", "prompt": "one two", "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1}
        (choice,) = client.post(COMPLETIONS, json=body | {"ignore_eos": True}).json()["choices"]
        ids = client.post("/tokenize", json={"prompt": "one two"}).json()["tokens"]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith("one two")
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(ids) + 3
        assert logprobs["token_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])

    def test_a_stream_says_what_the_whole_answer_says(self, client: Client) -> None:
        body = {"model": "tiny", "prompt": ["one", "two"], "n": 2, "max_tokens": 5, "seed": 2, "ignore_eos": True}
        whole = client.post(COMPLETIONS, json=body).json()
        chunks = events(client, COMPLETIONS, body)
        for choice in whole["choices"]:
            mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in mine) == choice["text"]
            assert mine[-1]["finish_reason"] == choice["finish_reason"]

    def test_a_stream_counts_what_was_cached_as_the_whole_answer_does(self, client: Client) -> None:
        body = {"model": "tiny", "prompt": ["again and again and once more " * 2, "hardly"], "n": 2, "max_tokens": 3}
        client.post(COMPLETIONS, json=body)
        whole = client.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        last = events(client, COMPLETIONS, body | {"stream_options": {"include_usage": True}})[-1]
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == whole > 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "status", "names"),
        [
            ({"model": "other"}, 404, ["other", "tiny"]),
            ({"messages": []}, 400, ["messages"]),
            ({"messages": [{"role": "robot", "content": "x"}]}, 400, ["robot"]),
            ({"temperature": -1}, 400, ["temperature"]),
            ({"max_tokens": 1000}, 400, ["max_tokens", "1000", "128"]),
            ({"messages": [{"role": "user", "content": "many words " * 200}]}, 400, ["128"]),
            ({"messages": [{"role": "user", "content": "x" * 19_000}]}, 400, ["128"]),
            ({"best_of": 2}, 400, ["best_of"]),
            ({"no_such_field": 1}, 400, ["no_such_field"]),
            ({"stream_options": {"include_usage": True}}, 400, ["stream_options"]),
        ],
    )
    def test_by_name_and_value(self, client: Client, fields: Any, status: int, names: list[str]) -> None:
        response = chat(client, **fields)
        error = response.json()["error"]
        assert response.status_code == status, error
        for name in names:
            assert name in error["message"]
        assert set(error) == {"message", "type", "param", "code"}

    def test_what_is_too_long_is_named(self, client: Client) -> None:
        def param(path: str, **fields: Any) -> Any:
            error = client.post(path, json={"model": "tiny", **fields}).json()["error"]
            assert error["code"] == "context_length_exceeded"
            return error["param"]

        words = "many words " * 200
        assert param(COMPLETIONS, prompt=words) == "prompt"
        assert param(COMPLETIONS, prompt=["a", words]) == "prompt[1]"
        assert param(COMPLETIONS, prompt=[5] * 5000) == "prompt"
        assert param(CHAT, messages=[{"role": "user", "content": words}]) == "messages"
        assert param(COMPLETIONS, prompt="a", max_tokens=128) == "max_tokens"

    def test_more_prompts_than_may_ever_wait_are_no_matter_of_trying_again(self, client: Client) -> None:
        response = client.post(COMPLETIONS, json={"model": "tiny", "prompt": ["a"] * 20, "n": 2})
        assert response.status_code == 400
        assert "asks for 40 answers, but at most 32 may wait" in response.json()["error"]["message"]

    def test_bodies(self, client: Client) -> None:
        def post(content: bytes, kind: str | None = "application/json; charset=utf-8") -> Any:
            return client.post(CHAT, content=content, headers={} if kind is None else {"content-type": kind})

        for content in (b"{", b"[]", b"\xff"):
            assert post(content).status_code == 400
        assert post(b'"' + b"x" * 30_000 + b'"').status_code == 413
        for kind in (None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"):
            refused = post(json.dumps({"model": "tiny", "messages": USER}).encode(), kind)
            assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert post(b'{"seed": ' + b"9" * 5000 + b"}").json()["error"]["message"] == (
            "the body has an integer of 5000 digits, more than any field takes"
        )

    def test_ids_of_the_clients_choice(self, client: Client) -> None:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        answer = client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "night/7#b"})
        assert answer.headers["x-request-id"] == "night/7#b"
        assert answer.json()["id"] == "cmpl-night/7#b"
        assert client.post(COMPLETIONS, json=body, headers={"X-Request-Id": ""}).status_code == 200
        for bad in ("two words", "x" * 129):
            refused = client.post(COMPLETIONS, json=body, headers={"X-Request-Id": bad})
            assert refused.status_code == 400
            assert "X-Request-Id" in refused.json()["error"]["message"]
            assert client.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"] != bad

    def test_routes_and_methods_that_do_not_exist(self, client: Client) -> None:
        before = metric(client, 'msds_requests_total{endpoint="none",status="404"}')
        nothing = client.get("/v1/nothing")
        assert nothing.status_code == 404
        assert "GET /v1/nothing" in nothing.json()["error"]["message"]
        assert metric(client, 'msds_requests_total{endpoint="none",status="404"}') == before + 1
        other = client.get(CHAT)
        assert (other.status_code, other.headers["allow"]) == (405, "POST")
        assert nothing.headers["x-request-id"] != other.headers["x-request-id"]

    @pytest.mark.parametrize(
        ("path", "fields", "param"),
        [
            (CHAT, {"max_completion_tokens": 1000}, "max_completion_tokens"),
            (CHAT, {"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens"),
            (CHAT, {"stop_token_ids": [5, 10**6]}, "stop_token_ids"),
            (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
            (CHAT, {"messages": [*USER, {"role": "tool", "content": "4"}]}, "messages"),
            (COMPLETIONS, {"prompt": [[5], [7, 10**6]]}, "prompt[1][1]"),
            (COMPLETIONS, {"prompt": [10**6]}, "prompt[0]"),
            (COMPLETIONS, {"prompt": "a", "n": 40}, "n"),
            (CHAT, {"n": 40}, "n"),
            ("/detokenize", {"tokens": [5] * 5000}, "tokens"),
            ("/tokenize", {"prompt": "x " * 9000}, "prompt"),
            (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens"),
            (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
            ("/detokenize", {"tokens": [5, 10**6]}, "tokens[1]"),
        ],
    )
    def test_the_field_at_fault(self, client: Client, path: str, fields: dict[str, Any], param: str) -> None:
        body = {"model": "tiny", **({"messages": USER} if path == CHAT else {}), **fields}
        response = client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert param.partition("[")[0] in error["message"]

    def test_refused_prompts_are_not_counted(self, client: Client) -> None:
        before = metric(client, "msds_prompt_tokens_total")
        assert client.post(COMPLETIONS, json={"model": "tiny", "prompt": [5] * 200}).status_code == 400
        assert metric(client, "msds_prompt_tokens_total") == before
        body = {"model": "tiny", "prompt": [[5] * 20, [6] * 10], "n": 2, "max_tokens": 2, "ignore_eos": True}
        assert client.post(COMPLETIONS, json=body).status_code == 200
        assert metric(client, "msds_prompt_tokens_total") == before + 30

    def test_a_full_queue(self, client: Client) -> None:
        body = {"model": "tiny", "prompt": ["a"] * 9, "max_tokens": 1}
        response = client.post(COMPLETIONS, json=body | {"n": 9})
        assert response.status_code in (400, 429)
        assert chat(client).status_code == 200


def test_tokenize_and_back(client: Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "one two", "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "one two"}
    messages = client.post("/tokenize", json={"messages": USER}).json()
    assert messages["count"] == chat(client).json()["usage"]["prompt_tokens"]


def test_leaving_a_stream_ends_the_generation(client: Client) -> None:
    body = {"model": "tiny", "messages": USER, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with client.stream("POST", CHAT, json=body) as response:
        chunks: Iterator[str] = response.iter_lines()
        next(chunks)
    wait_until_idle(client)


def test_a_failing_step_fails_its_request_alone(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = service.llm.engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "decode", lambda rows: (_ for _ in ()).throw(ValueError("no such kernel")))
        response = chat(client, ignore_eos=True)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert chat(client).status_code == 200
    assert service.engine.stats.referenced_blocks == 0


@pytest.fixture
def warm(request: pytest.FixtureRequest) -> None:
    """Every planned shape is compiled; `msds serve` does that before it listens."""
    if not mesh_of(request):
        request.getfixturevalue("service").llm.engine.runner.warm_up(None)


def test_nothing_compiles_after_every_shape_was_seen(client: Client, warm: None) -> None:
    before = metric(client, "msds_graph_compilations_total")
    for length in (1, 17, 60):
        body = {"model": "tiny", "prompt": [[7] * length] * 3, "max_tokens": 4, "ignore_eos": True}
        assert client.post(COMPLETIONS, json=body).status_code == 200
        echo = body | {"echo": True, "logprobs": 2}
        assert client.post(COMPLETIONS, json=echo).status_code == 200
    assert metric(client, "msds_graph_compilations_total") == before > 0


def test_a_text_far_too_long_is_refused_before_it_is_cut_into_tokens(service: Service) -> None:
    service.check_length(1000, "prompt")
    with pytest.raises(ApiError, match="has 1000000 characters, far more than the context of 128 tokens"):
        service.check_length(10**6, "prompt")


def test_a_constraint_is_compiled_once_for_all_prompts(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    grammars = service.llm.model.grammars
    assert grammars is not None
    fault_of = type(grammars.table).fault_of
    monkeypatch.setattr(
        type(grammars.table), "fault_of", lambda table, source: tried.append(source) or fault_of(table, source)
    )
    refused = {"model": "tiny", "prompt": ["a"] * 8, "structured_outputs": {"grammar": "start: nothing_of_this_name"}}
    response = client.post(COMPLETIONS, json=refused)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs")
    assert len(tried) == 1


def test_mounted_in_another_application(service: Service, tmp_path: Path) -> None:
    """The paths that need no key, and those that are logged, are those of the routes, not of the URL."""
    options = replace(service.options, api_keys=("k",))
    log = tmp_path / "log.jsonl"
    inner = create_app(Service(service.llm, options), RequestLog(log))
    outer = Starlette(routes=[Mount("/llm", inner)])
    client = TestClient(outer)  # without a lifespan: nothing generates, which is no matter here
    assert client.get("/llm/health").status_code == 200
    assert client.get("/llm/v1/models").status_code == 401
    assert client.get("/llm/v1/models", headers={"Authorization": "Bearer  k"}).status_code == 200
    asked = client.post(
        "/llm/v1/completions", json={"model": "tiny", "prompt": "a"}, headers={"Authorization": "Bearer k"}
    )
    assert asked.status_code == 503
    assert json.loads(log.read_text())["path"] == "/v1/completions"


def test_bodies_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given up after a time, and at once when the server stops."""

    class Slow:
        headers: ClassVar = {"content-type": "application/json"}

        async def stream(self) -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(60)

    async def fault(bodies: Bodies, *, ends: bool) -> ApiError:
        task = asyncio.ensure_future(bodies.receive(Slow()))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        if ends:
            bodies.end()
        with pytest.raises(ApiError) as caught:
            await task
        return caught.value

    assert asyncio.run(fault(Bodies(100), ends=True)).status == 503
    monkeypatch.setattr("msds_serve.bodies.RECEIVE_SECONDS", 0.1)
    assert asyncio.run(fault(Bodies(100), ends=False)).status == 408
