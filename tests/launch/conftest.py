"""Processes of the tests find this checkout, wherever the tests were started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _find_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(ROOT / part) for part in ("", "graphs", "ops", "serve")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
