"""The batch on the host: checks, measuring, padding, and cutting outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.batch import BatchLayout, check_axes, spread_axes, unpad
from msds_graphs.buckets import Bucket
from msds_graphs.errors import GraphError
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import tree_structure

SPECS = {
    "tokens": ArraySpec(("S", "Q"), "int32"),
    "tables": (ArraySpec(("S", 3), "int32"),),
    "scale": ArraySpec((), "float32"),
}


def batch(sequences: int = 2, queries: int = 4) -> dict[str, Any]:
    return {
        "tokens": np.arange(1, sequences * queries + 1, dtype=np.int32).reshape(sequences, queries),
        "tables": (np.ones((sequences, 3), np.int32),),
        "scale": np.array(2.5, np.float32),
    }


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3))
def test_padding_keeps_the_values_and_fills_the_rest(sequences: int, queries: int, more: int, longer: int) -> None:
    layout = BatchLayout(SPECS, {"tokens": -1, "tables": 7, "scale": 0})
    given_batch = batch(sequences, queries)
    leaves = layout.flatten(given_batch)
    dims = layout.measure(leaves)
    assert dims == {"S": sequences, "Q": queries}
    bucket = Bucket({"S": sequences + more, "Q": queries + longer})
    tokens, tables, scale = layout.pad(leaves, bucket)
    assert tokens.shape == (sequences + more, queries + longer)
    assert np.array_equal(unpad(tokens, ("S", "Q"), dims), given_batch["tokens"])
    assert (tokens == -1).sum() == tokens.size - sequences * queries
    assert (tables[sequences:] == 7).all()
    assert (tables.dtype, tables.shape, float(scale)) == (np.int32, (sequences + more, 3), 2.5)


def test_a_padded_buffer_is_never_the_callers() -> None:
    layout = BatchLayout(SPECS)
    leaves = layout.flatten(batch())
    for fits in (Bucket({"S": 2, "Q": 4}), Bucket({"S": 3, "Q": 4})):
        assert not any(np.shares_memory(*pair) for pair in zip(leaves, layout.pad(leaves, fits), strict=True))


def test_filler_has_the_buckets_shapes() -> None:
    layout = BatchLayout(SPECS, {"tokens": 9, "tables": 0, "scale": 1})
    tokens, tables, scale = layout.filler(Bucket({"S": 2, "Q": 3}))
    assert (tokens == 9).all()
    assert (tokens.shape, tables.shape, scale.shape, tables.any()) == ((2, 3), (2, 3), (), False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((2, 4), np.int64)}, "'tokens' has dtype int64, declared int32: cast it"),
        ({"tokens": np.zeros((2, 4), np.float32)}, "'tokens' has dtype float32, declared int32"),
        ({"tokens": np.zeros(4, np.int32)}, r"'tokens' has shape \(4,\), declared \('S', 'Q'\)"),
        ({"tables": (np.zeros((2, 4), np.int32),)}, r"'tables.0' has shape \(2, 4\), declared \('S', 3\)"),
        ({"tables": (np.zeros((5, 3), np.int32),)}, "'tables.0' has S=5, an earlier leaf S=2"),
        ({"tokens": [[1, 2]]}, "'tokens': expected a leaf, got a tuple of 1"),
        ({"scale": 2.5}, "'scale' is a float: pass a NumPy array of dtype float32"),
        ({"tokens": np.zeros((0, 4), np.int32), "tables": (np.zeros((0, 3), np.int32),)}, "S=0: nothing to run"),
        ({"more": np.zeros(3, np.int32)}, r"batch: has unknown \['more'\]"),
    ],
)
def test_a_batch_that_is_not_as_declared_is_refused(change: dict[str, Any], message: str) -> None:
    layout = BatchLayout(SPECS)
    with pytest.raises(GraphError, match=message):
        layout.measure(layout.flatten({**batch(), **change}))


def test_examples_declare_their_own_shape() -> None:
    layout = BatchLayout({"x": np.zeros((2, 3), np.float32)})
    assert layout.specs == [ArraySpec((2, 3), "float32")]
    for dtype in (np.float64, np.int64):
        with pytest.raises(GraphError, match=f"'x' is an example of dtype {np.dtype(dtype)}, NumPy's default"):
            BatchLayout({"x": np.zeros((2, 3), dtype)})
    assert BatchLayout({"x": ArraySpec((2,), "int64")}).specs[0].dtype == "int64"
    with pytest.raises(GraphError, match="'x' is a int"):
        BatchLayout({"x": 3})
    with pytest.raises(GraphError, match="'x' has dtype complex64"):
        BatchLayout({"x": np.zeros(2, np.complex64)})


def test_pad_values_must_fit() -> None:
    assert BatchLayout(SPECS, 5).filler(Bucket({"S": 1, "Q": 1}))[0][0, 0] == 5
    with pytest.raises(GraphError, match=r"pad value 0\.5 at 'tokens' does not fit dtype int32"):
        BatchLayout(SPECS, 0.5)
    with pytest.raises(GraphError, match="pad at the root"):
        BatchLayout(SPECS, {"tokens": 1})


def test_axes_are_a_prefix_of_the_outputs() -> None:
    structure = tree_structure({"logits": 0, "more": (0, {"x": 0})})
    assert spread_axes({"logits": ("S", None), "more": ("Q",)}, structure) == [("S", None), ("Q",), ("Q",)]
    assert spread_axes(None, structure) == [(), (), ()]
    assert spread_axes({"logits": None, "more": (("S",), {"x": ()})}, structure) == [(), ("S",), ()]
    with pytest.raises(GraphError, match=r"outputs at the root has a dict with keys \['logit'\]"):
        spread_axes({"logit": ("S",)}, structure)
    with pytest.raises(GraphError, match=r"outputs at 'logits' .* the tree has there a leaf"):
        spread_axes({"logits": {"x": ("S",)}, "more": None}, structure)


def test_output_axes_must_be_what_the_array_has() -> None:
    bucket = Bucket({"S": 4})
    check_axes([("S", None)], [(4, 9)], ["logits"], bucket)
    for axes, shape, message in (
        (("S",), (5,), "axis 0 is declared 'S', which is 4"),
        (("T",), (4,), "axis 'T' is no dim of the batch"),
        (("S", None), (4,), "axes .* for an array of shape"),
    ):
        with pytest.raises(GraphError, match=message):
            check_axes([axes], [shape], ["logits"], bucket)


def test_truth_values_pad_with_false_by_default() -> None:
    layout = BatchLayout({"mask": ArraySpec(("T",), "bool")})
    (padded,) = layout.pad([np.ones(2, bool)], Bucket({"T": 4}))
    np.testing.assert_array_equal(padded, [True, True, False, False])
    with pytest.raises(GraphError, match="pad value 2"):
        BatchLayout({"mask": ArraySpec(("T",), "bool")}, pad=2)
