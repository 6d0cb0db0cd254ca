"""Array specs and their initialisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.errors import GraphError
from msds_graphs.specs import ArraySpec, init_tree, round_to_bfloat16
from msds_graphs.trees import tree_map


def test_sizes_and_bytes() -> None:
    spec = ArraySpec((3, 4), "bfloat16", ("vocab", None))
    assert (spec.size, spec.nbytes, spec.symbols) == (12, 24, ())
    assert ArraySpec((), "float32").nbytes == 4
    assert ArraySpec((256, 2), "float8_e4m3fn").nbytes == 512
    assert hash(spec) == hash(ArraySpec((3, 4), "bfloat16", ("vocab", None)))


def test_symbolic_dims_resolve_to_sizes() -> None:
    spec = ArraySpec(("S", 3, "Q", "S"), "int32")
    assert spec.symbols == ("S", "Q")
    assert spec.resolve({"S": 2, "Q": 5}).shape == (2, 3, 5, 2)
    with pytest.raises(GraphError, match=r"symbolic dims \('S', 'Q'\)"):
        _ = spec.nbytes
    with pytest.raises(GraphError, match=r"dims \['Q'\]"):
        spec.resolve({"S": 2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, -1), "int32"), "dimension -1"),
        (((2.0,), "int32"), "dimension 2.0"),
        (((True,), "int32"), "dimension True"),
        (((2,), "float"), "dtype 'float' is unknown"),
        (((2,), "int32", ("a", "b")), "axes"),
        (((2,), "float32", (), "gauss"), "init 'gauss'"),
        (((2,), "float32", (), ("normal", -1.0)), "init"),
        (((2,), "float32", (), ("normal", float("nan"))), "init"),
    ],
)
def test_nonsense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        ArraySpec(*arguments)


def test_initialisation_follows_the_spec() -> None:
    tree = {
        "z": ArraySpec((4,), "int32"),
        "o": ArraySpec((2, 2), "float8_e4m3fn", init="ones"),
        "n": ArraySpec((400, 50), "float32", init=("normal", 0.02)),
        "u": ArraySpec((20000,), "float16", init=("uniform", 0.5)),
        "b": ArraySpec((1000,), "bfloat16", init=("normal", 1.0)),
    }
    arrays = init_tree(tree, seed=1)
    assert not arrays["z"].any()
    assert arrays["z"].dtype == np.int32
    assert (arrays["o"] == 1).all()
    assert abs(arrays["n"].std() - 0.02) < 0.0005
    assert abs(arrays["n"].mean()) < 0.0005
    assert arrays["u"].dtype == np.float16
    assert -0.5 <= arrays["u"].min() < -0.49 < 0.49 < arrays["u"].max() <= 0.5
    assert arrays["b"].dtype == np.float32
    assert not (arrays["b"].view(np.uint32) & 0xFFFF).any()


def test_a_leaf_does_not_depend_on_its_neighbours() -> None:
    spec = ArraySpec((8,), "float32", init=("normal", 1.0))
    alone = init_tree({"a": {"w": spec}}, seed=3)["a"]["w"]
    among = init_tree({"c": spec, "a": {"v": spec, "w": spec}}, seed=3)
    assert np.array_equal(alone, among["a"]["w"])
    assert not np.array_equal(among["a"]["v"], among["a"]["w"])
    assert not np.array_equal(alone, init_tree({"a": {"w": spec}}, seed=4)["a"]["w"])


def test_what_cannot_be_drawn_is_refused() -> None:
    for spec in (ArraySpec((2,), "int32", init=("normal", 1.0)), ArraySpec((2,), "float8_e5m2", init=("uniform", 1))):
        with pytest.raises(GraphError, match=r"'w': init .* needs a floating dtype"):
            init_tree({"w": spec}, 0)
    with pytest.raises(GraphError, match="'w' has symbolic dims"):
        init_tree({"w": ArraySpec(("S",), "int32")}, 0)
    with pytest.raises(GraphError, match="'w' is a int"):
        init_tree({"w": 3}, 0)


@given(st.integers(0, 2**32 - 1))
def test_bfloat16_rounding_is_to_nearest_even(bits: int) -> None:
    exact = np.array(bits, np.uint32).view(np.float32)
    below, middle = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x8000
    wanted = below if bits < middle or (bits == middle and not (below >> 16) & 1) else below + 0x10000
    rounded = round_to_bfloat16(exact)
    assert rounded.shape == ()
    assert np.isnan(rounded) if np.isnan(exact) else int(rounded.view(np.uint32)) == wanted


def test_bfloat16_rounding_keeps_nan() -> None:
    # the largest NaN payload would overflow into -0.0 by rounding its bits
    assert np.isnan(round_to_bfloat16(np.array([np.nan, np.uint32(0xFFFFFFFF).view(np.float32)], np.float32))).all()


def test_a_spec_is_a_leaf() -> None:
    assert tree_map(lambda spec: spec.nbytes, {"a": (ArraySpec((2,), "int8"),)}) == {"a": (2,)}
