"""Making a Python function fit for graph mode: hiding what it cannot take, refusing what would go wrong.

MindSpore parses the source of a function and looks its names up in closure cells and module globals. So:
partials and lambdas are rebuilt as named functions; a decorated function is cloned without the `__wrapped__`
mark, which would make MindSpore compile the undecorated function instead, silently; and an array that is
closed over is refused, because it would be baked into the graph as a constant.

When anything in reach needs hiding, every user function in reach is cloned, with each replaced name as a
closure cell: the parser looks there first, even for what Python itself would take from the globals. A clone
is only parsed, never run.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.common.parameter import Parameter

from msds_graphs.errors import GraphError
from msds_graphs.lambdas import named_from_lambda
from msds_graphs.trees import is_named_tuple, join, tree_flatten

_FOREIGN = frozenset({"mindspore", "numpy"}) | sys.stdlib_module_names
_FOLDERS = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (mindspore, np))
_STDLIB = sysconfig.get_path("stdlib") + os.sep


def prepare(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that means what `fn` means and that graph mode can compile; GraphError if there is none."""
    if isinstance(fn, (type, types.BuiltinFunctionType, np.ufunc)) or not callable(fn):
        raise GraphError(f"{_label(fn)} has no Python source to compile: wrap it in a function with def")
    if isinstance(fn, nn.Cell):
        raise GraphError(f"{_label(fn)} is a Cell with Parameters of its own: pass them in `bound` to a function")
    reach = _Reach()
    reach.visit(fn, "fn", "")
    return reach.clone(fn) if reach.hides else fn


def _label(fn: object) -> str:
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{getattr(fn, '__module__', None) or type(fn).__module__}.{name}"


