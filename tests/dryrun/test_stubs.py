"""The stub libraries: complete or absent, built once, by tools that are named where they are missing."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.dryrun import bodies, stubs, symbols
from msds_graphs.dryrun.stubs import StubLibraries, stub_libraries
from msds_graphs.errors import GraphError

WANTED = symbols.Wanted(("libascendcl.so",), ("aclrtMalloc", "aclnnMm"))


@pytest.fixture
def quick(monkeypatch):
    """Builds that take no time; the list has an entry per build."""
    built: list[Path] = []

    def build(folder: Path, wanted: symbols.Wanted) -> None:
        folder.mkdir(parents=True)
        (folder / "library").write_text("complete")
        built.append(folder)

    monkeypatch.setattr(stubs, "_build", build)
    monkeypatch.setattr(symbols, "check_tools", lambda: None)
    monkeypatch.setattr(symbols, "wanted_of_cann", lambda package: WANTED)
    return built


def visible(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if not path.name.endswith(".lock"))


def test_real_libraries_are_built_once(stubs: StubLibraries, stub_cache):
    assert stubs.was_built
    library = stubs.folder / "latest" / "lib64" / "libascendcl.so"
    before = library.stat().st_mtime_ns
    again = stub_libraries(stub_cache)
    assert again == StubLibraries(stubs.folder, was_built=False)
    assert library.stat().st_mtime_ns == before
    assert visible(stub_cache) == [stubs.folder.name]


def test_real_libraries_define_what_mindspore_wants(stubs: StubLibraries):
    home = stubs.folder / "latest" / "lib64"
    assert {"libascendcl.so", "libhccl.so", "libge_runner.so"} <= {path.name for path in home.iterdir()}
    listed = subprocess.run(["nm", "-D", "--defined-only", home / "libopapi.so"], capture_output=True, text=True).stdout
    defined = {line.split()[-1] for line in listed.splitlines()}
    assert len(defined) > 1000
    # linked, looked up by name, put together from one that is, and not CANN's but Python's and libstdc++'s
    assert {"aclrtSetDevice", "HcclAllReduce", "aclnnMm", "aclnnMmGetWorkspaceSize"} <= defined
    assert not any(name.startswith(("Py", "_ZNSt")) for name in defined)


def test_the_folder_is_named_by_version_and_generator(quick, tmp_path, monkeypatch):
    first = stub_libraries(tmp_path).folder
    assert stub_libraries(tmp_path).was_built is False
    monkeypatch.setattr(symbols, "mindspore_package", lambda: (Path("/nowhere"), "2.10.1"))
    second = stub_libraries(tmp_path).folder
    monkeypatch.setattr(stubs, "_generator_digest", lambda: "another")
    third = stub_libraries(tmp_path).folder
    assert len({first, second, third}) == 3
    assert "2.10.1" in second.name


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("disk full")])
def test_an_interrupted_build_leaves_nothing(quick, tmp_path, monkeypatch, interruption):
    build = stubs._build

    def interrupted(folder, wanted):
        build(folder, wanted)
        raise interruption

    monkeypatch.setattr(stubs, "_build", interrupted)
    with pytest.raises((KeyboardInterrupt, GraphError)):
        stub_libraries(tmp_path)
    assert visible(tmp_path) == []
    monkeypatch.setattr(stubs, "_build", build)
    assert stub_libraries(tmp_path).was_built


def test_what_a_killed_build_left_goes_with_the_next(quick, tmp_path):
    (tmp_path / ".building-x" / "cann").mkdir(parents=True)
    made = stub_libraries(tmp_path)
    assert visible(tmp_path) == [made.folder.name]
    assert (made.folder / "latest" / "library").read_text() == "complete"


def test_two_that_want_it_at_once_build_it_once(quick, tmp_path, monkeypatch):
    build, inside = stubs._build, threading.Event()

    def slow(folder, wanted):
        inside.set()
        time.sleep(0.3)  # the other one would build too, if nothing held it back
        build(folder, wanted)

    monkeypatch.setattr(stubs, "_build", slow)
    results = []
    other = threading.Thread(target=lambda: (inside.wait(10), results.append(stub_libraries(tmp_path))))
    other.start()
    results.append(stub_libraries(tmp_path))
    other.join(10)
    assert len(quick) == 1
    assert sorted(made.was_built for made in results) == [False, True]
    assert len({made.folder for made in results}) == 1


@pytest.mark.parametrize("present", [(), ("nm", "readelf"), ("gcc",)])
def test_missing_tools_are_named(present, tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in present:
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(GraphError, match=r"apt install gcc binutils") as caught:
        stub_libraries(tmp_path / "cache")
    named = str(caught.value).partition(" not found")[0].split(" and ")
    assert named == [name for name in symbols.TOOLS if name not in present]
    assert not (tmp_path / "cache").exists()


def test_a_mindspore_without_ascend_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(symbols, "check_tools", lambda: None)
    with pytest.raises(GraphError, match="has no Ascend plug-in"):
        symbols.wanted_of_cann(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(quick, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphError, match="name another folder"):
        stub_libraries(tmp_path / "file" / "cache")


def test_a_gcc_that_fails_is_reported(tmp_path, monkeypatch, stub_cache):
    monkeypatch.setattr(symbols, "wanted_of_cann", lambda package: WANTED)
    monkeypatch.setattr(bodies, "stub_source", lambda names: "this is no C")
    with pytest.raises(GraphError, match=r"gcc failed.*error"):
        stub_libraries(tmp_path)
    assert visible(tmp_path) == []


def test_the_environment_adds_to_what_is_there(tmp_path):
    found = StubLibraries(tmp_path, was_built=False).environment(
        {"LD_LIBRARY_PATH": "/mine", "HOME": "/home"}, soc="Ascend910B3", rank=3, ranks=16
    )
    assert found["LD_LIBRARY_PATH"].split(os.pathsep) == [str(tmp_path / "latest/lib64"), "/mine"]
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "latest/python")
    assert (found["RANK_ID"], found["RANK_SIZE"], found["HOME"]) == ("3", "16", "/home")
    assert found[bodies.SOC_VARIABLE] == "Ascend910B3"


@given(st.lists(st.from_regex(r"\A(acl|_ZN2ge|_ZNK2ge|_ZTV)[A-Za-z0-9_]{1,30}\Z"), unique=True))
def test_every_symbol_is_defined_once(names):
    source = bodies.stub_source(names)
    for name in names:
        assert len(re.findall(rf"^(?:[\w ]+\*?){re.escape(name)}[\[(]", source, re.MULTILINE)) == 1
