"""How often MindSpore has compiled a graph in this process, counted in MindSpore itself.

Not the misses of our own cache: a graph that MindSpore compiles behind our back counts too. On its way to the
compiler every jit function and every Cell passes one function of MindSpore, which warns of recompilations;
counting is installed there when this module is imported, so import it before the work that is to be counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mindspore.graph import api

from msds_graphs.errors import GraphError

_HOOK = "_check_recompile"


class _Count:
    """A number that only grows; compilations may come from several threads."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self.value += 1


def _install() -> _Count:
    original = getattr(api, _HOOK, None)
    if original is None:
        raise GraphError(
            f"this MindSpore lacks {api.__name__}.{_HOOK}, where compilations are counted: use mindspore 2.10"
        )
    count = _Count()

    def counted(*args: Any, **kwargs: Any) -> Any:
        count.add()
        return original(*args, **kwargs)

    setattr(api, _HOOK, counted)
    return count


_COUNT = _install()


def compile_count() -> int:
    """Graphs that MindSpore has compiled, or tried to, since this module was imported; it never decreases."""
    return _COUNT.value


@dataclass
class Compilations:
    """`count`: compilations since the block began; final once it has ended."""

    start: int
    end: int | None = None

    @property
    def count(self) -> int:
        return (compile_count() if self.end is None else self.end) - self.start


@contextmanager
def count_compiles() -> Iterator[Compilations]:
    """`with count_compiles() as seen: ...`, then `seen.count`: compilations of the block, by any thread."""
    seen = Compilations(compile_count())
    try:
        yield seen
    finally:
        seen.end = compile_count()
