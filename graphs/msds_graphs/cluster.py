"""Joining MindSpore's cluster of processes, whose addresses the launcher put into the environment."""

from __future__ import annotations

import mindspore as ms
from mindspore.communication import init


def join() -> None:
    """Return when all ranks have joined; in the scheduler's process, when all have left."""
    ms.set_device(ms.get_context("device_target"))
    init()
