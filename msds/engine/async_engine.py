"""An Engine on a thread of its own, for asyncio programs: the service, or yours. No tensors.

One thread owns the device. Requests, aborts and weight updates reach it through a queue and are carried out between
steps; every token goes back to the event loop that asked, those of one step together. The thread holds no lock while a
graph runs.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from msds.engine.engine import Engine
from msds.engine.schedule_types import SchedulerStats
from msds.engine.sequence import Delta, GenerationSequence, RequestInfo
from msds.errors import OptionError
from msds.sampling import SamplingParams

logger = logging.getLogger("msds")

Update = tuple[GenerationSequence, Delta]
Updates: TypeAlias = "asyncio.Queue[Update | BaseException]"


class EngineStoppedError(RuntimeError):
    """The engine was stopped, or its thread died; nothing more will be generated."""


class AsyncEngine:
    """Start with `start`, stop with `stop`; between them `generate` may be called from any event loop.

    update: called with what `update_weights` was given, on the engine's thread, between steps.
    """

    def __init__(self, engine: Engine, *, update: Callable[[Any], None] | None = None) -> None:
        self.engine = engine
        self._update = update
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="msds-engine", daemon=True)
        self._stopping = threading.Event()
        self._last_turn = time.monotonic()
        self._failure: BaseException | None = None
        self._tellers: set[Callable[[BaseException], None]] = set()
        self._outbox: list[tuple[asyncio.AbstractEventLoop, Updates, Update]] = []

    def start(self) -> None:
        """Start the engine's thread; OptionError where another one drives the engine."""
        if self.engine.is_driven or self.engine.has_work:
            raise OptionError("the engine is driven by another AsyncEngine or generates: stop that first")
        self.engine.is_driven = True
        self._last_turn = time.monotonic()
        try:
            self._thread.start()
        except BaseException:  # started before, or no thread can be had
            self.engine.is_driven = False
            raise

    async def stop(self, *, drain_seconds: float = 0.0) -> None:
        """Wait up to `drain_seconds` for running requests, abort the rest, and end the thread."""
        deadline = time.monotonic() + drain_seconds
        while self.is_alive and self.engine.has_work and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._stopping.set()
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive() and self._failure is None

    @property
    def failure(self) -> str | None:
        """Why the engine ended by itself, if it has."""
        return None if self._failure is None else str(self._failure)

    def fail(self, reason: str) -> None:
        """The device is lost, and a step may hang on it for ever: whoever waits hears of it now. From any thread."""
        self._failure = EngineStoppedError(reason)
        self.end_requests(f"the engine failed: {reason}")

    def end_requests(self, reason: str) -> None:
        """Whoever waits for an answer gets EngineStoppedError; the engine itself goes on. From any thread."""
        for tell in list(self._tellers):
            tell(EngineStoppedError(reason))

    @property
    def seconds_since_turn(self) -> float:
        """Age of the last time the thread came round; large while a graph call hangs."""
        return time.monotonic() - self._last_turn

    @property
    def stats(self) -> SchedulerStats:
        """Gauges and counters, read while the thread may work: each is right, two of them may be a step apart."""
        return self.engine.stats

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, info: RequestInfo | None = None
    ) -> AsyncGenerator[Update, None]:
        """Every delta of the `n` answers as it comes; the last delta of an answer has its finish_reason.

        Closing the iterator early aborts what is left within one step. Raises what `Engine.add` raises, before the
        first delta, and EngineStoppedError when the engine ends under way.
        """
        loop = asyncio.get_running_loop()
        updates: Updates = asyncio.Queue()

        def tell(error: BaseException) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, error)

        def listen(sequence: GenerationSequence, delta: Delta) -> None:
            self._outbox.append((loop, updates, (sequence, delta)))

        self._fail_if_stopped()
        self._tellers.add(tell)
        try:
            # compiled here, so that the engine's thread finds it ready while this reference lasts
            _grammar = None
            if params.constraint is not None:
                _grammar = await asyncio.to_thread(self.engine.compile, params.constraint)
            adding = self._submit(lambda: self.engine.add(prompt_ids, params, listen, info))
            try:
                sequences = await asyncio.wrap_future(adding)
            except asyncio.CancelledError:  # the caller left while its request was on its way
                adding.add_done_callback(self._abandon)
                raise
            remaining = len(sequences)
            try:
                while remaining:
                    update = await updates.get()
                    if isinstance(update, BaseException):
                        raise update
                    remaining -= update[1].finish_reason is not None
                    yield update
            finally:
                if remaining and self.is_alive:
                    self._commands.put(lambda: self._abort(sequences))
        finally:
            self._tellers.discard(tell)

    async def update_weights(self, tree: Any) -> None:
        """Put new weights in between two steps; tokens sampled after this returns come from them.

        Running requests go on: what they have cached is computed again with the new weights. The tree is validated
        before anything changes, and what is wrong with it is raised here.
        """
        if self._update is None:
            raise EngineStoppedError("this engine was built without a way to update its weights")
        update = self._update
        await asyncio.wrap_future(self._submit(lambda: update(tree)))

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the engine's thread between steps."""
        future: Future[Any] = Future()

        def carry_out() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._fail_if_stopped()
        self._commands.put(carry_out)
        return future

    def _abandon(self, adding: Future[list[GenerationSequence]]) -> None:
        """Abort what was added for a caller that did not wait for it."""
        if not adding.cancelled() and adding.exception() is None:
            self._commands.put(lambda: self._abort(adding.result()))

    def _abort(self, sequences: Sequence[GenerationSequence]) -> None:
        for sequence in sequences:
            self.engine.abort(sequence)

    def _fail_if_stopped(self) -> None:
        if not self.is_alive or self._stopping.is_set():
            raise EngineStoppedError(f"the engine is not running: {self._failure or 'it was stopped'}")

    def _loop(self) -> None:
        try:
            while not self._stopping.is_set():
                self._last_turn = time.monotonic()
                self._carry_out(block=not self.engine.has_work)
                self.engine.step()
                self._deliver()
            self._end(EngineStoppedError("the engine was stopped"))
        except BaseException as error:  # a fault of ours: everybody who waits must hear of it
            logger.exception("the engine's thread died")
            self._failure = error
            self._end(EngineStoppedError(f"the engine failed: {error}"))
        finally:
            self.engine.is_driven = False

    def _carry_out(self, *, block: bool) -> None:
        """All commands that are waiting; with `block` wait for one, up to half a second."""
        try:
            if block:
                self._commands.get(timeout=0.5)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

    def _deliver(self) -> None:
        """Wake each event loop once for all that it is to hear: each wake-up contends with it for the interpreter."""
        waiting: dict[asyncio.AbstractEventLoop, list[tuple[Updates, Update]]] = {}
        for loop, updates, update in self._outbox:
            waiting.setdefault(loop, []).append((updates, update))
        self._outbox.clear()
        for loop, pairs in waiting.items():
            loop.call_soon_threadsafe(_put, pairs)

    def _end(self, error: EngineStoppedError) -> None:
        self.engine.abort_all()
        self._deliver()
        for tell in list(self._tellers):
            tell(error)


def _put(pairs: Sequence[tuple[Updates, Update]]) -> None:
    for updates, update in pairs:
        updates.put_nowait(update)
