"""Bodies of requests on their way here: what they may be, how long they may take, and none keeps a server from
stopping."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request

from msds_serve.protocol.errors import too_large, too_slow, unavailable, unsupported_media_type

RECEIVE_SECONDS = 60.0
"""A body of 8 MiB arrives in that time at one megabit per second."""

_LAST_SECONDS = 0.1
"""The same while the server stops: time enough for one that is there already."""

_JSON = re.compile(r"application/([\w.+-]+\+)?json", re.IGNORECASE)


class Bodies:
    """Receives them. Used on the event loop of the service."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._receiving: set[asyncio.Task[bytes]] = set()
        self._has_ended = False

    async def receive(self, request: Request) -> bytes:
        """The body of a request.

        ApiError 415 for one that does not say that it is JSON, also because pages of any web site may send other types
        without asking first; 413 as soon as it is too large, 408 when it takes too long, 503 when the server stops.
        """
        kind = request.headers.get("content-type", "")
        if not _JSON.fullmatch(kind.partition(";")[0].strip()):
            raise unsupported_media_type(kind)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise too_large(self._max_bytes)
        task = asyncio.ensure_future(self._read(request))
        self._receiving.add(task)
        try:
            await asyncio.wait((task,), timeout=_LAST_SECONDS if self._has_ended else RECEIVE_SECONDS)
            if task.done() and not task.cancelled():
                return task.result()
            raise unavailable("the server is shutting down") if self._has_ended else too_slow(RECEIVE_SECONDS)
        finally:
            self._receiving.discard(task)
            task.cancel()

    def end(self) -> None:
        """The server stops: who has not sent the whole body by now is told so."""
        self._has_ended = True
        for task in self._receiving:
            task.cancel()

    async def _read(self, request: Request) -> bytes:
        received = bytearray()
        async for part in request.stream():
            received += part
            if len(received) > self._max_bytes:
                raise too_large(self._max_bytes)
        return bytes(received)
