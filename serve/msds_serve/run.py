"""Run the service in this process: load, warm up, listen, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from msds.errors import OptionError
from msds.launch.team import Leader
from msds.llm import LLM
from msds_serve.app import create_app
from msds_serve.request_log import RequestLog
from msds_serve.service import Service, ServiceOptions

LAST_ANSWERS_SECONDS = 5.0
"""What requests that were told to end have to say so to their clients."""
LAST_WORDS_SECONDS = 1.5
"""While /ready says 503 and why, before a service that has lost a rank ends."""


def serve(
    path: str,
    *,
    host: str,
    port: int,
    engine: Mapping[str, Any],
    service: Mapping[str, Any],
    request_log: str | None = None,
    team: Leader | None = None,
) -> None:
    """Serve a checkpoint folder until SIGTERM or SIGINT; running requests are given drain_seconds to finish. Returns
    after a SIGTERM, which is how a supervisor ends a service that is well; SIGINT is raised again.

    engine: options of `LLM`; service: fields of `ServiceOptions`; request_log: file of the request log, none without.
    What is wrong with either, with the address or with the checkpoint raises before anything is compiled; the address
    is taken at once and listened to when all is warm; a SIGTERM before that ends the process by it, with a line. team:
    the other ranks, where there are some.
    """
    options = checked_options(port, service)
    with _bind(host, port) as address, _sigterm(_end_early):
        _serve(path, address, options, engine, request_log, team)


def _serve(
    path: str,
    address: socket.socket,
    options: ServiceOptions,
    engine: Mapping[str, Any],
    request_log: str | None,
    team: Leader | None,
) -> None:
    log = RequestLog(Path(request_log)) if request_log is not None else None
    _log_to_stderr()
    llm = LLM(path, team=team, **engine)
    llm.engine.runner.warm_up(lambda line: print(line, file=sys.stderr, flush=True))
    served = Service(llm, options)
    app = create_app(served, log)
    if team is not None:
        team.on_failure = lambda problem: _break_off(served, team, problem)
    logging.getLogger("msds").info("serving %s on http://%s:%d", options.model_names[0], *address.getsockname()[:2])
    patience = math.ceil(options.drain_seconds + LAST_ANSWERS_SECONDS)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=patience)
    server = _Server(config, served)
    # uvicorn drains on it and raises it again; one that comes a moment before uvicorn listens to it counts as well
    with _sigterm(lambda *_: setattr(server, "should_exit", True)):
        server.run(sockets=[address])


class _Server(uvicorn.Server):
    """Ends what still runs after drain_seconds by telling it so, a moment before uvicorn would cut it off."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, called on SIGTERM and SIGINT: no new connections, and an end to those that are there."""
        self._service.bodies.end()
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        seconds = self._service.options.drain_seconds
        await asyncio.sleep(seconds)
        self._service.engine.end_requests(f"the server stops, and {seconds:g} s to finish are over")


@contextlib.contextmanager
def _sigterm(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """What a SIGTERM in the block does. Outside of the main thread, which alone handles signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_early(number: int, frame: FrameType | None) -> NoReturn:
    print("msds: told to end before it served", file=sys.stderr, flush=True)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # process 1 of a container is not ended by its own signals


def check_address(host: str, port: int) -> None:
    """OptionError where the address cannot be had now."""
    _bind(host, port).close()


def _bind(host: str, port: int) -> socket.socket:
    """The address, taken but not listened to; OptionError where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            stack.pop_all()
    except OSError as error:
        raise OptionError(
            f"host {host} with port {port} cannot be served on: {error.strerror or error}; choose another --port or "
            "--host, or stop what has it"
        ) from None
    return bound


def checked_options(port: int, service: Mapping[str, Any]) -> ServiceOptions:
    """The options of the service; OptionError for one of them, or the port."""
    if not 1 <= port <= 65535:
        raise OptionError(f"port is {port}: it must be from 1 to 65535")
    return ServiceOptions(**service)


def _break_off(service: Service, team: Leader, problem: str) -> NoReturn:
    """A rank is lost: say so to whoever waits and to probes, for a moment, and end without waiting for a graph."""
    logging.getLogger("msds").error("%s", problem)
    service.engine.fail(problem)
    time.sleep(LAST_WORDS_SECONDS)
    team.place.fail(problem)


def _log_to_stderr() -> None:
    """One line per request, and what the engine says."""
    for name in ("msds", "msds.access"):
        logging.getLogger(name).setLevel(logging.INFO)
