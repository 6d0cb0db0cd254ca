"""The launchers of several nodes meet before any of them starts a rank, and tell each other why they end.

Node 0 listens where rank 0 will; the others come to it. They prove that they know the secret, and compare what they
must have in common: what differs is refused on both sides within a second, not found out in a graph.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from msds.errors import OptionError, RankError
from msds.launch.cluster import SECRET_VARIABLE, Cluster
from msds.launch.facts import differences
from msds.launch.wire import Connection, accept, connect, handshake_limit

REMIND_SECONDS = 30.0
"""Between two lines that say who is waited for."""
_TICK = 0.5


@dataclass(frozen=True)
class News:
    """What another node says. kind: go, refused, leaving, failed, done; gone where its launcher ended without."""

    node: int
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class Links:
    """Connections to the launchers of the other nodes: node 0 has all of them, the others have node 0."""

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self._connections = dict(connections)
        self._heard: queue.SimpleQueue[News] = queue.SimpleQueue()
        for node, connection in self._connections.items():
            threading.Thread(target=self._listen, args=(node, connection), daemon=True).start()

    def tell(self, kind: str, fields: Mapping[str, Any] | None = None, *, beside: int | None = None) -> None:
        """Tell all nodes that are linked, beside one; those that have left need not hear it."""
        for node, connection in self._connections.items():
            if node != beside:
                with contextlib.suppress(OSError):
                    connection.send(kind, fields)

    def news(self) -> list[News]:
        """What was heard since the last call."""
        found = []
        while (one := self.next(0.0)) is not None:
            found.append(one)
        return found

    def next(self, seconds: float) -> News | None:
        """What was heard first, and nothing after it; None where nothing comes in time."""
        try:
            return self._heard.get(timeout=seconds)
        except queue.Empty:
            return None

    def __bool__(self) -> bool:
        return bool(self._connections)

    def __enter__(self) -> Links:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections.values():
            connection.close()

    def _listen(self, node: int, connection: Connection) -> None:
        while (message := connection.receive()) is not None:
            self._heard.put(News(node, message.kind, message.fields))
        self._heard.put(News(node, "gone"))


def meet(
    cluster: Cluster, listener: socket.socket | None, facts: Mapping[str, str], received: Sequence[object]
) -> Links:
    """Links to the other nodes, when all of them have come and agree; none as soon as something is `received`.

    listener: node 0's. OptionError for another secret or other facts, RankError for who does not come in time.
    """
    facts = {"--nodes": str(cluster.nodes), "ranks": str(cluster.ranks), **facts}
    if cluster.nodes == 1:
        return Links({})
    if listener is not None:
        return _gather(cluster, listener, facts, received)
    return _come(cluster, facts, received)


def _gather(cluster: Cluster, listener: socket.socket, facts: Mapping[str, str], received: Sequence[object]) -> Links:
    """As node 0."""
    wait = _Wait(cluster)
    found: dict[int, Connection] = {}
    with contextlib.ExitStack() as stack:
        while missing := [node for node in range(1, cluster.nodes) if node not in found]:
            wait.remind(cluster.names(missing), "start them there" if len(missing) > 1 else "start it there")
            if received:
                return Links({})
            for node in [node for node, connection in found.items() if connection.has_left()]:
                found.pop(node).close()
            until = time.monotonic() + _TICK
            try:
                node, connection = accept(listener, cluster.secret, until, kind="node", received=received)
            except TimeoutError:
                continue
            stack.callback(connection.close)
            hello = connection.receive(handshake_limit(received))
            if received:
                continue
            if hello is None:
                _refuse(f"node {node} did not say in time what it is to run: start it again", [connection])
                continue
            problem = differences(facts, hello.fields["facts"], 0, node)
            if problem is not None:
                _refuse(problem, [*found.values(), connection])
                raise OptionError(problem)
            if node in found or not 0 < node < cluster.nodes:
                _refuse(
                    f"there is a node {node} already: give every node a --node-rank of its own; where its machine was "
                    "lost just now, start it again in half a minute",
                    [connection],
                )
                continue
            found[node] = connection
        for connection in found.values():
            with contextlib.suppress(OSError):  # that it has left will be heard
                connection.send("go")
        stack.pop_all()
        return Links(found)


def _refuse(problem: str, connections: Sequence[Connection]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send("refused", {"problem": problem})
        connection.close()


def _come(cluster: Cluster, facts: Mapping[str, str], received: Sequence[object]) -> Links:
    """As another node than 0."""
    address, wait = cluster.leader_address(), _Wait(cluster)
    with contextlib.ExitStack() as stack:
        why = "start it there"
        while True:
            wait.remind(cluster.names([0]), why)
            if received:
                return Links({})
            until = time.monotonic() + _TICK
            try:
                connection = connect(address, cluster.secret, cluster.node_rank, until, kind="node", received=received)
                stack.callback(connection.close)
                connection.send("hello", {"facts": dict(facts)})
                break
            except OSError as error:
                why = f"{error.strerror or error}"
            except ValueError as error:
                raise OptionError(
                    f"{error}; set the same {SECRET_VARIABLE} on every node, and start all of them again"
                ) from None
        links = Links({0: connection})
        while (one := links.next(_TICK)) is not None or not received:
            if one is None:
                wait.remind("the other nodes", "start them too")
            elif one.kind == "go":
                stack.pop_all()
                return links  # what follows is for those who watch
            elif one.kind == "refused":
                raise OptionError(one.fields["problem"])
            else:
                raise RankError(f"node 0 has left {address[0]}:{address[1]} before all nodes had come: look there")
        return Links({})


class _Wait:
    """Says whom this node waits for, at once and every now and then; RankError when the time is over."""

    def __init__(self, cluster: Cluster) -> None:
        host, port = cluster.leader_address()
        self._where, self._limit = f"{host}:{port}", cluster.startup_seconds
        self._began = self._said = time.monotonic()
        self._whom = ""

    def remind(self, whom: str, why: str) -> None:
        """whom: is missing; why: or what to do."""
        now = time.monotonic()
        rest = self._limit - (now - self._began)
        if rest < 0:
            raise RankError(
                f"{whom} did not come to {self._where} within {self._limit:g} s ({why}); --startup-timeout waits longer"
            )
        if whom == self._whom and now - self._said < REMIND_SECONDS:
            return
        self._whom, self._said = whom, now
        print(f"msds: waiting for {whom} at {self._where}, up to {rest:.0f} s ({why})", file=sys.stderr, flush=True)
