"""Bound and donated trees: sharing, writing in place or by copy, assignment, memory."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import ops

from msds_graphs.binding import assign, bind
from msds_graphs.compile import compile
from msds_graphs.counter import count_compiles
from msds_graphs.errors import GraphError
from msds_graphs.specs import ArraySpec, init_tree
from msds_graphs.trees import tree_map

BATCH = {"slots": np.array([[1], [2]], np.int32), "rows": np.full((2, 3), 5, np.float32)}


def cache() -> dict[str, Any]:
    return {"layers": (np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32))}


def write_in_place(bound: Any, donated: Any, batch: Any) -> Any:
    new = ()
    total = bound["scale"]
    for table in donated["layers"]:
        written = ops.scatter_nd_update(table, batch["slots"], batch["rows"] * bound["scale"])
        total = total + written.sum()
        new = new + (written,)  # noqa: RUF005 - graph mode
    return {"total": total}, {"layers": new}


def write_a_copy(bound: Any, donated: Any, batch: Any) -> Any:
    new = ()
    total = bound["scale"]
    hit = (ops.arange(4)[:, None] == batch["slots"][:, 0][None, :]).any(-1)
    for table in donated["layers"]:
        written = ops.where(hit[:, None], batch["rows"][0] * bound["scale"], table)
        total = total + written.sum()
        new = new + (written,)  # noqa: RUF005
    return {"total": total}, {"layers": new}


def read(bound: Any, donated: Any, batch: Any) -> Any:
    return {"sum": donated["layers"][1].sum(-1)[batch["slots"][:, 0]] * bound["scale"]}, donated


SCALE = {"scale": np.array(2, np.float32)}


@pytest.mark.parametrize(("fn", "in_place"), [(write_in_place, True), (write_in_place, False), (write_a_copy, False)])
def test_writers_in_place_and_by_copy_agree(fn: Any, in_place: bool) -> None:
    compiled = compile(fn, bound=SCALE, donated=cache(), batch=BATCH, in_place=in_place)
    assert float(compiled(BATCH)["total"]) == 2 + 2 * 2 * 3 * 10
    assert float(compiled({**BATCH, "slots": np.array([[0], [1]], np.int32)})["total"]) == 2 + 2 * 3 * 3 * 10
    for table in compiled.donated["layers"]:
        assert table.asnumpy().tolist() == [[10.0] * 3] * 3 + [[0.0] * 3]


def test_the_promise_to_write_in_place_is_checked() -> None:
    kept = compile(write_in_place, bound=SCALE, donated=cache(), batch=BATCH, in_place=True)
    kept.check_in_place(BATCH)
    broken = compile(write_a_copy, bound=SCALE, donated=cache(), batch=BATCH, in_place=True)
    with pytest.raises(GraphError, match=r"donated 'layers\.0' with values that its Parameter does not have"):
        broken.check_in_place(BATCH)
    assert not broken.donated["layers"][0].asnumpy().any()
    with pytest.raises(GraphError, match="no promise"):
        compile(write_a_copy, bound=SCALE, donated=cache(), batch=BATCH).check_in_place(BATCH)


def test_two_steps_share_weights_and_cache() -> None:
    weights, tables = bind(SCALE, "shared.weights"), bind(cache(), "shared.cache")
    writer = compile(write_in_place, bound=weights, donated=tables, batch=BATCH, in_place=True)
    reader = compile(read, bound=weights, donated=tables, batch={"slots": BATCH["slots"]}, in_place=True)
    copier = compile(write_a_copy, bound=weights, donated=tables, batch=BATCH)
    assert writer.bound["scale"] is reader.bound["scale"]
    slots = {"slots": np.array([[1], [3]], np.int32)}
    assert reader(slots)["sum"].tolist() == [0, 0]
    writer(BATCH)
    assert reader(slots)["sum"].tolist() == [60, 0]
    copier({**BATCH, "slots": np.array([[3], [3]], np.int32)})
    assert reader(slots)["sum"].tolist() == [60, 60]
    with count_compiles() as seen:
        assign(weights, {"scale": np.array(10, np.float32)})
        assert reader(slots)["sum"].tolist() == [300, 300]
        writer(BATCH)
        assert reader(slots)["sum"].tolist() == [1500, 300]
    assert seen.count == 0


def swap(bound: Any, donated: Any, batch: Any) -> Any:
    return {"was": donated["a"], "both": donated["a"] + donated["b"]}, {"b": donated["a"], "a": donated["b"]}


def test_copying_means_values_not_names() -> None:
    """The new tree may hold old Parameters in other places, and outputs show the old values."""
    batch = {"x": np.zeros(1, np.float32)}
    compiled = compile(
        swap, bound=(), donated={"a": np.full(2, 1, np.float32), "b": np.full(2, 2, np.float32)}, batch=batch
    )
    outputs = compiled(batch)
    assert outputs["was"].tolist() == [1, 1]
    assert compiled.donated["a"].asnumpy().tolist() == [2, 2]
    assert compiled.donated["b"].asnumpy().tolist() == [1, 1]
    compiled(batch)
    assert compiled.donated["a"].asnumpy().tolist() == [1, 1]
    assert outputs["was"].tolist() == [1, 1]


def reorder(bound: Any, donated: Any, batch: Any) -> Any:
    first, second = donated["pair"]
    return batch["x"], {"last": donated["last"] + 10, "pair": [first + 20, second + 30]}


def test_returned_leaves_are_matched_by_key() -> None:
    batch = {"x": np.zeros(1, np.float32)}
    start = {"pair": (np.array(1, np.float32), np.array(2, np.float32)), "last": np.array(3, np.float32)}
    compiled = compile(reorder, bound=(), donated=start, batch=batch)
    compiled(batch)
    assert tree_map(lambda leaf: float(leaf.asnumpy()), compiled.donated) == {"pair": (21, 32), "last": 13}


def grow(bound: Any, donated: Any, batch: Any) -> Any:
    return {"x": batch["x"]}, {"n": donated["n"] + batch["x"]}


def rename(bound: Any, donated: Any, batch: Any) -> Any:
    return {"x": batch["x"]}, {"m": donated["n"]}


def widen(bound: Any, donated: Any, batch: Any) -> Any:
    return {"x": batch["x"]}, {"n": donated["n"][None]}


def constant(bound: Any, donated: Any, batch: Any) -> Any:
    return {"x": batch["x"]}, {"n": 3}


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (grow, r"the returned donated tree at 'n' is float32 \(2,\), donated as int32 \(2,\)"),
        (widen, r"the returned donated tree at 'n' is int32 \(1, 2\), donated as int32 \(2,\)"),
        (rename, r"the returned donated tree: lacks \['n'\] and has unknown \['m'\]"),
        (constant, "the returned donated tree at 'n' is no tensor"),
    ],
)
def test_a_donated_tree_that_changes_is_refused_before_it_is_written(fn: Any, message: str) -> None:
    batch = {"x": np.ones(2, np.float32)}
    compiled = compile(fn, bound=(), donated={"n": np.full(2, 7, np.int32)}, batch=batch)
    with pytest.raises(GraphError, match=message):
        compiled(batch)
    assert compiled.donated["n"].asnumpy().tolist() == [7, 7]


def test_assign_validates_everything_before_it_writes() -> None:
    tree = bind({"a": np.zeros(2, np.float32), "b": (np.zeros((2, 2), np.int32),)}, "assigned")
    good = {"b": (np.ones((2, 2), np.int32),), "a": np.ones(2, np.float32)}
    for change, message in (
        ({"b": (np.ones((2, 3), np.int32),)}, r"value at 'b.0' has shape \(2, 3\), bound \(2, 2\)"),
        ({"b": (np.ones((2, 2), np.int64),)}, "value at 'b.0' has dtype int64, bound int32"),
        ({"b": ([1, 2],)}, "assigned tree at 'b.0': expected a leaf"),
        ({"b": (3,)}, "value at 'b.0' is a int"),
        ({"c": np.ones(2, np.float32)}, r"assigned tree: has unknown \['c'\]"),
    ):
        with pytest.raises(GraphError, match=message):
            assign(tree, {**good, **change})
        assert not tree["a"].asnumpy().any()
    assign(tree, good)
    assert tree["a"].asnumpy().tolist() == [1, 1]
    assert tree["b"][0].asnumpy().tolist() == [[1, 1], [1, 1]]
    with pytest.raises(GraphError, match="'a' is a ndarray, not a Parameter"):
        assign({"a": np.zeros(1, np.float32)}, {"a": np.zeros(1, np.float32)})


def test_an_assigned_array_may_be_reused_at_once() -> None:
    """Operations run behind the call that asks for them, and read a NumPy value where it lies."""
    tree = bind(tuple(np.zeros((512, 1024), np.float32) for _ in range(8)), "reused")
    value = np.ones((512, 1024), np.float32)
    assign(tree, (value,) * 8)
    value[:] = 3
    assert all((leaf.asnumpy() == 1).all() for leaf in tree)


def test_binding_takes_memory_over_where_it_may() -> None:
    mine = np.zeros((3, 2), np.float32)
    readonly = np.ones(4, np.float32)
    readonly.flags.writeable = False
    columns = np.ones((4, 4), np.float32)[:, :2]
    tree = bind({"mine": mine, "readonly": readonly, "columns": columns}, "memory")
    mine[0] = 9
    assert tree["mine"].asnumpy()[0].tolist() == [9, 9]
    assert tree["mine"].name == "memory.mine"
    assign(tree, {"mine": mine + 1, "readonly": np.zeros(4, np.float32), "columns": np.zeros((4, 2), np.float32)})
    assert mine[0].tolist() == [10, 10]
    assert readonly.tolist() == [1, 1, 1, 1]
    assert columns.all()
    assert tree["columns"].asnumpy().shape == (4, 2)


def test_specs_are_initialised_and_decide_the_dtype() -> None:
    spec = {"w": (ArraySpec((4, 2), "float32", init=("normal", 1.0)),), "n": ArraySpec((), "int32")}
    tree = bind(spec, "specs")
    assert np.array_equal(tree["w"][0].asnumpy(), init_tree(spec, 0)["w"][0])
    assert tree["n"].asnumpy() == 0
    halves = bind({"w": np.array([1.00390625, 3], np.float32)}, "half", {"w": ArraySpec((2,), "bfloat16")})
    assert halves["w"].dtype == ms.bfloat16
    assert bind(halves, "other")["w"] is halves["w"]
    with pytest.raises(GraphError, match=r"wrong at 'w' has shape \(2,\), its spec \(3,\)"):
        bind({"w": np.zeros(2, np.float32)}, "wrong", {"w": ArraySpec((3,), "float32")})
    with pytest.raises(GraphError, match=r"'wrong\.w' is float32 and cannot be stored as int32"):
        bind({"w": np.zeros(2, np.float32)}, "wrong", {"w": ArraySpec((2,), "int32")})
    with pytest.raises(GraphError, match="is bound as bfloat16, its spec says float32"):
        bind(halves, "wrong", {"w": ArraySpec((2,), "float32")})
    with pytest.raises(GraphError, match="bfloat16, which MindSpore cannot assign on the CPU"):
        assign(halves, {"w": np.zeros(2, np.float32)})


def scale_bf16(bound: Any, donated: Any, batch: Any) -> Any:
    return batch["x"] * bound["w"].astype(ms.float32), donated


def test_a_bfloat16_weight_reaches_the_graph() -> None:
    halves = bind({"w": np.array([1.00390625, 3], np.float32)}, "bf16", {"w": ArraySpec((2,), "bfloat16")})
    batch = {"x": np.array([2, 2], np.float32)}
    assert compile(scale_bf16, bound=halves, batch=batch)(batch).tolist() == [2, 6]  # 1.0039 rounds to 1


def test_one_graph_holds_each_parameter_once() -> None:
    batch = {"x": np.zeros(1, np.float32)}
    one, two = bind({"a": np.zeros(1, np.float32)}, "clash"), bind({"a": np.zeros(1, np.float32)}, "clash")
    with pytest.raises(GraphError, match=r"two Parameters are named 'clash\.a'"):
        compile(swap, bound=one, donated=two, batch=batch)
    with pytest.raises(GraphError, match="appears twice in the donated tree"):
        compile(swap, bound=(), donated={"a": one["a"], "b": one["a"]}, batch=batch)
