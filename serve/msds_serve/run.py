"""Run the service in this process: load, warm up, listen, and drain on SIGTERM."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn

from msds.errors import OptionError
from msds.llm import LLM
from msds_serve.app import create_app
from msds_serve.request_log import RequestLog
from msds_serve.service import Service, ServiceOptions


def serve(
    path: str,
    *,
    host: str,
    port: int,
    engine: Mapping[str, Any],
    service: Mapping[str, Any],
    request_log: str | None = None,
) -> None:
    """Serve a checkpoint folder until SIGTERM or SIGINT; running requests are given drain_seconds to finish.

    engine: options of `LLM`; service: fields of `ServiceOptions`; request_log: file of the request log, none without.
    What is wrong with either, or with the checkpoint, raises before the port is opened.
    """
    if not 1 <= port <= 65535:
        raise OptionError(f"port is {port}: it must be from 1 to 65535")
    options = ServiceOptions(**service)
    log = RequestLog(Path(request_log)) if request_log is not None else None
    _log_to_stderr()
    llm = LLM(path, **engine)
    llm.engine.runner.warm_up(lambda line: print(line, file=sys.stderr, flush=True))
    app = create_app(Service(llm, options), log)
    logging.getLogger("msds").info("serving %s on http://%s:%d", options.model_names[0], host, port)
    drain = math.ceil(options.drain_seconds)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=drain)


def _log_to_stderr() -> None:
    """One line per request, and what the engine says."""
    for name in ("msds", "msds.access"):
        logging.getLogger(name).setLevel(logging.INFO)
