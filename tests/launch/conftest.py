"""Processes of the tests find this checkout, wherever the tests were started, and leave nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.served import PYTHONPATH


@pytest.fixture(autouse=True, scope="package")
def _find_this_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.chdir(tmp_path_factory.mktemp("work"))
        yield
