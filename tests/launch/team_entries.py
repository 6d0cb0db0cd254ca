"""Ranks that do what rank 0 tells them, without MindSpore: a call adds what it is given to a sum that all must hold."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msds.launch import Place
from msds.launch.team import Follower, Leader


def add_up(place: Place, folder: str, trouble: str = "", timeout: float = 20.0) -> None:
    """Rank 0 has all ranks add arrays up and writes what they agree on; in the last call there is trouble in rank 1."""
    total = np.zeros(3, np.int64)

    def add(fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        if fields["trouble"] and place.rank == 1:
            if fields["trouble"] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fields["trouble"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fields["trouble"] == "raise":
                raise ValueError("index 7 is out of range")
        if fields["trouble"] == "all raise":
            raise ValueError("index 7 is out of range")
        total[:] += arrays["a"]

    if place.rank:
        follower = Follower(place)
        follower.agree("blocks", 10 - place.rank)
        follower.serve({"add": add})
        Path(folder, f"sum-{place.rank}").write_text(json.dumps(total.tolist()), encoding="utf-8")
        return
    leader = Leader(place, timeout=timeout, on_failure=place.fail)
    least = leader.agree("blocks", 100)
    array = np.arange(3)
    for trouble_now in ("", "", trouble):
        fields = {"trouble": trouble_now}
        try:
            with leader.call("step add", "add", fields, {"a": array}):
                add(fields, {"a": array})
        except ValueError:
            assert trouble == "all raise"
    if trouble in ("stop", "kill", "raise"):
        time.sleep(600)
    Path(folder, "agreed").write_text(str(least), encoding="utf-8")
    leader.stop()