class _Reach:
    """The functions that one function can reach by name, and whether any of them must be hidden."""

    def __init__(self) -> None:
        self.hides = False
        self._seen: set[int] = set()
        self._clones: dict[int, Callable[..., Any]] = {}

    def visit(self, value: Any, name: str, where: str) -> None:
        """Checks `value`, named `name` in function `where`, and all that it reaches."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, functools.partial):
            self.hides = True
            self.visit(value.func, f"{name}.func", where)
            for key, argument in [*enumerate(value.args), *value.keywords.items()]:
                self.visit(argument, f"{name} argument {key}", where)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__, name, where)
            _refuse_arrays(vars(value.__self__) if hasattr(value.__self__, "__dict__") else {}, name, where)
        else:
            _check_value(value, name, where)

    def _visit_function(self, fn: types.FunctionType) -> None:
        if _is_foreign(fn):
            return
        if hasattr(fn, "__wrapped_by_jit__"):
            self.hides = True
            self.visit(fn.__dict__["__wrapped__"], fn.__name__, "")
            return
        if fn.__name__ == "<lambda>" or hasattr(fn, "__wrapped__"):
            self.hides = True
        if fn.__name__ != "<lambda>":
            _check_source(fn)
        for name, value in _references(fn):
            self.visit(value, name, _label(fn))

    def clone(self, value: Any) -> Any:
        """What `value` is replaced by: functions by clones that reach clones, anything else by itself."""
        if isinstance(value, functools.partial):
            return self._remember(value, lambda: self._named_partial(value))
        if not isinstance(value, types.FunctionType) or _is_foreign(value):
            return value
        if hasattr(value, "__wrapped_by_jit__"):
            return self.clone(value.__dict__["__wrapped__"])
        if id(value) not in self._clones:
            self._clone_function(value)
        return self._clones[id(value)]

    def _remember(self, value: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        if id(value) not in self._clones:
            self._clones[id(value)] = make()
        return self._clones[id(value)]

    def _named_partial(self, partial: functools.partial[Any]) -> Callable[..., Any]:
        fn = self.clone(partial.func)
        args = tuple(self.clone(argument) for argument in partial.args)
        keywords = {key: self.clone(argument) for key, argument in partial.keywords.items()}

        def call(*rest):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            return fn(*args, *rest, **keywords)

        return call

    def _clone_function(self, fn: types.FunctionType) -> None:
        source = named_from_lambda(fn) if fn.__name__ == "<lambda>" else fn
        references = dict(_references(source))
        cells = {name: types.CellType() for name in references}
        code = source.__code__
        free = code.co_freevars + tuple(name for name in cells if name not in code.co_freevars)
        clone = types.FunctionType(
            code.replace(co_freevars=free),
            source.__globals__,
            source.__name__,
            source.__defaults__,
            tuple(cells.get(name, types.CellType()) for name in free),
        )
        clone.__kwdefaults__ = source.__kwdefaults__
        clone.__module__ = source.__globals__["__name__"]  # where the parser looks globals up
        self._clones[id(fn)] = clone  # before its references: functions may be recursive
        for name, value in references.items():
            cells[name].cell_contents = self.clone(value)


def _is_foreign(value: object) -> bool:
    """Whether the object belongs to MindSpore, NumPy or the standard library: not ours to inspect."""
    if isinstance(value, types.FunctionType):  # by place, as a user's module may be named like a library's
        file = value.__code__.co_filename
        return file.startswith(_FOLDERS) or (file.startswith(_STDLIB) and "site-packages" not in file)
    module = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(module, str) and module.partition(".")[0] in _FOREIGN and module != "__main__"


def _references(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """(name, value) of every closure cell, and of every global that the code or a nested def loads."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is filled later; the parser will speak up if it still is empty
            continue
    for name in dict.fromkeys(_global_names(fn.__code__)):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _check_source(fn: types.FunctionType) -> None:
    try:
        inspect.getsourcelines(fn.__code__)
    except (OSError, TypeError) as error:
        raise GraphError(
            f"{_label(fn)} has no source (made by exec, or typed into a shell), which graph mode parses: "
            "define it in a file"
        ) from error
    module = sys.modules.get(fn.__globals__.get("__name__", ""))
    if module is None or vars(module) is not fn.__globals__:
        raise GraphError(
            f"{_label(fn)}: its module {fn.__globals__.get('__name__')!r} is not the one in sys.modules, "
            "where graph mode looks its globals up: import the module in the usual way"
        )


def _check_value(value: Any, name: str, where: str) -> None:
    if isinstance(value, (types.ModuleType, Parameter)):
        return
    if isinstance(value, type):
        if issubclass(value, tuple) and hasattr(value, "_fields"):
            raise GraphError(
                f"{where} uses the named tuple class {value.__name__} ({name!r}), which graph mode cannot "
                "build: use a dict"
            )
        return
    if isinstance(value, (Tensor, np.ndarray)):
        raise _closed_over(value, name, where)
    if is_named_tuple(value) and any(isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0]):
        raise GraphError(f"{where} closes over the named tuple {name!r} of tensors: use a dict")
    if isinstance(value, (dict, tuple, list)):
        _refuse_arrays(value, name, where)
    elif hasattr(value, "__dict__") and not _is_foreign(type(value)):
        _refuse_arrays(vars(value), name, where)


def _refuse_arrays(container: Any, name: str, where: str, depth: int = 4) -> None:
    """Refuses plain arrays inside containers, `depth` levels down: constants hide no deeper in practice."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        path = join(name, str(key))
        if isinstance(value, (Tensor, np.ndarray)) and not isinstance(value, Parameter):
            raise _closed_over(value, path, where)
        if isinstance(value, (dict, tuple, list)) and depth:
            _refuse_arrays(value, path, where, depth - 1)


def _closed_over(value: Any, name: str, where: str) -> GraphError:
    return GraphError(
        f"{where or 'the function'} closes over {name!r}, a {type(value).__name__} of shape "
        f"{tuple(value.shape)}, which would be baked into the graph as a constant: pass it in `bound`"
    )
