"""Which processes a program has, on which machines, and how they find each other. No processes yet."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field

from msds.errors import OptionError

SECRET_VARIABLE = "MSDS_CLUSTER_SECRET"
"""Environment variable that all nodes of a program share; on one node a secret is drawn."""
LEAST_SECRET = 16


@dataclass(frozen=True)
class Cluster:
    """`ranks` processes, as many on each of `nodes` machines; this is machine `node_rank`.

    master: HOST:PORT of machine 0 as the others reach it: MindSpore's scheduler listens on PORT, rank 0 on PORT + 1.
    secret: what ranks prove that they know. Both are found on one machine, and needed on several. OptionError.
    """

    ranks: int
    nodes: int = 1
    node_rank: int = 0
    master: str | None = None
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks < 1 or self.ranks % self.nodes:
            raise OptionError(f"{self.ranks} ranks on {self.nodes} nodes: give a number of nodes that divides them")
        if not 0 <= self.node_rank < self.nodes:
            raise OptionError(
                f"node_rank is {self.node_rank}: with {self.nodes} nodes it is from 0 to {self.nodes - 1}"
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
        count = self.ranks // self.nodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

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
        """The socket on which rank 0 waits for the others; OptionError when the port is taken."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, port = ("127.0.0.1", 0) if self.master is None else self.leader_address()
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise OptionError(f"{host}:{port} cannot be listened on ({error}): name another --master port") from None
        listener.listen(self.ranks)
        return listener

    def leader_address(self) -> tuple[str, int]:
        """Where rank 0 listens, on several machines."""
        assert self.master is not None
        host, _, port = self.master.rpartition(":")
        return host, int(port) + 1
