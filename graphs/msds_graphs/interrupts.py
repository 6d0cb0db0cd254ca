"""Interrupts that wait until what must not be torn apart is done: a compilation, an optimiser step."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("msds")


@contextmanager
def held_back(what: str) -> Iterator[None]:
    """Delays SIGINT and SIGTERM to the end of the block, then hands the first to the handler that was there before.

    what: is being done, for the log. MindSpore answers SIGINT with SIGTERM while it compiles, so Ctrl-C would end the
    process without a word; and an exception in the midst of its tracing makes it dump its IR into the current folder.
    SIGTERM that nobody handles becomes KeyboardInterrupt, since it may have been a Ctrl-C. An error of the block comes
    before an interrupt. Outside of the main thread, which alone handles signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        if not received:
            logger.warning("interrupted: ends when %s is done, which may take a while", what)
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        handler = before[signal.Signals(received[0])]
        if callable(handler):
            handler(received[0], None)
        elif handler != signal.SIG_IGN:
            raise KeyboardInterrupt
