"""Fixtures of the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore writes a dump of every graph that fails to compile into the working directory."""
    monkeypatch.chdir(tmp_path)
