"""A client of any OpenAI-compatible server, to measure and to replay: standard library, blocking, one call a thread."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from msds.errors import MsdsError, OptionError
from msds_serve.protocol.collecting import Collected

Job = TypeVar("Job")
Result = TypeVar("Result")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class ServerError(MsdsError):
    """A server that does not answer, or answers what the protocol does not know."""


@dataclass
class Exchange:
    """One request and what came back. Times are seconds since it was sent, a new connection included.

    sent: when, by `time.perf_counter`. status: of HTTP, None where there was no answer. error: why it failed, None
    where the answer is whole.
    piece_times: when each chunk with something of an answer came; one time for an answer that was not streamed.
    """

    sent: float = 0.0
    status: int | None = None
    error: str | None = None
    seconds: float = 0.0
    piece_times: list[float] = field(default_factory=list)
    answer: Collected = field(default_factory=Collected)


@dataclass(frozen=True)
class Server:
    """Where a server is: `at` reads a URL. timeout: seconds without a byte after which a request has failed."""

    scheme: str
    host: str
    port: int | None
    prefix: str
    api_key: str | None = None
    timeout: float = 600.0

    @classmethod
    def at(cls, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> Server:
        """The server of a URL such as http://127.0.0.1:8000, with or without /v1; OptionError for what is none."""
        parts, port = _split(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise OptionError(f"url is {url!r}: give one such as http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, parts.hostname, port, prefix, api_key, timeout)

    def model(self) -> str:
        """The first model that /v1/models lists; ServerError where that cannot be read."""
        try:
            connection = self._send("GET", "/v1/models", None)
            try:
                response = connection.getresponse()
                body = response.read()
            finally:
                connection.close()
            if response.status != 200:
                raise ServerError(f"/v1/models answers {response.status}: {_shown(body)}")
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.scheme}://{self.host}:{self.port} does not answer: {error}") from None
        except (ValueError, LookupError, TypeError) as error:
            if isinstance(error, MsdsError):
                raise
            raise ServerError("/v1/models lists no model: name it with --model") from None

    def ask(self, path: str, body: Mapping[str, Any]) -> Exchange:
        """Send a request and read all of its answer, streamed or not, as the body asks. Does not raise."""
        start = time.perf_counter()
        exchange = Exchange(sent=start)
        try:
            connection = self._send("POST", path, json.dumps(body, ensure_ascii=False).encode())
            try:
                response = connection.getresponse()
                exchange.status = response.status
                if response.status == 200 and body.get("stream"):
                    self._read_stream(response, exchange, start)
                else:
                    self._read_body(response, exchange, start)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            exchange.error = f"{type(error).__name__}: {error}"
        except (ValueError, TypeError, AttributeError) as error:
            exchange.error = f"an answer that is not OpenAI's protocol ({type(error).__name__}: {error})"
        exchange.seconds = time.perf_counter() - start
        return exchange

    def _send(self, method: str, path: str, body: bytes | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=self.timeout)
        headers = {"Accept": "application/json, text/event-stream"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, self.prefix + path, body=body, headers=headers)
        except BaseException:
            connection.close()
            raise
        return connection

    def _read_stream(self, response: http.client.HTTPResponse, exchange: Exchange, start: float) -> None:
        for data in _events(response):
            if exchange.answer.add_chunk(json.loads(data)):
                exchange.piece_times.append(time.perf_counter() - start)
        exchange.error = exchange.answer.error
        if exchange.error is None and not exchange.answer.is_finished:
            exchange.error = "the stream ended before the answer did"

    def _read_body(self, response: http.client.HTTPResponse, exchange: Exchange, start: float) -> None:
        body = response.read()
        if response.status != 200:
            exchange.error = f"{response.status}: {_shown(body)}"
            return
        exchange.answer.add_body(json.loads(body))
        exchange.error = exchange.answer.error
        exchange.piece_times.append(time.perf_counter() - start)


def in_parallel(jobs: Iterator[Job], work: Callable[[Job], Result], num_threads: int) -> Iterator[Result]:
    """`work(job)` on threads, results as they come. The next job is drawn when a thread is free for it.

    Left early, it starts nothing more and does not wait for what runs. What `jobs` or `work` raise is raised here.
    """
    results: queue.SimpleQueue[tuple[Result] | BaseException | None] = queue.SimpleQueue()
    lock, stopped = threading.Lock(), threading.Event()

    def draw() -> tuple[Job] | None:
        with lock:
            for job in () if stopped.is_set() else jobs:
                return (job,)
            return None

    def run() -> None:
        try:
            while (job := draw()) is not None:
                results.put((work(job[0]),))
            results.put(None)
        except BaseException as error:
            results.put(error)

    for _ in range(num_threads):
        threading.Thread(target=run, daemon=True).start()
    working = num_threads
    try:
        while working:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                working -= 1
            else:
                yield result[0]
    finally:
        stopped.set()


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of server-sent events, up to [DONE]."""
    while line := response.readline():
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield data


def _split(url: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(url)
        return parts, parts.port
    except ValueError as error:
        raise OptionError(f"url is {url!r}: {error}") from None


def _shown(body: bytes) -> str:
    """The message of an error object, or the beginning of whatever came."""
    try:
        return str(json.loads(body)["error"]["message"])[:500]
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", errors="replace").strip()
