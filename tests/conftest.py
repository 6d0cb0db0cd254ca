"""What all tests share: no network, quiet libraries, tiny checkpoints on demand, hypothesis profiles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Read by these libraries when they are imported, so set before any test module is.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",  # its threads do not survive a fork, and it says so
    GLOG_v="3",  # MindSpore: errors only
)

# ci: the same examples every run, and no deadline, since the first example of a shape compiles a graph.
# explore: fresh examples, many; `pytest --hypothesis-profile=explore`.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=500, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the tests of the service."""
    parser.addoption("--mesh", help="ask `msds serve --mesh MESH` instead of a service in this process: cpu:N")
    parser.addoption("--plan", help="its plan; default that of the command")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny("v3_base") -> folder of that variant, written once per session; keywords as `write_checkpoint`.

    The folder is shared: a test that spoils a checkpoint copies it first.
    """
    from tests.reference.checkpoints import write_checkpoint

    root = tmp_path_factory.mktemp("tiny")
    written: dict[tuple[Any, ...], Path] = {}

    def folder(name: str, **options: Any) -> Path:
        key = (name, *sorted(options.items()))
        if key not in written:
            written[key] = write_checkpoint(name, root / f"{name}-{len(written)}", **options)
        return written[key]

    return folder
