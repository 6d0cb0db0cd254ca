"""The request log: what was asked of a service and what it answered, a JSON line per request, to be replayed.

It holds prompts and answers, so it is off unless asked for, and its file is its owner's alone. Headers, and with them
API keys, are never in it. Keys of a line:

    id, time, path, status   as in the access log; time is when the request came, in seconds since 1970
    seconds                  until its answer had been sent
    body                     the JSON object as received; null where it was none, or too long for a line
    choices                  what was answered, as `Collected.choices`; {index, finish_reason, sha256} where too long
    usage                    the token counts, null where nothing was generated
    error                    the message of a failure, null without one
    aborted                  the client left before the end
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msds.errors import OptionError
from msds_serve.protocol.collecting import Collected

logger = logging.getLogger("msds")

MAX_LINE_BYTES = 2**20


class RequestLog:
    """Appends lines to a file: each in one write, so that several processes may share it and a reader sees it at once.

    A file that was moved or removed, as log rotation does, is opened anew under the old name. A line that could not be
    written whole (a full disk, a killed process) is closed before the next one, so that only itself is lost. A failure
    to write is logged and does not fail the request. OptionError when the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line, shortened to `MAX_LINE_BYTES`."""
        data = _encode(line)
        if len(data) > MAX_LINE_BYTES:
            data = _encode({**line, "choices": [_hashed(choice) for choice in line["choices"]]})
        if len(data) > MAX_LINE_BYTES:
            data = _encode({**line, "choices": [_hashed(choice) for choice in line["choices"]], "body": None})
        try:
            if not self._is_current():
                os.close(self._file)
                self._file = self._open()
            written = os.write(self._file, data)
            if written < len(data):
                os.write(self._file, b"\n")
                raise OSError(f"{written} of {len(data)} bytes were written")
        except (OSError, OptionError) as error:
            logger.error("the request log %s misses a line: %s", self._path, error)

    def close(self) -> None:
        """No line may follow."""
        os.close(self._file)

    def _open(self) -> int:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OptionError(f"request_log {self._path} cannot be written: {error.strerror}") from None
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
        return file

    def _is_current(self) -> bool:
        """Whether the path still names the open file."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False


class Record:
    """The line of one request while it is served: `body` is set when it is known, `answer` collects what is sent."""

    def __init__(self, log: RequestLog, *, id: str, path: str) -> None:
        self.body: Mapping[str, Any] | None = None
        self.answer = Collected()
        self._log = log
        self._start = time.perf_counter()
        self._line = {"id": id, "time": round(time.time(), 6), "path": path}

    def finish(self, status: int, *, usage: Mapping[str, Any] | None = None) -> None:
        """Write the line. usage: where the answer did not bring it."""
        answer = self.answer
        self._log.write(
            self._line
            | {
                "status": status,
                "seconds": round(time.perf_counter() - self._start, 6),
                "body": self.body,
                "choices": answer.choices,
                "usage": answer.usage or usage,
                "error": answer.error,
                "aborted": answer.error is None and not answer.is_finished,
            }
        )


def digest(choice: Mapping[str, Any]) -> str:
    """SHA-256 of what a choice says, its finish reason included."""
    return hashlib.sha256(json.dumps(choice, sort_keys=True).encode()).hexdigest()


def _hashed(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": choice["index"], "finish_reason": choice["finish_reason"], "sha256": digest(choice)}


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
