"""The process that compiles for Ascend without hardware. Only for subprocesses that found the stub libraries.

It compiles and can do nothing else: MindSpore stops where a graph would be handed to the device. Reading a tensor's
value is refused, since with stub libraries it would be whatever was in memory; only while it compiles may MindSpore
read constants, which never left the host.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.common.initializer import initializer
from mindspore.communication import init
from mindspore.nn.utils import no_init_parameters

from msds_graphs.binding import ms_dtype
from msds_graphs.dryrun.bodies import SOC_VARIABLE
from msds_graphs.dryrun.ir import GraphText, read_graph
from msds_graphs.errors import GraphError
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import Tree, tree_flatten, tree_unflatten

_VALUES = ("asnumpy", "item", "tolist")


def start() -> None:
    """Make this process compile for Ascend from now on, for good. GraphError where there are no stub libraries.

    Called after MindSpore is imported and before anything else of it is used: with the variables set at its import it
    would take a simulation of its own, which knows no kind of chip.
    """
    if SOC_VARIABLE not in os.environ:
        raise GraphError("this process has no stub libraries: start it with StubLibraries.environment")
    for name in _VALUES:
        setattr(ms.Tensor, name, _guarded(getattr(ms.Tensor, name)))
    os.environ["MS_SIMULATION_LEVEL"] = "0"  # the front end: shapes, types, communication
    os.environ["MS_DEV_PRECOMPILE_ONLY"] = "1"  # and no call after it
    ms.set_device("Ascend")
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
    init()


class _State:
    is_compiling = False


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        if not _State.is_compiling:
            raise GraphError("a value was asked for in a dry run, which computes none")
        return method(*args, **kwargs)

    return read


def declare(spec_tree: Tree, prefix: str) -> Tree:
    """Parameters named `prefix.path` for a tree of ArraySpec, of their shapes and without memory."""
    leaves, structure = tree_flatten(spec_tree)
    rows = zip(structure.paths(), leaves, strict=True)
    return tree_unflatten(structure, [declare_one(spec, f"{prefix}.{path}") for path, spec in rows])


def declare_one(spec: ArraySpec, name: str, *, requires_grad: bool = False) -> ms.Parameter:
    """A Parameter of a spec's shape and number type, without memory."""
    with no_init_parameters():
        return ms.Parameter(
            initializer("zeros", spec.shape, ms_dtype(spec.dtype)), name=name, requires_grad=requires_grad
        )


def compiled_graph(compile_it: Callable[[], object]) -> GraphText:
    """What the one graph that `compile_it` compiles says after MindSpore's front end has checked it.

    GraphError where it compiled none, or more than one; its own errors come through.
    """
    with tempfile.TemporaryDirectory(prefix="msds-dryrun-") as folder:
        with _variables(MS_DEV_SAVE_GRAPHS="1", MS_DEV_SAVE_GRAPHS_PATH=folder, MS_DEV_DUMP_IR_PASSES="validate"):
            _State.is_compiling = True
            try:
                compile_it()
            finally:
                _State.is_compiling = False
        found = sorted(Path(folder).rglob("*_validate_*.ir"))
        if len(found) != 1:
            raise GraphError(f"MindSpore wrote {len(found)} validated graphs, expected one: it must compile one graph")
        with open(found[0], encoding="utf-8", errors="replace") as file:
            return read_graph(file)


@contextmanager
def _variables(**values: str) -> Iterator[None]:
    """Environment variables for the time of a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
