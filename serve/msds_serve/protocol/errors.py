"""OpenAI's error objects, and which failure becomes which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msds.errors import ContextLengthError, MsdsError, PromptError, SamplingError

INVALID_REQUEST = "invalid_request_error"


class ApiError(Exception):
    """A failure as the client sees it: HTTP status, OpenAI error object, and headers such as Retry-After.

    param: the field of the request that is wrong, or None. code: a stable word for programs, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param[:200] if param else param  # a key of the request may be of any length
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body: {"error": {message, type, param, code}}."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


@dataclass(frozen=True)
class Places:
    """Where things stand in a request's body, for faults that show only when it is queued.

    limit: the field that limits new tokens; is_default: it is not there, and its default counts. constraint: the field
    that says what the text must be, None without.
    """

    prompt: str
    limit: str
    constraint: str | None = None
    is_default: bool = False


def context_length_exceeded(error: ContextLengthError, places: Places) -> ApiError:
    """400 for a prompt that leaves no room for its answer, with the numbers."""
    what = "the prompt" if "[" not in places.prompt else places.prompt
    message = f"{what} has {error.prompt_tokens} tokens and "
    if error.max_tokens is None:
        message += f"the context holds {error.max_model_len}, prompt and answer together; shorten the prompt"
        return bad_request(message, param=places.prompt, code="context_length_exceeded")
    default = " by default" if places.is_default else ""
    message += (
        f"{places.limit} is {error.max_tokens}{default}, together more than the context of {error.max_model_len}; "
        f"lower {places.limit} to {error.max_model_len - error.prompt_tokens} or shorten the prompt"
    )
    return bad_request(message, param=places.limit, code="context_length_exceeded")


def unauthorized() -> ApiError:
    """401: no API key, or a wrong one. What was sent is not repeated."""
    message = "missing or incorrect API key; send it as 'Authorization: Bearer KEY'"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def model_not_found(name: str, served: tuple[str, ...]) -> ApiError:
    """404: a model that is not served here."""
    message = f"the model {clip(name)} does not exist; served here: {', '.join(served)}"
    return ApiError(404, message, param="model", code="model_not_found")


def route_not_found(method: str, path: str) -> ApiError:
    """404: no such route."""
    return ApiError(404, f"there is no route {clip(f'{method} {path}')}; see /openapi.json", code="not_found")


def method_not_allowed(method: str, allowed: tuple[str, ...]) -> ApiError:
    """405: the route exists, for other methods."""
    message = f"{clip(method)} is not allowed here; use {', '.join(allowed)}"
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": ", ".join(allowed)})


def too_slow(seconds: float) -> ApiError:
    """408: the body did not arrive."""
    message = f"the request's body did not arrive within {seconds:g} s"
    return ApiError(408, message, type="timeout_error", code="request_not_received", headers={"Connection": "close"})


def too_large(limit_bytes: int) -> ApiError:
    """413: the body is over the limit."""
    return ApiError(413, f"the request body is larger than the limit of {limit_bytes} bytes", code="request_too_large")


def unsupported_media_type(content_type: str) -> ApiError:
    """415: a body that does not claim to be JSON."""
    message = f"the content type is {clip(content_type)}; send application/json"
    return ApiError(415, message, code="unsupported_media_type")


def overloaded(*, waiting: int, asked: int, limit: int, retry_after_seconds: int) -> ApiError:
    """429: the queue has no room for the answers that the request asks for."""
    message = (
        f"{waiting} answers are waiting and the request asks for {asked} more, but at most {limit} may wait; try again "
        f"in {retry_after_seconds} s"
    )
    headers = {"Retry-After": str(retry_after_seconds)}
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)


def timed_out(seconds: float) -> ApiError:
    """504: the request took longer than the server allows."""
    message = f"the request did not finish within {seconds:g} s and was ended"
    return ApiError(504, message, type="timeout_error", code="request_timeout")


def server_error(message: str = "the server failed while it worked on this request; the log says why") -> ApiError:
    """500: our fault. Details belong in the log, not in the answer."""
    return ApiError(500, message, type="server_error", code="internal_error")


def unavailable(reason: str, retry_after_seconds: int = 5) -> ApiError:
    """503: starting, draining or stalled."""
    headers = {"Retry-After": str(retry_after_seconds)}
    return ApiError(503, reason, type="server_error", code="service_unavailable", headers=headers)


def from_exception(error: BaseException) -> ApiError:
    """The failure that a client sees for an exception.

    PromptError and SamplingError are the request's fault: 400 with their message, and the field where the message
    begins with one. Every other error, other MsdsErrors included, is the server's: 500, and only an MsdsError, whose
    messages are written for users, is quoted.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (PromptError, SamplingError)):
        named = re.match(r"([a-z_]+)(?:\[|\.| is | holds | names )", str(error))
        return bad_request(str(error), param=named.group(1) if named else None)
    return server_error(str(error)) if isinstance(error, MsdsError) else server_error()


def clip(value: object, limit: int = 100) -> str:
    """The value as Python writes it, shortened: an error message must not carry a whole request back."""
    if isinstance(value, (str, bytes)):
        value = value[: limit + 1]
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * limit:
        return f"an integer of {value.bit_length()} bits"
    elif isinstance(value, (list, dict)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= limit + 2 else f"{text[:limit]}..."
