"""Error objects, and which exception becomes which."""

import json

import pytest

from msds.errors import CheckpointError, ContextLengthError, PromptError, SamplingError
from msds.sampling import SamplingParams
from msds_serve.protocol import errors
from msds_serve.protocol.errors import ApiError, Places, clip, from_exception

TOO_LONG = ContextLengthError(prompt_index=0, prompt_tokens=5000, max_tokens=None, max_model_len=4096)
TOO_MANY = ContextLengthError(prompt_index=0, prompt_tokens=4000, max_tokens=200, max_model_len=4096)
TOO_LONG_SEEN = errors.context_length_exceeded(TOO_LONG, Places("messages", "max_tokens"))
FULL = errors.overloaded(waiting=60, asked=8, limit=64, retry_after_seconds=3)


@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (errors.bad_request("x", param="p"), 400, "invalid_request_error", None),
        (TOO_LONG_SEEN, 400, "invalid_request_error", "context_length_exceeded"),
        (errors.unauthorized(), 401, "invalid_request_error", "invalid_api_key"),
        (errors.model_not_found("x", ("m",)), 404, "invalid_request_error", "model_not_found"),
        (errors.route_not_found("GET", "/x"), 404, "invalid_request_error", "not_found"),
        (errors.method_not_allowed("GET", ("POST",)), 405, "invalid_request_error", "method_not_allowed"),
        (errors.too_large(1000), 413, "invalid_request_error", "request_too_large"),
        (errors.unsupported_media_type("text/html"), 415, "invalid_request_error", "unsupported_media_type"),
        (FULL, 429, "rate_limit_error", "queue_full"),
        (errors.server_error(), 500, "server_error", "internal_error"),
        (errors.unavailable("draining"), 503, "server_error", "service_unavailable"),
        (errors.timed_out(60), 504, "timeout_error", "request_timeout"),
    ],
)
def test_bodies(error, status, type_, code):
    assert error.status == status
    body = json.loads(json.dumps(error.body()))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == (type_, code)
    assert body["error"]["message"]


def test_numbers_and_headers_are_there():
    too_long = errors.context_length_exceeded(TOO_LONG, Places("prompt[3]", "max_tokens"))
    assert too_long.param == "prompt[3]"
    assert too_long.message.startswith("prompt[3] has 5000 tokens")
    assert "5000" in too_long.message
    assert "4096" in too_long.message
    too_many = errors.context_length_exceeded(TOO_MANY, Places("prompt", "max_completion_tokens"))
    assert too_many.param == "max_completion_tokens"
    assert "lower max_completion_tokens to 96" in too_many.message
    left_out = errors.context_length_exceeded(TOO_MANY, Places("prompt", "max_tokens", is_default=True))
    assert "max_tokens is 200 by default" in left_out.message
    assert FULL.headers == {"Retry-After": "3"}
    assert "60 answers are waiting and the request asks for 8 more, but at most 64 may wait" in FULL.message
    assert errors.unavailable("x").headers["Retry-After"]
    assert errors.method_not_allowed("GET", ("POST",)).headers == {"Allow": "POST"}
    assert "WWW-Authenticate" in errors.unauthorized().headers


def test_exceptions():
    with pytest.raises(SamplingError) as caught:
        SamplingParams(top_p=3)
    error = from_exception(caught.value)
    assert (error.status, error.param) == (400, "top_p")
    assert from_exception(PromptError("messages[0].content is null")).param == "messages"
    assert from_exception(PromptError("the text has a lone surrogate")).param is None
    own = ApiError(418, "x")
    assert from_exception(own) is own
    assert (from_exception(CheckpointError("shard 3 is damaged")).status) == 500
    assert "shard 3" in from_exception(CheckpointError("shard 3 is damaged")).message
    secret = from_exception(RuntimeError("/home/secret"))
    assert secret.status == 500
    assert "secret" not in secret.message


def test_clip():
    assert clip("a") == "'a'"
    assert len(clip("a" * 1000)) < 110
    assert clip([1, 2]) == "a list of 2"
    assert clip({}) == "an object of 0"
    assert clip(10**5000) == "an integer of 16610 bits"
    assert clip(12) == "12"
