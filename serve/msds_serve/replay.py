"""Run the requests of a request log again and say what differs: a regression test made of real traffic.

A request is deterministic when its temperature is 0 or it has a seed; of these the answers must be the same, finish
reasons included, and refusals (400, 404, ...) must be refused again. Everything else is run for its latency.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msds.errors import OptionError
from msds_serve.bench import percentiles
from msds_serve.client import CHAT, COMPLETIONS, Exchange, Server, in_parallel
from msds_serve.request_log import digest

JSON_KEYS = """\
keys of --json:
  url, log, interrupted        what was run, and whether ^C ended it early
  requests                     requests that were sent
  same, different              of the deterministic ones
  not_compared                 sampled without a seed, or not answered to the end when they were recorded
  failed                       answered when they were recorded, and not now
  skipped                      [{line, reason}]: lines that cannot be replayed
  differences                  [{line, id, what}]: of the different and the failed ones
  recorded_ms, replayed_ms     {p50, p90, p99} of the time to the end of the answer, where both have one"""

_STABLE_REFUSALS = range(400, 429)  # later ones (429, 499, 500, 503) are about the server's state


@dataclass(frozen=True)
class Entry:
    """A line of the log that can be sent again."""

    line: int
    id: str
    time: float
    path: str
    body: Mapping[str, Any]
    status: int
    seconds: float
    choices: Sequence[Mapping[str, Any]]
    is_whole: bool

    @property
    def is_comparable(self) -> bool:
        """Whether the same must come again."""
        if self.status in _STABLE_REFUSALS:
            return True
        fixed = self.body.get("seed") is not None or self.body.get("temperature") == 0
        return self.status == 200 and self.is_whole and fixed


@dataclass
class Recording:
    """A log that was read: what can be sent, in the order in which it came, and the lines that cannot."""

    entries: list[Entry]
    skipped: list[tuple[int, str]]


@dataclass
class Comparison:
    """What a replay has found so far."""

    same: int = 0
    not_compared: int = 0
    different: list[tuple[Entry, str]] = field(default_factory=list)
    failed: list[tuple[Entry, str]] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """How many were sent and answered."""
        return self.same + self.not_compared + len(self.different) + len(self.failed)

    @property
    def passed(self) -> bool:
        """Whether nothing differs and nothing failed."""
        return not self.different and not self.failed

    def add(self, entry: Entry, exchange: Exchange) -> None:
        """Judge one answer."""
        if entry.status == 200 and entry.is_whole and exchange.error is not None:
            self.failed.append((entry, exchange.error))
            return
        if entry.is_whole and exchange.error is None:
            self.seconds.append((entry.seconds, exchange.seconds))
        if not entry.is_comparable:
            self.not_compared += 1
            return
        what = difference(entry, exchange)
        if what is None:
            self.same += 1
        else:
            self.different.append((entry, what))

    def to_json(self) -> dict[str, Any]:
        """As `JSON_KEYS` says, without what was run."""
        return {
            "requests": self.requests,
            "same": self.same,
            "different": len(self.different),
            "not_compared": self.not_compared,
            "failed": len(self.failed),
            "differences": [
                {"line": entry.line, "id": entry.id, "what": what} for entry, what in [*self.different, *self.failed]
            ],
            "recorded_ms": percentiles([recorded for recorded, _ in self.seconds]),
            "replayed_ms": percentiles([replayed for _, replayed in self.seconds]),
        }


def read_log(path: str) -> Recording:
    """The entries of a request log. A line that is cut off or no request is skipped with its reason; OptionError for a
    file that cannot be read or has no usable line at all."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from None
    recording = Recording([], [])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            recording.entries.append(_entry(number, values))
        except ValueError:  # also of bytes that are not UTF-8
            is_last = number == len(lines)
            recording.skipped.append((number, "the last line is cut off" if is_last else "not JSON, or cut off"))
        except (LookupError, TypeError, AttributeError):
            recording.skipped.append((number, "not a line of a request log"))
        except _NotReplayable as reason:
            recording.skipped.append((number, str(reason)))
    if not recording.entries:
        first = f": line {recording.skipped[0][0]}: {recording.skipped[0][1]}" if recording.skipped else ""
        raise OptionError(f"{path} has no request to replay{first}")
    recording.entries.sort(key=lambda entry: entry.time)
    return recording


