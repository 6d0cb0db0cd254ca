"""Stub libraries that stand in for CANN, so that MindSpore's Ascend plug-in compiles without an NPU. Host code.

They compute nothing: every function of theirs returns at once and every array stays as it was. A process that has them
loaded can compile graphs for Ascend and must never be asked for a value, so they are for subprocesses alone
(`StubLibraries.environment` says how).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msds_graphs.dryrun import bodies, symbols
from msds_graphs.errors import GraphError

SOCS = {"a2": "Ascend910B3", "a3": "Ascend910_9392"}
"""Kind of a mesh -> the chip that is claimed: MindSpore takes the first for an A2 and the second for an A3."""
_PARTIAL = ".building-"
_HOME = "latest"
"""As in an installed CANN: MindSpore looks for this name in the path of the library that it has loaded."""


@dataclass(frozen=True)
class StubLibraries:
    """A finished folder of stub libraries; made by `stub_libraries`. was_built: by this call, not found ready."""

    folder: Path
    was_built: bool

    def environment(self, base: Mapping[str, str], *, soc: str, rank: int, ranks: int) -> dict[str, str]:
        """`base` changed so that a Python process finds the stubs and takes itself for `rank` of `ranks`."""
        home = self.folder / _HOME

        def before(variable: str, *paths: Path) -> str:
            return os.pathsep.join([*map(str, paths), *filter(None, [base.get(variable)])])

        return {
            **base,
            "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", home / "lib64"),
            "PYTHONPATH": before("PYTHONPATH", home / "python", home / "opp/built-in/op_impl/ai_core/tbe"),
            "ASCEND_HOME_PATH": str(home),
            "ASCEND_TOOLKIT_HOME": str(home),
            "ASCEND_OPP_PATH": str(home / "opp"),
            "RANK_SIZE": str(ranks),
            "RANK_ID": str(rank),
            bodies.SOC_VARIABLE: soc,
        }


def default_cache() -> Path:
    """Where stub libraries are kept unless told otherwise: `msds` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "msds"


def stub_libraries(cache: Path | None = None) -> StubLibraries:
    """The stub libraries for the installed MindSpore, built in half a minute where `cache` does not hold them.

    The folder is named by MindSpore's version, the processor and the text of the generator, and appears complete or
    not at all; processes that want it at the same time wait for one of them to build it. GraphError where MindSpore has
    no Ascend plug-in, a tool is missing or the folder cannot be written.
    """
    package, version = symbols.mindspore_package()
    home = cache or default_cache()
    target = home / f"stub-cann-{version}-{platform.machine()}-{_generator_digest()}"
    if target.is_dir():
        return StubLibraries(target, was_built=False)
    symbols.check_tools()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _alone(home):
            if target.is_dir():
                return StubLibraries(target, was_built=False)
            for left in home.glob(
                f"{_PARTIAL}*"
            ):  # of builds that were killed: nobody else builds while we hold the lock
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=home) as partial:
                _build(Path(partial) / "cann" / _HOME, symbols.wanted_of_cann(package))
                (Path(partial) / "cann").rename(target)
    except OSError as error:
        raise GraphError(f"cannot write stub libraries to {home}: {error}; name another folder") from None
    return StubLibraries(target, was_built=True)


def _generator_digest() -> str:
    digest = hashlib.sha256()
    for module in (__file__, bodies.__file__, symbols.__file__):
        digest.update(Path(module).read_bytes())
    return digest.hexdigest()[:12]


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go of the lock of one that dies."""
    with open(home / ".stub-cann.lock", "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, wanted: symbols.Wanted) -> None:
    libraries = folder / "lib64"
    libraries.mkdir(parents=True)
    source = folder / "stubs.c"
    source.write_text(bodies.stub_source(wanted.symbols), encoding="ascii")
    options = ["-w", "-O1", "-fno-builtin", "-shared", "-fPIC", "-Wl,-soname,libmsdsstub.so"]
    command = ["gcc", *options, "-o", str(libraries / "libmsdsstub.so"), str(source), "-lstdc++"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise GraphError(
            f"gcc failed on the stub libraries (exit code {done.returncode}): {done.stderr.strip()[-2000:]}"
        )
    for name in wanted.libraries:
        (libraries / name).symlink_to("libmsdsstub.so")
    # MindSpore imports `hccl` when it joins a group, and reads versions from files; it does without the package `te`,
    # whose absence it reports as an error, and with an empty one asks for more of it
    for path, text in {
        "python/hccl/__init__.py": "",
        "python/hccl/sys_version.py": f"__sys_version__ = '{bodies.CANN_VERSION}'\n",
        "compiler/version.info": f"Version={bodies.CANN_VERSION}\n",
        "opp/version.info": f"Version={bodies.CANN_VERSION}\n",
        "opp/built-in/op_impl/ai_core/tbe/.keep": "",
        "opp/vendors/.keep": "",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="ascii")
