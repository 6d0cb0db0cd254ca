"""Processes of the tests find this checkout, wherever the tests were started, and leave nothing in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="package")
def _find_this_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in ("", "graphs", "ops", "serve")))
        patch.chdir(tmp_path_factory.mktemp("work"))
        yield
