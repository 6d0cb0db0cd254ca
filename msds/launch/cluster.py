"""Which processes a program has, on which machines, and how they find each other. No processes yet."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from msds.errors import OptionError

SECRET_VARIABLE = "MSDS_CLUSTER_SECRET"
"""Environment variable that all nodes of a program share; on one node a secret is drawn."""
LEAST_SECRET = 16
STARTUP_SECONDS = 600.0
"""Until every node, and then every rank, has found the others: MindSpore is imported in between."""
LONGEST_STARTUP_SECONDS = 86400.0


@dataclass(frozen=True)
class Cluster:
    """`ranks` processes, as many on each of `nodes` machines; this is machine `node_rank`.

    master: HOST:PORT of machine 0 as the others reach it: MindSpore's scheduler listens on PORT, rank 0 on PORT + 1.
    secret: what ranks prove that they know. Both are found on one machine, and needed on several. startup_seconds: what
    nodes, and then ranks, get to find each other. OptionError.
    """

    ranks: int
    nodes: int = 1
    node_rank: int = 0
    master: str | None = None
    secret: str = field(default="", repr=False)
    startup_seconds: float = STARTUP_SECONDS

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks < 1 or self.ranks % self.nodes:
            raise OptionError(f"{self.ranks} ranks on {self.nodes} nodes: give a number of nodes that divides them")
        if not 0 <= self.node_rank < self.nodes:
            raise OptionError(
                f"node_rank is {self.node_rank}: with {self.nodes} nodes it is from 0 to {self.nodes - 1}"
            )
        if not 1 <= self.startup_seconds <= LONGEST_STARTUP_SECONDS:
            raise OptionError(
                f"startup_timeout is {self.startup_seconds:g}: it must be from 1 to {LONGEST_STARTUP_SECONDS:g} seconds"
            )
        if self.nodes == 1:
            if self.master is not None:
                raise OptionError(f"master is {self.master!r}, but there is one node: leave it out, or give --nodes")
            object.__setattr__(self, "secret", secrets.token_hex(32))
            return
        if self.master is None:
            raise OptionError(
                f"{self.nodes} nodes need --master HOST:PORT: the address of node 0 and a free port there"
            )
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdigit() or not 1 <= int(port) < 65535:
            raise OptionError(f"master is {self.master!r}: it must be HOST:PORT, PORT from 1 to 65534")
        if len(self.secret) < LEAST_SECRET:
            raise OptionError(
                f"{self.nodes} nodes need a common secret of at least {LEAST_SECRET} characters in {SECRET_VARIABLE}: "
                "set the same one on every node"
            )

    @property
    def ranks_here(self) -> range:
        """The ranks that run on this machine."""
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node: int) -> range:
        """The ranks that run on a machine."""
        count = self.ranks // self.nodes
        return range(node * count, (node + 1) * count)

    def names(self, nodes: Sequence[int]) -> str:
        """Nodes with their ranks, for people: "rank 1 of node 1"."""
        return ", ".join(f"{name_ranks(self.ranks_of(node))} of node {node}" for node in nodes)

    @property
    def is_master(self) -> bool:
        """Whether rank 0 and the scheduler run on this machine."""
        return self.node_rank == 0

    def scheduler_address(self) -> tuple[str, int]:
        """Where MindSpore's scheduler is to listen: on one machine a port that is free now."""
        if self.master is not None:
            host, _, port = self.master.rpartition(":")
            return socket.gethostbyname(host), int(port)  # MindSpore takes numbers only
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1", int(probe.getsockname()[1])

    def leader_listener(self) -> socket.socket:
        """The socket on which node 0, and then rank 0, waits for the others; OptionError when the port is taken, or
        the one of the scheduler."""
        if self.master is None:
            return _listener("127.0.0.1", 0)
        host, port = self.leader_address()
        _listener(host, port - 1).close()
        return _listener(host, port)

    def leader_address(self) -> tuple[str, int]:
        """Where rank 0 listens, on several machines."""
        assert self.master is not None
        host, _, port = self.master.rpartition(":")
        return host, int(port) + 1


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for people: "rank 1", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _listener(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise OptionError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}): give --master an address of this node, "
            "and a PORT that is free together with the next one"
        ) from None
    return listener
