"""The Starlette application: routes, and what surrounds every request (keys, size, ids, log, errors)."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from msds import __version__
from msds_serve.chat import ChatRun
from msds_serve.completions import CompletionRun
from msds_serve.protocol.errors import (
    ApiError,
    bad_request,
    clip,
    from_exception,
    method_not_allowed,
    route_not_found,
    unauthorized,
    unavailable,
)
from msds_serve.protocol.openapi import openapi
from msds_serve.protocol.requests import parse_body, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from msds_serve.protocol.responses import Head, detokenized, model_list, model_object, response_id, tokenized
from msds_serve.protocol.streaming import DONE, MEDIA_TYPE, Chunk, error_event, event
from msds_serve.request_log import Record, RequestLog
from msds_serve.service import Service

access_log = logging.getLogger("msds.access")
logger = logging.getLogger("msds")

_ID = re.compile(r"[!-~]{1,128}")

Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/openapi.json"})
"""Paths that need no API key: probes, and the description of the service."""

GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose requests are in the request log."""


def create_app(service: Service, request_log: RequestLog | None = None) -> Starlette:
    """The application, to run or to mount in another one; its lifespan starts and stops the service.

    Starlette does not run the lifespan of what is mounted: an application that mounts this one enters
    `app.router.lifespan_context(app)` in its own lifespan, `app` being what this returns.

    request_log: where every request that generates is written, with its answer; closed with the application.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()
        if request_log is not None:
            request_log.close()

    routes = _Routes(service, request_log)
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", routes.chat),
        ("POST", "/v1/completions", routes.completions),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{name:path}", routes.model),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("GET", "/health", routes.health),
        ("GET", "/ready", routes.ready),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/version", routes.version),
        ("GET", "/openapi.json", routes.openapi),
    ]
    return Starlette(
        routes=[Route(path, routes.guarded(handler, path), methods=[method]) for method, path, handler in table],
        exception_handlers={HTTPException: routes.http_error},
        middleware=_cross_origin(service.options.cors_origins),
        lifespan=lifespan,
    )


class _Routes:
    def __init__(self, service: Service, request_log: RequestLog | None) -> None:
        self._service = service
        self._request_log = request_log

    def guarded(self, handler: Handler, path: str | None) -> Handler:
        """The handler with a request id, the key check, errors as OpenAI objects, metrics and an access log line.

        path: of the route, wherever the application is mounted; None where there is none for this path and method.
        """

        async def guard(request: Request) -> Response:
            start = time.perf_counter()
            request.state.own_id = uuid.uuid4().hex
            chosen = request.headers.get("x-request-id", "")
            request.state.id = chosen if _ID.fullmatch(chosen) else request.state.own_id
            request.state.record = record = self._record(request, path)
            try:
                if path is not None and path not in OPEN_PATHS:
                    self._check_key(request)
                if chosen and request.state.id != chosen and path in GENERATING_PATHS:
                    raise bad_request(
                        f"the header X-Request-Id is {clip(chosen)}; it must be 1 to 128 printable characters"
                    )
                response = await handler(request)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it; the log shows it
            except Exception as error:
                failure = self._explained(error)
                if record is not None:
                    record.answer.add_chunk(failure.body())
                response = _failed(failure)
            if record is not None and not isinstance(response, _EventStream):
                record.finish(response.status_code)
            response.headers["x-request-id"] = request.state.id
            # whoever tries paths must not fill the metrics with them
            self._service.metrics.requests.labels(endpoint=path or "none", status=str(response.status_code)).inc()
            self._log(request, response.status_code, time.perf_counter() - start)
            return response

        return guard

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Routes that do not exist, and methods that a route does not take."""
        assert isinstance(error, HTTPException)
        failure = route_not_found(request.method, request.url.path)
        if error.status_code == 405:
            failure = method_not_allowed(request.method, tuple((error.headers or {}).get("Allow", "").split(", ")))

        async def refuse(_: Request) -> Response:
            raise failure

        return await self.guarded(refuse, None)(request)

    async def chat(self, request: Request) -> Response:
        """Chat completions."""
        generation, limits = self._service.llm.model.generation, self._service.limits
        parsed = parse_chat(await self._question(request), generation=generation, limits=limits)
        run = ChatRun(self._service, parsed, self._head("chat", request, parsed.model))
        return await self._run(request, run, streams=parsed.stream is not None)

    async def completions(self, request: Request) -> Response:
        """Text completions."""
        generation, limits = self._service.llm.model.generation, self._service.limits
        parsed = parse_completion(await self._question(request), generation=generation, limits=limits)
        run = CompletionRun(self._service, parsed, self._head("completion", request, parsed.model))
        return await self._run(request, run, streams=parsed.stream is not None)

    async def models(self, request: Request) -> Response:
        """The names that requests may use."""
        names, length = self._service.options.model_names, self._service.llm.max_model_len
        return JSONResponse(model_list(names, created=self._service.created, max_model_len=length))

    async def model(self, request: Request) -> Response:
        """One of the names."""
        name = request.path_params["name"]
        self._service.check_model(name)
        root, length = self._service.options.model_names[0], self._service.llm.max_model_len
        return JSONResponse(model_object(name, root, self._service.created, length))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        parsed = parse_tokenize(await self._body(request))
        self._service.check_model(parsed.model)
        ids = await asyncio.to_thread(self._service.encode, parsed)
        token_bytes = self._service.tokenizer.token_bytes if parsed.return_token_strs else None
        return JSONResponse(tokenized(ids, max_model_len=self._service.llm.max_model_len, token_bytes=token_bytes))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        parsed = parse_detokenize(await self._body(request), limits=self._service.limits)
        self._service.check_model(parsed.model)
        self._service.check_ids(parsed.tokens, "tokens")
        decode, skip = self._service.tokenizer.decode, parsed.skip_special_tokens
        return JSONResponse(
            detokenized(await asyncio.to_thread(lambda: decode(parsed.tokens, skip_special_tokens=skip)))
        )

    async def health(self, request: Request) -> Response:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Warmed up and stepping; 503 with the reason otherwise."""
        reason = self._service.unready_reason
        if reason is not None:
            raise unavailable(reason)
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus exposition."""
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """Version of the software and fingerprint of the model."""
        return JSONResponse({"version": __version__, "system_fingerprint": self._service.fingerprint})

    async def openapi(self, request: Request) -> Response:
        """The description of this service."""
        names, keys = self._service.options.model_names, bool(self._service.options.api_keys)
        limits = self._service.limits
        return JSONResponse(openapi(version=__version__, models=names, limits=limits, keys=keys))

    async def _run(self, request: Request, run: ChatRun | CompletionRun, *, streams: bool) -> Response:
        reason = self._service.unready_reason
        if reason is not None:
            raise unavailable(reason)
        await _unless_disconnected(request, run.prepare())
        record: Record | None = request.state.record
        if not streams:
            try:
                body = await _unless_disconnected(request, run.answer())
            finally:
                await run.close()
            if record is not None:
                record.answer.add_body(body)
            return JSONResponse(body)
        return _EventStream(self._events(run, record), run, record)

    async def _events(self, run: ChatRun | CompletionRun, record: Record | None) -> AsyncIterator[bytes]:
        """Server-sent events; a failure under way is an event too."""
        chunks: AsyncIterator[Chunk] = run.chunks()
        try:
            async for chunk in chunks:
                if record is not None:
                    record.answer.add_chunk(chunk)
                yield event(chunk)
        except Exception as error:
            failure = self._explained(error)
            if record is not None:
                record.answer.add_chunk(failure.body())
            yield error_event(failure)
        yield DONE

    def _record(self, request: Request, path: str | None) -> Record | None:
        """The line of this request in the request log, where there is one and the request generates."""
        if self._request_log is None or path not in GENERATING_PATHS:
            return None
        return Record(self._request_log, id=request.state.id, path=path)

    async def _question(self, request: Request) -> dict[str, Any]:
        """The body of a request that generates."""
        body = await self._body(request)
        if request.state.record is not None:
            request.state.record.body = body
        return body

    async def _body(self, request: Request) -> dict[str, Any]:
        return parse_body(await self._service.bodies.receive(request))

    def _head(self, endpoint: str, request: Request, model: str) -> Head:
        id_ = response_id(endpoint, request.state.id)
        return Head(
            id=id_,
            created=int(time.time()),
            model=model,
            system_fingerprint=self._service.fingerprint,
            call_seed=request.state.own_id,
        )

    def _check_key(self, request: Request) -> None:
        keys = self._service.options.api_keys
        if not keys:
            return
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        # every key is compared, in constant time, so that timing tells nothing
        matches = [hmac.compare_digest(sent.strip().encode(), key.encode()) for key in keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise unauthorized()

    def _explained(self, error: Exception) -> ApiError:
        """The failure as the client sees it; what is our fault is logged with its traceback."""
        failure = from_exception(error)
        if failure.status >= 500 and not isinstance(error, ApiError):
            logger.error("a request failed", exc_info=error)
        self._service.metrics.errors.labels(code=failure.code or failure.type).inc()
        return failure

    def _log(self, request: Request, status: int, seconds: float) -> None:
        line = {
            "id": request.state.id,
            "method": request.method,
            "path": request.url.path,
            "status": status,
            "ms": round(seconds * 1e3, 1),
            "client": request.client.host if request.client else None,
        }
        access_log.info(json.dumps(line))


class _EventStream(StreamingResponse):
    """The answers of a run as server-sent events. However it ends, and even if the client has left before it begins,
    the run is closed, so that what is still being generated is given up."""

    def __init__(self, events: AsyncIterator[bytes], run: ChatRun | CompletionRun, record: Record | None) -> None:
        super().__init__(events, media_type=MEDIA_TYPE, headers={"Cache-Control": "no-cache"})
        self._run = run
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._record is not None:
                self._record.finish(self.status_code, usage=self._run.usage)
            await self._run.close()


def _cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """What lets web pages of these origins call the service; nothing for none."""
    if not origins:
        return []
    methods, headers, exposed = ("GET", "POST"), ("*",), ("x-request-id", "retry-after")
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=headers,
            expose_headers=exposed,
        )
    ]


def _failed(failure: ApiError) -> Response:
    return JSONResponse(failure.body(), status_code=failure.status, headers=failure.headers)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first; ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        raise ClientDisconnect
    finally:
        watcher.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    """Returns when the client has left; its body has been read already."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
