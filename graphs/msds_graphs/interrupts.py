"""Interrupts that wait until what must not be torn apart is done: a compilation, an optimiser step."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("msds")


@contextmanager
def collected(tell: Callable[[], None] | None = None) -> Iterator[list[signal.Signals]]:
    """SIGINT and SIGTERM as they arrive, instead of what they did before. tell: called at the first of them."""
    received: list[signal.Signals] = []

    def receive(number: int, frame: object) -> None:
        if not received and tell is not None:
            tell()
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    with collected(
        lambda: logger.warning("interrupted: ends when %s is done, which may take a while", what)
    ) as received:
        yield
    if received and signal.getsignal(received[0]) == signal.SIG_DFL:
        raise KeyboardInterrupt
    if received:
        signal.raise_signal(received[0])
