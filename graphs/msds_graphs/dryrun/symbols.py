"""What an installed MindSpore asks of CANN: library names and symbols, read from the wheel's own files. Host code.

Nothing of CANN is stored here or copied: the lists come out of the ELF tables (nm, readelf) and, for the functions that
MindSpore looks up by name at run time, out of the strings of its Ascend libraries.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from msds_graphs.errors import GraphError

TOOLS = ("gcc", "nm", "readelf")

# what libmindspore_ascend opens besides what it links
_PLUGINS = (
    "libmindspore_ascend.so.2",
    "libmindspore_ops_ascend.so",
    "ascend/libmindspore_graph_ir.so",
    "ascend/libmindspore_ascend_res_manager.so",
    "ascend/libd_collective.so",
    "ascend/libhccl_plugin.so",
    "ascend/liblowlatency_collective.so",
    "ascend/libmindspore_atb_kernels.so",
    "ascend/libmindspore_pyboost_atb_kernels.so",
    "ascend/libmindspore_internal_kernels.so",
    "ascend/libmindspore_symmetric_memory_kernels.so",
)
# libraries of CANN that are only opened by name, from its home
_OPENED = (
    "libopapi.so",
    "libopapi_math.so",
    "libopapi_nn.so",
    "libopapi_cv.so",
    "libopapi_transformer.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libhcomgraph_adaptor.so",
)
_STRING = re.compile(rb"(?<![\x20-\x7e])[A-Za-z]\w{4,90}(?=\0)")
_LOOKED_UP = re.compile(
    r"(?:acl[a-z]*|Hccl|hccl|hcom|Hcom|rts?|Tdt|tdt|Msprof|msprof|ge|Ge|mstx|Mstx|hal|atb)[A-Z]\w{1,80}"
)
_PYTHON = re.compile(r"_?Py[A-Z_]")


@dataclass(frozen=True)
class Wanted:
    """libraries: names of shared objects that nobody provides; symbols: names that nobody defines; both sorted."""

    libraries: tuple[str, ...]
    symbols: tuple[str, ...]


def check_tools() -> None:
    """GraphError naming the tools that are missing and what to install."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise GraphError(
            f"{' and '.join(missing)} not found on PATH: the stub libraries are made with gcc, nm and readelf; install "
            "them (Debian and Ubuntu: apt install gcc binutils; openEuler: dnf install gcc binutils)"
        )


def mindspore_package() -> tuple[Path, str]:
    """Folder and version of the installed MindSpore, without importing it."""
    found = importlib.util.find_spec("mindspore")
    places = None if found is None else found.submodule_search_locations
    if not places:
        raise GraphError("MindSpore is not installed: pip install 'mindspore>=2.10,<2.11'")
    return Path(next(iter(places))), importlib.metadata.version("mindspore")


def wanted_of_cann(package: Path) -> Wanted:
    """What the Ascend libraries under the MindSpore folder `package` want and do not get. Takes half a minute.

    GraphError where there is no Ascend plug-in, or a tool fails.
    """
    check_tools()
    plugins = package / "lib" / "plugin"
    if not (plugins / _PLUGINS[0]).is_file():
        raise GraphError(
            f"{plugins / _PLUGINS[0]} does not exist: this MindSpore has no Ascend plug-in; Linux wheels have"
        )
    shipped = {path.name: path for path in sorted((package / "lib").rglob("*.so*"), reverse=True)}
    shipped |= {path.name: path for path in package.glob("*.so*")}
    start = [plugins / name for name in _PLUGINS if (plugins / name).is_file()]
    start += sorted((plugins / "ascend").glob("custom_ascendc_*/op_api/lib/*.so"))
    seen, missing = _closure(start, shipped)
    defined = {symbol for path in seen for symbol, _ in _symbols(path, "--defined-only")}
    wanted: set[str] = set()
    for path in (path for path in seen if "plugin" in path.parts):
        linked = (symbol for symbol, kind in _symbols(path, "--undefined-only") if kind == "U")
        wanted.update(symbol for symbol in linked if not _PYTHON.match(symbol))
        wanted.update(_looked_up(path))
    # for each operator two functions, of which often one name is in the strings and the other is put together
    wanted |= {f"{name}GetWorkspaceSize" for name in wanted if re.fullmatch(r"aclnn\w+(?<!GetWorkspaceSize)", name)}
    return Wanted(tuple(sorted(missing | set(_OPENED))), tuple(sorted(wanted - defined - {"__tls_get_addr"})))


def _closure(start: Iterable[Path], shipped: dict[str, Path]) -> tuple[list[Path], set[str]]:
    """The libraries reached over DT_NEEDED, and the names that neither the wheel nor the system has."""
    todo, seen, missing = list(start), dict[Path, None](), set[str]()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen[path] = None
        for line in _run("readelf", "-d", str(path)):
            match = re.search(r"NEEDED.*\[(.*)\]", line)
            if match is None:
                continue
            name = match[1]
            system = shipped.get(name) or _of_system(name)
            if system is not None:
                todo.append(system)
            elif name.startswith("lib"):
                missing.add(name)
    return list(seen), missing


def _of_system(name: str) -> Path | None:
    """Where the compiler finds a library; it answers with the bare name where it does not."""
    found = Path(_run("gcc", f"-print-file-name={name}")[0])
    return found.resolve() if found.is_absolute() else None


def _looked_up(path: Path) -> Iterator[str]:
    for match in _STRING.finditer(path.read_bytes()):
        name = match.group().decode()
        if _LOOKED_UP.fullmatch(name):
            yield name


def _symbols(path: Path, which: str) -> Iterator[tuple[str, str]]:
    """(name, nm's letter) of the dynamic symbols, versions cut off."""
    for line in _run("nm", "-D", which, str(path)):
        fields = line.split()
        yield fields[-1].split("@")[0], fields[-2]


def _run(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise GraphError(
            f"{' '.join(command)} failed with exit code {error.returncode}: {error.stderr.strip()}"
        ) from None
    return done.stdout.splitlines()
