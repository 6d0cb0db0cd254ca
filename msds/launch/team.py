"""Rank 0 tells the others what to run, and notices when one of them does not."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msds.errors import RankError
from msds.launch.place import Place
from msds.launch.watch import Watch
from msds.launch.wire import Arrays, Connection, Message, accept, connect

logger = logging.getLogger("msds")

LEAVING_SECONDS = 10.0
"""What the others get to leave after they were told to; the launcher ends those that do not."""

Work = Callable[[Mapping[str, Any], Arrays], None]
"""What a follower does for one kind of call: work(fields, arrays)."""


class Leader:
    """Rank 0's end. Calls are made by one thread at a time.

    timeout: seconds that a call, or the time between two signs of progress in it, may take on any rank. on_failure:
    called once, on a thread of its own, with what names the rank; nothing can be called after it.
    """

    def __init__(
        self,
        place: Place,
        *,
        timeout: float,
        on_failure: Callable[[str], None],
    ) -> None:
        self.place = place
        self.on_failure = on_failure
        self._followers = _gather(place, time.monotonic() + place.startup_seconds)
        self._values: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._watch = Watch(range(place.ranks), timeout)
        self._stopping = threading.Event()
        self._listeners = []
        for rank, connection in self._followers.items():
            connection.send("hello", {"beat_seconds": self._watch.beat_seconds})
            self._listeners.append(self._thread(f"msds-rank-{rank}", self._listen, rank, connection))
        self._thread("msds-watchdog", self._watch_over)

    def agree(self, name: str, value: int) -> int:
        """The least of what all ranks say; each of them asks with the same names in the same order.

        Takes as long as the slowest needs to get there: loading is no step.
        """
        values = [value]
        for _ in self._followers:
            said, other = self._values.get()
            if said != name:
                raise RuntimeError(f"ranks agree on {name!r} here and on {said!r} there")
            values.append(other)
        for connection in self._followers.values():
            connection.send("agreed", {"value": min(values)})
        return min(values)

    @contextlib.contextmanager
    def call(
        self, what: str, kind: str, fields: Mapping[str, Any] | None = None, arrays: Arrays | None = None
    ) -> Iterator[None]:
        """Have every other rank carry out `kind` with these fields and arrays, while this one runs the block."""
        number = self._watch.begin(what)
        try:
            for connection in self._followers.values():
                connection.send(kind, {**(fields or {}), "number": number}, arrays)
            yield
        except Exception as error:
            self._watch.done(0, number, str(error) or type(error).__name__)
            raise
        self._watch.done(0, number)

    def progress(self) -> None:
        """This rank gets on with a long call."""
        self._watch.progress(0)

    def stop(self) -> None:
        """Let the others end, and wait until they have left: what is unread when a process ends is lost to them."""
        self._stopping.set()
        for connection in self._followers.values():
            with contextlib.suppress(OSError):
                connection.send("stop")
        deadline = time.monotonic() + LEAVING_SECONDS
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))

    def _thread(self, name: str, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, args=arguments, daemon=True)
        thread.start()
        return thread

    def _listen(self, rank: int, connection: Connection) -> None:
        while (message := connection.receive()) is not None:
            if message.kind == "done":
                self._watch.done(rank, message.fields["number"], message.fields["error"])
            elif message.kind == "progress":
                self._watch.progress(rank)
            elif message.kind == "value":
                self._values.put((message.fields["name"], message.fields["value"]))
            self._watch.heard(rank)
        if not self._stopping.is_set():
            self._watch.lost(rank)

    def _watch_over(self) -> None:
        while not self._stopping.wait(min(0.2, self._watch.beat_seconds)):
            problem = self._watch.problem()
            if problem is not None:
                self.on_failure(problem)
                return


def _gather(place: Place, deadline: float) -> dict[int, Connection]:
    """A connection from every other rank; RankError names those that did not come."""
    found: dict[int, Connection] = {}
    with place.listening() as listener:
        while len(found) < place.ranks - 1:
            try:
                rank, connection = accept(listener, place.secret, deadline)
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, place.ranks) if rank not in found)
                raise RankError(f"no connection came from rank(s) {missing}: look into their logs") from None
            if not 0 < rank < place.ranks or rank in found:
                connection.close()
                raise RankError(f"a second rank {rank} of {place.ranks} connected: is another program on this port?")
            found[rank] = connection
    return found


class Follower:
    """The end of every other rank: `agree` while both build the same things, then `serve` until rank 0 ends it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        deadline = time.monotonic() + place.startup_seconds
        try:
            self._connection = connect(place.leader, place.secret, place.rank, deadline)
        except (OSError, ValueError) as error:
            raise RankError(f"rank 0 cannot be reached at {place.leader[0]}:{place.leader[1]}: {error}") from None
        self._beat_seconds = float(self._next("hello").fields["beat_seconds"])
        threading.Thread(target=self._beat, name="msds-beat", daemon=True).start()

    def agree(self, name: str, value: int) -> int:
        """As the leader's."""
        self._say("value", {"name": name, "value": value})
        return int(self._next("agreed").fields["value"])

    def progress(self) -> None:
        """This rank gets on with a long call."""
        self._say("progress")

    def serve(self, work: Mapping[str, Work]) -> None:
        """Carry out what rank 0 calls until it says stop; RankError when it leaves without.

        A call that raises is reported, as rank 0's own does: whether both failed is for it to judge.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 says when to end
        while True:
            message = self._next()
            if message.kind == "stop":
                return
            error = None
            try:
                work[message.kind](message.fields, message.arrays)
            except Exception as raised:
                error = str(raised) or type(raised).__name__
                logger.error("%s failed: %s", message.kind, error)
            self._say("done", {"number": message.fields["number"], "error": error})

    def _say(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        try:
            self._connection.send(kind, fields)
        except OSError:
            raise RankError("rank 0 has left") from None

    def _next(self, kind: str | None = None) -> Message:
        message = self._connection.receive()
        if message is None:
            raise RankError("rank 0 has left")
        if kind is not None and message.kind != kind:
            raise RuntimeError(f"rank 0 sent {message.kind!r} where {kind!r} was due")
        return message

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._connection.send("beat")
                time.sleep(self._beat_seconds)
