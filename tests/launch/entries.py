"""What ranks run in these tests: no MindSpore, so that a process starts at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from msds.errors import OptionError
from msds.launch import Place


def write_place(place: Place, folder: str) -> None:
    """Each rank leaves a file."""
    Path(folder, f"{place.rank}-of-{place.ranks}").write_text(os.environ.get("MS_NODE_ID", ""), encoding="utf-8")
    print(f"rank {place.rank} speaks", file=sys.stderr)


def fail_in_one(place: Place, rank: int, how: str) -> None:
    """One rank fails in some way, the others would work for ever."""
    if place.rank == rank:
        print("the last thing it said", file=sys.stderr, flush=True)
        if how == "raise":
            raise RuntimeError("a fault of ours")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OptionError("block_size is 0: it must be at least 1")
    time.sleep(600)


def wait(place: Place, folder: str, deaf: bool = False) -> None:
    """Say which process this is, and work for ever; deaf: also when told to end."""
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = Path(folder, f".{place.rank}")
    part.write_text(str(os.getpid()), encoding="utf-8")
    part.rename(Path(folder, f"pid-{place.rank}"))
    time.sleep(600)


def leave_well(place: Place, folder: str) -> None:
    """Work until told to end, then end as after all work."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    Path(folder, f"pid-{place.rank}").write_text(str(os.getpid()), encoding="utf-8")
    told.wait(600)
    Path(folder, f"left-{place.rank}").touch()


def leave_alone(place: Place, folder: str) -> None:
    """Rank 0 ends as it is told to, the others cannot, as in a graph."""
    wait(place, folder, deaf=place.rank > 0)
