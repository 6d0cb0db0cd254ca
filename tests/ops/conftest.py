"""Ops are tested as they run: inside compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore writes a dump of every graph that fails to compile into the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def run() -> Callable[..., Any]:
    """run(fn, batch): `fn(batch)`, a tree of arrays to a tree of tensors, compiled as a graph and called once."""
    from msds_graphs.compile import compile

    def run_once(fn: Callable[..., Any], batch: dict[str, np.ndarray]) -> Any:
        def step(bound, donated, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            return fn(batch), donated

        return compile(step, bound=(), batch=batch, pad=False)(batch)  # a fill that every dtype takes; none is used

    return run_once


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
