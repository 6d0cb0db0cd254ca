"""Stub libraries for the tests that compile: built once per session, or the reason why not."""

import shutil
from pathlib import Path

import pytest

from msds_graphs.dryrun.stubs import StubLibraries, stub_libraries
from msds_graphs.dryrun.symbols import TOOLS, mindspore_package


@pytest.fixture(scope="session")
def stub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for stub libraries that all tests share."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: stub libraries are made with them")
    package, version = mindspore_package()
    if not (package / "lib" / "plugin" / "libmindspore_ascend.so.2").is_file():
        pytest.skip(f"mindspore {version} as installed has no Ascend plug-in to compile with")
    return tmp_path_factory.mktemp("stubs")


@pytest.fixture(scope="session")
def stubs(stub_cache: Path) -> StubLibraries:
    """The libraries, built by this call."""
    return stub_libraries(stub_cache)
