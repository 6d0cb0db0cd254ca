"""Framing, and OpenAI's own client reading what we write."""

import json

import pytest

from msds_serve.protocol.errors import server_error
from msds_serve.protocol.logprobs import LegacyLogprobs
from msds_serve.protocol.requests import StreamOptions
from msds_serve.protocol.responses import (
    completion,
    completion_choice,
    detokenized,
    model_list,
    system_fingerprint,
    tokenized,
    usage,
)
from msds_serve.protocol.streaming import DONE, error_event, event
from tests.serve.test_protocol_answers import CALLS, TEXTS, options, scored, stream_chat, token_bytes, whole_chat
from tests.serve.test_protocol_completions import TEXT_HEAD, stream_text


def test_events():
    assert event({"a": "你\n"}) == 'data: {"a":"你\\n"}\n\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        event({"a": float("nan")})


def client(body, content_type):
    openai = pytest.importorskip("openai")
    import httpx2

    def answer(request):
        return httpx2.Response(200, content=body, headers={"content-type": content_type})

    transport = httpx2.MockTransport(answer)
    return openai.OpenAI(
        api_key="k", base_url="http://msds/v1", http_client=httpx2.Client(transport=transport), max_retries=0
    )


def ask(body, content_type="text/event-stream"):
    with client(body, content_type) as openai:
        answer = openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], stream=content_type == "text/event-stream"
        )
        return list(answer) if content_type == "text/event-stream" else answer


def test_the_official_client_reads_a_stream():
    text = f"hm</think>Look: {CALLS}"
    chunks = stream_chat(options(), [text], stream=StreamOptions(include_usage=True))
    read = ask(b"".join(map(event, chunks)) + DONE)
    assert [chunk.model_dump(exclude_unset=True) for chunk in read] == chunks
    assert "".join(c.choices[0].delta.content or "" for c in read if c.choices) == "Look:"
    assert read[-1].usage.completion_tokens_details.reasoning_tokens == len("hm</think>")


def test_the_official_client_raises_an_error_in_a_stream():
    openai = pytest.importorskip("openai")
    chunks = stream_chat(options(), ["hm"])[:1]
    with pytest.raises(openai.APIError, match="the step failed"):
        ask(b"".join(map(event, chunks)) + error_event(server_error("the step failed")) + DONE)


def test_the_official_models_accept_everything():
    pytest.importorskip("openai")
    from openai.types import Completion, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    texts = TEXTS
    for answers in (options(), options(top_logprobs=None, layout=None, include_reasoning=False)):
        whole = whole_chat(answers, texts)
        assert ChatCompletion.model_validate(whole).model_dump(exclude_unset=True) == whole
        for chunk in stream_chat(answers, texts, stream=StreamOptions(True, True)):
            assert ChatCompletionChunk.model_validate(chunk).model_dump(exclude_unset=True) == chunk
    for chunk in stream_text(["a你", "b"]):
        if chunk["choices"] and chunk["choices"][0]["finish_reason"] is None:
            chunk["choices"][0]["finish_reason"] = "stop"  # the client has one type for chunks and wholes
        Completion.model_validate(chunk)
    logprobs = LegacyLogprobs(token_bytes, 2).push([65], [scored(65)])
    body = completion(TEXT_HEAD, [completion_choice(0, "A", "stop", logprobs=logprobs)], usage(1, 1))
    assert Completion.model_validate(body).model_dump(exclude_unset=True) == body
    models = model_list(["m", "alias"], created=1, max_model_len=4096)
    assert [Model.model_validate(model).id for model in models["data"]] == ["m", "alias"]
    assert models["data"][1]["root"] == "m"


def test_the_official_client_reads_a_whole_answer():
    body = whole_chat(options(), ["hm</think>4"])
    answer = ask(json.dumps(body).encode(), "application/json")
    assert answer.choices[0].message.content == "4"
    assert answer.choices[0].message.reasoning_content == "hm"
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_fingerprint_and_small_bodies():
    one = system_fingerprint({"version": "1", "dtype": "float32"})
    assert one == system_fingerprint({"dtype": "float32", "version": "1"})
    assert one != system_fingerprint({"dtype": "bfloat16", "version": "1"})
    assert one.startswith("fp_")
    assert tokenized([65, 300], max_model_len=9, token_bytes=token_bytes) == {
        "count": 2,
        "max_model_len": 9,
        "tokens": [65, 300],
        "token_strs": ["A", "token_id:300"],
    }
    assert detokenized("a") == {"prompt": "a"}
