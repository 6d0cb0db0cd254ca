"""What a process knows of itself among the others."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

from msds.launch.cluster import STARTUP_SECONDS


@dataclass(frozen=True)
class Place:
    """rank of `ranks`; `ranks_here` of them share this machine. leader: address of rank 0, which listens on the file
    descriptor `listener`; secret: what both ends of a connection prove that they know, in startup_seconds. report: the
    launcher's pipe."""

    rank: int
    ranks: int
    ranks_here: int
    leader: tuple[str, int]
    secret: str = field(repr=False)
    listener: int | None = None
    report: int = -1
    startup_seconds: float = STARTUP_SECONDS

    @property
    def number_here(self) -> int:
        """Which of the ranks on this machine, from 0."""
        return self.rank % self.ranks_here

    def listening(self) -> socket.socket:
        """Rank 0's listening socket."""
        assert self.listener is not None
        return socket.socket(fileno=self.listener)

    def say(self, message: dict[str, Any]) -> None:
        """Tell the launcher."""
        os.write(self.report, json.dumps(message).encode() + b"\n")

    def leave(self) -> NoReturn:
        """End this process well, and at once: for ranks that know that the others are done.

        MindSpore's own leaving waits for all of them, which takes it seconds.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def fail(self, message: str) -> NoReturn:
        """End this process at once, from any thread, even while another hangs in a graph; the launcher says why."""
        self.say({"error": message})
        sys.stderr.flush()
        os._exit(1)
