"""compile on a model that is not ours: buckets, padding, what is compiled when, failures, chaining."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import ops

from msds_graphs.compile import Compiled, compile
from msds_graphs.counter import count_compiles
from msds_graphs.errors import GraphError, UnplannedShapeError
from msds_graphs.specs import ArraySpec
from tests.graphs import small


def make(**changes: Any) -> Compiled:
    options: dict[str, Any] = {
        "bound": small.weights(),
        "donated": small.state(),
        "batch": small.BATCH,
        "buckets": small.BUCKETS,
        "outputs": small.OUTPUTS,
        "pad": {"x": np.nan, "lens": 1},  # NaN, so that padding that leaks is seen
    }
    return compile(small.pool, **{**options, **changes})


@pytest.fixture(scope="module")
def ready() -> Compiled:
    compiled = make(pad=0)
    compiled.warm_up(None)
    return compiled


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 5))
def test_every_planned_shape_agrees_with_numpy_and_compiles_nothing(
    ready: Compiled, sequences: int, queries: int, seed: int
) -> None:
    batch = small.batch_of(sequences, queries, seed)
    before = int(ready.donated["calls"].asnumpy())
    with count_compiles() as seen:
        outputs = ready(batch)
    assert seen.count == 0
    wanted = small.pool_numpy(small.weights(), batch["x"], batch["lens"][0])
    np.testing.assert_allclose(outputs["pooled"], wanted, rtol=1e-5, atol=1e-6)
    scores = outputs["details"][0]["scores"]
    assert scores.shape == (sequences, queries)
    np.testing.assert_allclose(scores.sum(-1), 1, rtol=1e-5)
    assert int(ready.donated["calls"].asnumpy()) == before + 1


def test_warm_up_compiles_each_bucket_once_and_prints_a_table() -> None:
    compiled = make(pad={"x": 0, "lens": 1})
    lines: list[str] = []
    with count_compiles() as seen:
        rows = compiled.warm_up(lines.append)
    assert seen.count == len(rows) == len(small.BUCKETS)
    assert compiled.compiled_buckets == compiled.buckets
    assert [dict(row.bucket) for row in rows] == small.BUCKETS
    assert all(row.seconds > 0 for row in rows)
    assert rows[0].waste == pytest.approx(1 - 1 / 8)
    assert "bucket" in lines[0]
    assert "S=2 Q=4" in lines[1]
    assert "88%" in lines[1]
    with count_compiles() as seen:
        compiled.warm_up(None)
        compiled(small.batch_of(1, 3))
        compiled(small.batch_of(4, 8))
    assert seen.count == 0
    assert compiled.rebuilds == 0


def test_warm_up_leaves_the_state_as_it_was() -> None:
    compiled = make(pad={"x": 0, "lens": 1})
    compiled.warm_up(None)
    assert int(compiled.donated["calls"].asnumpy()) == 0
    compiled(small.batch_of(2, 4))
    compiled.rebuild({"S": 2, "Q": 4})
    assert int(compiled.donated["calls"].asnumpy()) == 1


def test_nothing_is_compiled_before_the_first_call_of_a_bucket() -> None:
    with count_compiles() as seen:
        compiled = make(pad={"x": 0, "lens": 1})
        assert seen.count == 0
        compiled(small.batch_of(2, 2))
        assert seen.count == 1
        compiled(small.batch_of(1, 4))
    assert seen.count == 1
    assert [dict(bucket) for bucket in compiled.compiled_buckets] == [small.BUCKETS[0]]


def test_an_unplanned_shape_is_refused_before_anything_runs(ready: Compiled) -> None:
    before = int(ready.donated["calls"].asnumpy())
    with count_compiles() as seen, pytest.raises(UnplannedShapeError, match="S=5 exceeds the largest 4") as refused:
        ready(small.batch_of(5, 8))
    assert seen.count == 0
    assert refused.value.nearest[0] == {"S": 4, "Q": 8}
    with pytest.raises(GraphError, match="'x' has dtype float64, declared float32"):
        ready({"x": np.zeros((2, 2, 3)), "lens": (np.ones(2, np.int32),)})
    with pytest.raises(GraphError, match="is not planned"):
        ready.rebuild({"S": 3, "Q": 3})
    assert int(ready.donated["calls"].asnumpy()) == before


def test_padding_values_reach_the_graph_and_the_cut_removes_them() -> None:
    compiled = compile(
        double, bound=(), batch={"x": ArraySpec(("N",), "float32")}, buckets=[{"N": 4}], outputs=(("N",), ()), pad=7
    )
    doubled, total = compile_call(compiled, np.array([1, 2], np.float32))
    assert doubled.tolist() == [2, 4]
    assert float(total) == 1 + 2 + 7 + 7


def double(bound: Any, donated: Any, batch: Any) -> Any:
    return (batch["x"] * 2, batch["x"].sum()), donated


def compile_call(compiled: Compiled, x: Any) -> Any:
    return compiled({"x": x})


def test_the_graphs_own_tensors_feed_another_step() -> None:
    spec = {"x": ArraySpec(("N",), "float32")}
    compiled = compile(double, bound=(), batch=spec, buckets=[{"N": 4}], outputs=(("N",), ()))
    (doubled, _), bucket = compiled.tensors({"x": np.array([1, 2, 3], np.float32)})
    assert isinstance(doubled, ms.Tensor)
    assert (tuple(doubled.shape), dict(bucket)) == ((4,), {"N": 4})
    with count_compiles() as seen:
        assert compile_call(compiled, doubled)[0].tolist() == [4, 8, 12, 0]
        assert compile_call(compiled, doubled[:2])[0].tolist() == [4, 8]
    assert seen.count <= 1  # the slice made here may cost one of its own; the step costs none
    parameter = ms.Parameter(np.zeros(4, np.float32), name="stray")
    with pytest.raises(GraphError, match="batch at 'x' is a Parameter"):
        compile_call(compiled, parameter)


def kinds(bound: Any, donated: Any, batch: Any) -> Any:
    x = batch["x"]
    outputs = {
        "bool": x > 0,
        "int64": ops.argmax(x),
        "half": x.astype(ms.float16),
        "bf16": x.astype(ms.bfloat16),
        "same": x,
        "weight": bound["w"],
        "empty": {},
        "list": [x + 1],
    }
    return outputs, donated


def test_outputs_of_every_kind_come_back_as_numpy() -> None:
    compiled = compile(kinds, bound={"w": np.ones(2, np.float32)}, batch={"x": np.zeros(3, np.float32)})
    outputs = compiled({"x": np.array([-1, 3, 1], np.float32)})
    assert {key: value.dtype.name for key, value in outputs.items() if isinstance(value, np.ndarray)} == {
        "bool": "bool",
        "int64": "int64",
        "half": "float16",
        "bf16": "float32",
        "same": "float32",
        "weight": "float32",
    }
    assert outputs["bool"].tolist() == [False, True, True]
    assert outputs["int64"] == 1
    assert outputs["bf16"].tolist() == [-1, 3, 1]
    assert outputs["empty"] == {}
    assert outputs["list"][0].tolist() == [0, 4, 2]


def test_buckets_and_outputs_are_needed_with_symbolic_dims() -> None:
    with pytest.raises(GraphError, match=r"symbolic dims \['S', 'Q'\]: give buckets"):
        make(buckets=None)
    with pytest.raises(GraphError, match="name the axes of the outputs"):
        make(outputs=None)
    with pytest.raises(GraphError, match=r"bucket .* names"):
        make(buckets=[{"S": 1}])
    with pytest.raises(GraphError, match="the batch has no leaves"):
        compile(double, bound=(), batch={})


def test_a_wrong_output_axis_is_found_when_compiling() -> None:
    compiled = make(outputs={"pooled": ("Q",), "details": ()})
    with pytest.raises(GraphError, match=r"compiling pool \[S=2 Q=4\]: outputs at 'pooled': axis 0 is declared 'Q'"):
        compiled(small.batch_of(2, 4))


def too_deep(bound: Any, donated: Any, batch: Any) -> Any:
    return batch["x"], donated


def test_trees_deeper_than_mindspore_nests_are_refused() -> None:
    tree: Any = np.zeros(1, np.float32)
    for _ in range(6):
        tree = {"k": tree}
    batch = {"x": np.zeros(1, np.float32)}
    assert compile(too_deep, bound=tree, batch=batch)(batch) == 0
    with pytest.raises(GraphError, match="bound is a tree of 7 levels, graph mode takes 6"):
        compile(too_deep, bound=(tree,), batch=batch)
    with pytest.raises(GraphError, match="donated is a tree of 6 levels, graph mode takes 5"):
        compile(too_deep, bound=(), donated=tree, batch=batch)


def gather_rows(bound: Any, donated: Any, batch: Any) -> Any:
    table = ops.scatter_nd_update(donated["table"], batch["slots"], batch["rows"])
    return {"rows": batch["rows"] * 2}, {"table": table}


@pytest.mark.parametrize("with_outputs", [True, False])
def test_a_failing_run_does_not_harm_the_next_call(with_outputs: bool) -> None:
    batch = {"slots": np.array([[1], [2]], np.int32), "rows": np.ones((2, 3), np.float32)}
    compiled = compile(
        gather_rows if with_outputs else scatter_only,
        bound=(),
        donated={"table": np.zeros((4, 3), np.float32)},
        batch=batch,
        in_place=True,
    )
    compiled(batch)
    with pytest.raises(GraphError, match=r"running .* out of range") as failed:
        compiled({**batch, "slots": np.array([[1], [9]], np.int32)})
    assert isinstance(failed.value.__cause__, (ValueError, RuntimeError))
    assert "\n" not in str(failed.value)
    assert compiled.compiled_buckets == ()
    with count_compiles() as seen:
        compiled(batch)
        compiled({**batch, "slots": np.array([[0], [3]], np.int32)})
    assert seen.count == compiled.rebuilds == 1
    assert compiled.donated["table"].asnumpy().tolist() == np.ones((4, 3)).tolist()


def count_up(bound: Any, donated: Any, batch: Any) -> Any:
    return {}, {"n": donated["n"] + batch["x"]}


def test_a_step_without_outputs_still_writes() -> None:
    batch = {"x": np.ones(2, np.float32)}
    compiled = compile(count_up, bound=(), donated={"n": np.zeros(2, np.float32)}, batch=batch)
    assert compiled(batch) == {}
    assert compiled(batch) == {}
    assert compiled.donated["n"].asnumpy().tolist() == [2, 2]


def scatter_only(bound: Any, donated: Any, batch: Any) -> Any:
    return {}, {"table": ops.scatter_nd_update(donated["table"], batch["slots"], batch["rows"])}


def test_rebuild_is_counted_apart() -> None:
    batch = {"x": np.ones(3, np.float32)}
    compiled = compile(double, bound=(), batch=batch)
    compiled(batch)
    with count_compiles() as seen:
        compiled.rebuild()
        compiled(batch)
    assert (seen.count, compiled.rebuilds) == (1, 1)
