"""What a process knows of itself among the others."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """rank of `ranks`; `ranks_here` of them share this machine. leader: address of rank 0, which listens on the file
    descriptor `listener`; secret: what both ends of a connection prove that they know."""

    rank: int
    ranks: int
    ranks_here: int
    leader: tuple[str, int]
    secret: str = field(repr=False)
    listener: int | None = None

    def listening(self) -> socket.socket:
        """Rank 0's listening socket."""
        assert self.listener is not None
        return socket.socket(fileno=self.listener)
