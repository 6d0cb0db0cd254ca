"""A lambda as a named function: graph mode parses source lines, and those of a lambda hold more than it."""

from __future__ import annotations

import ast
import atexit
import itertools
import linecache
import shutil
import tempfile
import types
from pathlib import Path

from msds_graphs.errors import GraphError

_NUMBERS = itertools.count(1)
_FOLDER: list[Path] = []


def named_from_lambda(fn: types.FunctionType) -> types.FunctionType:
    """A function defined by `def` with the body, closure, globals and defaults of the lambda `fn`.

    GraphError when its source cannot be told apart: no file, or several lambdas that fit on its line.
    """
    node = _find(fn)
    name = f"lambda_{next(_NUMBERS)}"
    free = fn.__code__.co_freevars
    source = (
        f"def make({', '.join(free)}):\n"
        f"    def {name}({ast.unparse(node.args)}):\n"
        f"        return {ast.unparse(node.body)}\n"
        f"    return {name}\n"
    )
    path = _write(name, source)
    module = ast.parse(source)
    code = compile(module, str(path), "exec")
    made = _nested_code(_nested_code(code, "make"), name)
    cells = dict(zip(free, fn.__closure__ or (), strict=True))
    named = types.FunctionType(
        made, fn.__globals__, name, fn.__defaults__, tuple(cells[cell] for cell in made.co_freevars)
    )
    named.__kwdefaults__ = fn.__kwdefaults__
    named.__module__ = fn.__globals__["__name__"]
    return named


def _find(fn: types.FunctionType) -> ast.Lambda:
    code = fn.__code__
    where = f"the lambda at {code.co_filename}:{code.co_firstlineno}"
    text = "".join(linecache.getlines(code.co_filename, fn.__globals__))
    if not text:
        raise GraphError(f"{where} has no source file, which graph mode parses: define a function in a file")
    candidates = {
        ast.dump(node): node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno and _fits(node, code)
    }
    if len(candidates) != 1:
        raise GraphError(
            f"{where}: {len(candidates)} lambdas fit on this line, so its source cannot be told apart: "
            "give it a name with def"
        )
    return next(iter(candidates.values()))


def _fits(node: ast.Lambda, code: types.CodeType) -> bool:
    """Whether the lambda expression is the source of `code`: same arguments and names, and the same place."""
    arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if tuple(arguments) != code.co_varnames[: code.co_argcount]:
        return False
    names = {item.id for item in ast.walk(node.body) if isinstance(item, ast.Name)}
    if not set(code.co_freevars) <= names:
        return False
    places = _places(code)
    body = node.body
    return not places or (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset) in places


def _places(code: types.CodeType) -> set[tuple[int | None, ...]]:
    """Source ranges of the instructions, where Python keeps them (3.11 and later)."""
    positions = getattr(code, "co_positions", None)
    return {place for place in positions() if None not in place} if positions else set()


def _nested_code(code: types.CodeType, name: str) -> types.CodeType:
    return next(value for value in code.co_consts if isinstance(value, types.CodeType) and value.co_name == name)


def _write(name: str, source: str) -> Path:
    """The source as a real file: MindSpore logs an error for each code location whose file does not exist."""
    if not _FOLDER:
        _FOLDER.append(Path(tempfile.mkdtemp(prefix="msds_graphs_")))
        atexit.register(shutil.rmtree, _FOLDER[0], ignore_errors=True)
    path = _FOLDER[0] / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return path
