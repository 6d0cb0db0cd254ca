"""What compile hides from graph mode, and what it refuses: each with a message that says what to do."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from msds_graphs.compile import compile
from msds_graphs.errors import GraphError
from msds_graphs.plan import Plan

X = {"x": np.array([[1, 2], [3, 4]], np.float32)}


def run(fn: Any, **options: Any) -> Any:
    """The outputs of `fn` on X with the weight w = 2."""
    return compile(fn, **{"bound": {"w": np.array(2, np.float32)}, "batch": X, **options})(X)


@dataclass(frozen=True)
class Config:
    scale: float = 3.0
    names: tuple[str, ...] = ("a", "b")

    @property
    def twice(self) -> float:
        return self.scale * 2


def with_statics(bound: Any, donated: Any, batch: Any, *, config: Config, plan: Plan) -> Any:
    y = batch["x"] * bound["w"] * config.scale
    if plan.implementation("add") == "cpu":
        y = y + config.twice + len(config.names)
    return y, donated


def test_a_partial_of_statics() -> None:
    partial = functools.partial(with_statics, config=Config(), plan=Plan({"add": "cpu"}))
    assert run(partial).tolist() == (X["x"] * 6 + 8).tolist()
    assert run(functools.partial(partial, plan=Plan())).tolist() == (X["x"] * 6).tolist()


def first_argument(scale: float, bound: Any, donated: Any, batch: Any) -> Any:
    return batch["x"] * scale, donated


def test_partials_of_positional_arguments_and_of_lambdas() -> None:
    assert run(functools.partial(first_argument, 5.0)).tolist() == (X["x"] * 5).tolist()
    partial = functools.partial(lambda scale, p, c, b: (b["x"] * scale, c), 7.0)
    assert run(partial).tolist() == (X["x"] * 7).tolist()


def test_lambdas_keep_their_closure_globals_and_defaults() -> None:
    scale = 4.0
    assert run(lambda p, c, b: (ops.relu(b["x"]) * scale * p["w"], ())).tolist() == (X["x"] * 8).tolist()
    assert run(lambda p, c, b, k=3.0: (b["x"] * k, c)).tolist() == (X["x"] * 3).tolist()
    many = (lambda p, c, b: (b["x"] + 1, c), lambda p, c, b: (b["x"] + 2, c))
    assert [run(fn)[0, 0] for fn in many] == [2, 3]


doubled_global = functools.partial(lambda scale, value: value * scale, 2.0)


def calls_a_global_partial(bound: Any, donated: Any, batch: Any) -> Any:
    def inner(value: Any) -> Any:
        return doubled_global(value)

    return inner(batch["x"]), donated


def test_partials_and_lambdas_that_are_only_called() -> None:
    assert run(calls_a_global_partial).tolist() == (X["x"] * 2).tolist()
    add = lambda value: value + 10  # noqa: E731 - the point of the test

    def outer(bound: Any, donated: Any, batch: Any) -> Any:
        return add(batch["x"]), donated

    assert run(outer).tolist() == (X["x"] + 10).tolist()


def tenfold(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        return fn(*args) * 10

    return wrapper


@tenfold
def decorated_helper(value: Any) -> Any:
    return value + 1


def power(value: Any, times: int) -> Any:
    return value if times == 0 else power(value, times - 1) * decorated_helper(value)


def calls_decorated(bound: Any, donated: Any, batch: Any) -> Any:
    return power(batch["x"], 2), donated


def test_decorated_functions_run_decorated() -> None:
    """MindSpore follows __wrapped__ and would compile the undecorated function without a word."""
    x = X["x"]
    assert run(calls_decorated).tolist() == (x * ((x + 1) * 10) ** 2).tolist()
    straight = ms.jit(lambda_free)(ms.Tensor(x))
    assert straight.asnumpy().tolist() == (x + 1).tolist(), "MindSpore has mended this: simplify functions.py"


def lambda_free(value: Any) -> Any:
    return decorated_helper(value)


class Model:
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def step(self, bound: Any, donated: Any, batch: Any) -> Any:
        return batch["x"] * self.scale, donated

    def __call__(self, bound: Any, donated: Any, batch: Any) -> Any:
        return batch["x"] + self.scale, donated


def test_methods_and_callables_without_arrays() -> None:
    assert run(Model(3.0).step).tolist() == (X["x"] * 3).tolist()
    assert run(Model(3.0)).tolist() == (X["x"] + 3).tolist()


def plain(bound: Any, donated: Any, batch: Any) -> Any:
    return batch["x"] * bound["w"], donated


def test_a_function_that_is_already_jit_compiled() -> None:
    assert run(ms.jit(plain)).tolist() == (X["x"] * 2).tolist()


TENSOR = ms.Tensor(np.ones(2, np.float32))
TABLE = {"deep": (np.ones(2, np.float32),)}


def closes_over_tensor(bound: Any, donated: Any, batch: Any) -> Any:
    return batch["x"] + TENSOR, donated


def calls_the_closer(bound: Any, donated: Any, batch: Any) -> Any:
    return closes_over_tensor(bound, donated, batch)


def closes_over_table(bound: Any, donated: Any, batch: Any) -> Any:
    def inner(value: Any) -> Any:
        return value + TABLE["deep"][0]

    return inner(batch["x"]), donated


def closure_over_array() -> Callable[..., Any]:
    array = np.ones(2, np.float32)

    def fn(bound: Any, donated: Any, batch: Any) -> Any:
        return batch["x"] + array, donated

    return fn


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            closes_over_tensor,
            r"closes_over_tensor closes over 'TENSOR', a Tensor of shape \(2,\), .* pass it in `bound`",
        ),
        (calls_the_closer, "closes_over_tensor closes over 'TENSOR'"),
        (closes_over_table, r"closes over 'TABLE\.deep\.0', a ndarray"),
        (closure_over_array(), "closes over 'array', a ndarray"),
        (Model(np.ones(2, np.float32)).step, r"closes over 'fn\.scale', a ndarray"),
        (Model(TENSOR), r"closes over 'fn\.scale', a Tensor"),
        (functools.partial(first_argument, TENSOR), "closes over 'fn argument 0', a Tensor"),
        (functools.partial(with_statics, config=TABLE), r"closes over 'fn argument config\.deep\.0'"),
    ],
)
def test_closed_over_arrays_are_refused(fn: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        run(fn)


class Out(NamedTuple):
    y: Any


def returns_named_tuple(bound: Any, donated: Any, batch: Any) -> Any:
    return Out(batch["x"]), donated


def test_named_tuples_are_refused_with_the_remedy() -> None:
    with pytest.raises(GraphError, match=r"named tuple class Out .*: use a dict"):
        run(returns_named_tuple)
    with pytest.raises(GraphError, match=r"batch at 'o' is the named tuple Out, .* use a dict with keys \['y'\]"):
        compile(plain, bound=(), batch={"o": Out(X["x"])})
    with pytest.raises(GraphError, match="bound at the root is the named tuple Out"):
        compile(plain, bound=Out(X["x"]), batch=X)
    with pytest.raises(GraphError, match="donated at '0' is the named tuple Out"):
        compile(plain, bound=(), donated=(Out(X["x"]),), batch=X)


def from_exec(module: str) -> Any:
    namespace: dict[str, Any] = {"__name__": module}
    exec("def made(p, c, b): return b['x'], c\nshort = lambda p, c, b: (b['x'], c)", namespace)
    return namespace


def test_functions_without_source_are_refused() -> None:
    for fn in (max, np.add, dict, 3):
        with pytest.raises(GraphError, match="no Python source to compile: wrap it in a function with def"):
            compile(fn, bound=(), batch=X)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"made has no source \(made by exec, or typed into a shell\)"):
        run(from_exec(__name__)["made"])
    with pytest.raises(GraphError, match="has no source file"):
        run(from_exec(__name__)["short"])
    stray = types.FunctionType(plain.__code__, {"__name__": "elsewhere"}, "plain")
    with pytest.raises(GraphError, match=r"its module 'elsewhere' is not the one in sys\.modules"):
        run(stray)
    with pytest.raises(GraphError, match="is a Cell with Parameters of its own"):
        run(nn.ReLU())


def one_value(bound: Any, donated: Any, batch: Any) -> Any:
    return {"x": batch["x"]}


def three_values(bound: Any, donated: Any, batch: Any) -> Any:
    return batch["x"], batch["x"], donated


def returns_none(bound: Any, donated: Any, batch: Any) -> Any:
    return {"x": None}, donated


def returns_number(bound: Any, donated: Any, batch: Any) -> Any:
    return {"n": (batch["x"], 3)}, donated


def returns_float64(bound: Any, donated: Any, batch: Any) -> Any:
    return {"x": batch["x"].astype(ms.float64)}, donated


def misspells(bound: Any, donated: Any, batch: Any) -> Any:
    return batch["y"], donated


def multiplies_wrongly(bound: Any, donated: Any, batch: Any) -> Any:
    return ops.matmul(batch["x"], ops.ones((7, 3))), donated


def undefined(bound: Any, donated: Any, batch: Any) -> Any:
    return no_such_name(batch["x"]), donated  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (one_value, "the function returned one value: return .outputs, donated."),
        (three_values, "the function returned 3 values"),
        (returns_none, "output 'x' is no tensor"),
        (returns_number, r"output 'n\.1' is no tensor"),
        (returns_float64, "output 'x' is float64"),
        (misspells, r"key y does not exist .*test_functions\.py:\d+"),
        (multiplies_wrongly, r"must be equal to shape2\[-2\], but got 2 and 7.*test_functions\.py:\d+"),
        (undefined, "The name 'no_such_name' is not defined"),
    ],
)
def test_what_goes_wrong_while_compiling_is_one_line(fn: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message) as refused:
        run(fn)
    text = str(refused.value)
    assert text.startswith(f"compiling {fn.__name__} [static]: ")
    assert "\n" not in text
    assert refused.value.__cause__ is not None