def replay(
    recording: Recording,
    server: Server,
    *,
    concurrency: int,
    realtime: bool,
    model: str | None = None,
    comparison: Comparison,
    progress: Callable[[str], None],
) -> None:
    """Send every entry and judge its answer into `comparison`, which an interrupt leaves as far as it is.

    realtime: not before its time in the recording; otherwise as soon as one of `concurrency` requests is over.
    model: sent instead of the recorded name.
    """
    start, first = time.monotonic(), recording.entries[0].time

    def due() -> Iterator[Entry]:
        for entry in recording.entries:
            if realtime:
                time.sleep(max(0.0, start + entry.time - first - time.monotonic()))
            yield entry

    def ask(entry: Entry) -> tuple[Entry, Exchange]:
        body = entry.body if model is None else {**entry.body, "model": model}
        return entry, server.ask(entry.path, body)

    for entry, exchange in in_parallel(due(), ask, concurrency):
        comparison.add(entry, exchange)
        progress(f"replaying: {comparison.requests} of {len(recording.entries)} requests done")


def difference(entry: Entry, exchange: Exchange) -> str | None:
    """Where an answer first differs from the recorded one; None where it does not."""
    if exchange.status != entry.status:
        return f"status {exchange.status} instead of {entry.status}"
    now = {choice["index"]: choice for choice in exchange.answer.choices}
    for was in entry.choices:
        choice = now.pop(was["index"], None)
        where = f"choice {was['index']}"
        if choice is None:
            return f"{where} is missing"
        if "sha256" in was:
            if digest(choice) != was["sha256"]:
                return f"{where} differs (too long to be in the log: only its hash is)"
        elif choice != was:
            return f"{where}: {_first_difference(was, choice)}"
    return f"choice {min(now)} is new" if now else None


def render(report: Mapping[str, Any]) -> str:
    """The report for a person."""
    lines = [
        f"{report['requests']} requests of {report['log']} replayed on {report['url']}",
        f"{report['same']} same, {report['different']} different, {report['failed']} failed, "
        f"{report['not_compared']} not compared",
    ]
    lines += [f"line {skip['line']} skipped: {skip['reason']}" for skip in report["skipped"]]
    lines += [f"line {found['line']}, request {found['id']}: {found['what']}" for found in report["differences"]]
    for name in ("recorded", "replayed"):
        times = report[f"{name}_ms"]
        if times["p50"] is not None:
            lines.append(f"{name}: p50 {times['p50']:.0f} ms, p90 {times['p90']:.0f} ms, p99 {times['p99']:.0f} ms")
    return "\n".join(lines)


class _NotReplayable(Exception):
    """A good line that holds no request."""


def _entry(number: int, values: Any) -> Entry:
    if values["path"] not in (CHAT, COMPLETIONS):
        raise _NotReplayable(f"its path is {values['path']!r}")
    if values["body"] is None:
        raise _NotReplayable("its body was no JSON object, or too long for a line")
    return Entry(
        line=number,
        id=str(values["id"]),
        time=float(values["time"]),
        path=values["path"],
        body=dict(values["body"]),
        status=int(values["status"]),
        seconds=float(values["seconds"]),
        choices=list(values["choices"]),
        is_whole=values["error"] is None and not values["aborted"],
    )


def _first_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for name in ("reasoning", "content", "text", "tool_calls", "finish_reason"):
        old, new = was.get(name) or "", now.get(name) or ""
        if old != new:
            if not isinstance(old, str) or not isinstance(new, str):
                return f"{name} is {new!r} instead of {old!r}"
            same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            return f"{name} from character {same} on is {new[same : same + 40]!r} instead of {old[same : same + 40]!r}"
    return "it differs"
