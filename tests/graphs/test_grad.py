"""Gradients over trees, in one graph with the step that uses them, against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import ops

from msds_graphs.compile import compile
from msds_graphs.counter import count_compiles
from msds_graphs.errors import GraphError
from msds_graphs.grad import value_and_grad
from msds_graphs.specs import ArraySpec
from msds_graphs.steps import unflatten
from msds_graphs.trees import tree_flatten, tree_items, tree_map, tree_unflatten

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(5, 3)).astype(np.float32), "y": RNG.normal(size=(5, 2)).astype(np.float32)}


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "layers": (
            {"w": rng.normal(size=(3, 4)).astype(np.float32), "b": np.zeros(4, np.float32)},
            {"w": rng.normal(size=(4, 2)).astype(np.float32), "b": np.zeros(2, np.float32)},
        ),
        "unused": np.ones(2, np.float32),
    }


def loss(params: Any, donated: Any, batch: Any) -> Any:
    hidden = batch["x"]
    for layer in params["layers"]:
        hidden = ops.tanh(ops.matmul(hidden, layer["w"]) + layer["b"])
    return ((hidden - batch["y"]) ** 2).mean()


def loss_numpy(params: Any, x: Any, y: Any) -> float:
    hidden = x.astype(np.float64)
    for layer in params["layers"]:
        hidden = np.tanh(hidden @ layer["w"] + layer["b"])
    return float(((hidden - y) ** 2).mean())


def loss_with_aux(params: Any, donated: Any, batch: Any) -> Any:
    value = loss(params, donated, batch)
    return value, {"twice": (value * 2,)}


plain_grad = value_and_grad(loss)
aux_grad = value_and_grad(loss_with_aux, has_aux=True)
lambda_grad = value_and_grad(lambda params, batch: loss(params, (), batch) * 3)


def with_gradients(bound: Any, donated: Any, batch: Any) -> Any:
    value, grads = plain_grad(bound, donated, batch)
    return {"loss": value, "grads": grads}, donated


def with_aux(bound: Any, donated: Any, batch: Any) -> Any:
    (value, aux), grads = aux_grad(bound, donated, batch)
    return {"loss": value, "aux": aux, "grads": grads["layers"]}, donated


def of_a_lambda(bound: Any, donated: Any, batch: Any) -> Any:
    value, grads = lambda_grad(bound, batch)
    return {"loss": value, "grads": grads}, donated


def finite_differences(params: Any, step: float = 1e-6) -> dict[str, np.ndarray[Any, Any]]:
    """Central differences of loss_numpy for every element, in float64."""
    wide = tree_map(lambda leaf: leaf.astype(np.float64), params)
    result = {}
    for path, leaf in tree_items(wide):
        slopes = np.zeros_like(leaf)
        for index in np.ndindex(leaf.shape):
            old = leaf[index]
            leaf[index] = old + step
            above = loss_numpy(wide, **BATCH)
            leaf[index] = old - step
            slopes[index] = (above - loss_numpy(wide, **BATCH)) / (2 * step)
            leaf[index] = old
        result[path] = slopes
    return result


def test_gradients_agree_with_finite_differences() -> None:
    outputs = compile(with_gradients, bound=parameters(), batch=BATCH)(BATCH)
    assert outputs["loss"] == pytest.approx(loss_numpy(parameters(), **BATCH), rel=1e-5)
    wanted = finite_differences(parameters())
    got = dict(tree_items(outputs["grads"]))
    assert got.keys() == wanted.keys()
    for path, slopes in wanted.items():
        np.testing.assert_allclose(got[path], slopes, rtol=1e-3, atol=1e-5, err_msg=path)
    assert not got["unused"].any()
    assert got["layers.0.b"].any()


def test_auxiliary_outputs_and_lambdas() -> None:
    reference = compile(with_gradients, bound=parameters(), batch=BATCH)(BATCH)
    outputs = compile(with_aux, bound=parameters(), batch=BATCH)(BATCH)
    assert outputs["aux"]["twice"][0] == pytest.approx(2 * float(outputs["loss"]))
    np.testing.assert_allclose(outputs["grads"][1]["w"], reference["grads"]["layers"][1]["w"], rtol=1e-6)
    outputs = compile(of_a_lambda, bound=parameters(), batch=BATCH)(BATCH)
    np.testing.assert_allclose(outputs["grads"]["layers"][0]["w"], 3 * reference["grads"]["layers"][0]["w"], rtol=1e-5)


def descend(bound: Any, donated: Any, batch: Any) -> Any:
    value, grads = plain_grad(donated["params"], (), batch)
    layers = ()
    for layer, slope in zip(donated["params"]["layers"], grads["layers"]):  # noqa: B905 - graph mode
        moved = {}
        for key in layer.keys():  # noqa: SIM118
            moved[key] = layer[key] - bound["rate"] * slope[key]
        layers = layers + (moved,)  # noqa: RUF005
    return {"loss": value}, {"params": {"layers": layers, "unused": donated["params"]["unused"]}}


def test_a_training_step_is_one_graph() -> None:
    compiled = compile(
        descend, bound={"rate": np.array(0.2, np.float32)}, donated={"params": parameters()}, batch=BATCH
    )
    with count_compiles() as seen:
        losses = [float(compiled(BATCH)["loss"]) for _ in range(4)]
    assert seen.count == 1
    params = tree_map(lambda leaf: leaf.astype(np.float64), parameters())
    for value in losses:  # the same descent in NumPy, on gradients by finite differences
        assert value == pytest.approx(loss_numpy(params, **BATCH), rel=1e-4)
        slopes = finite_differences(params)
        leaves, structure = tree_flatten(params)
        moved = [leaf - 0.2 * slopes[path] for path, leaf in zip(structure.paths(), leaves, strict=True)]
        params = tree_unflatten(structure, moved)
    assert losses == sorted(losses, reverse=True)


def test_deep_trees_train_as_tuples_of_leaves() -> None:
    """Weights six levels deep, which MindSpore cannot nest once more: the leaves are donated as one tuple."""
    tree = {"m": ({"a": {"b": {"c": {"w": np.full(3, 2, np.float32)}}}},)}
    leaves, structure = tree_flatten(tree)
    indices = tree_unflatten(structure, range(len(leaves)))

    def flat_loss(values: Any, x: Any) -> Any:
        return (unflatten(indices, values)["m"][0]["a"]["b"]["c"]["w"] * x).sum()

    flat_grad = value_and_grad(flat_loss)

    def step(bound: Any, donated: Any, batch: Any) -> Any:
        value, grads = flat_grad(donated, batch["x"])
        return {"loss": value}, (donated[0] - grads[0],)

    batch = {"x": np.array([1, 2, 3], np.float32)}
    compiled = compile(step, bound=(), donated=tuple(leaves), batch=batch)
    assert float(compiled(batch)["loss"]) == 12
    assert compiled.donated[0].asnumpy().tolist() == [1, 0, -1]


def test_gradients_run_in_buckets_with_padding() -> None:
    compiled = compile(
        masked_descend,
        bound={"w": np.array([1, 2, 3], np.float32)},
        batch={"x": ArraySpec(("N", 3), "float32"), "on": ArraySpec(("N",), "float32")},
        buckets=[{"N": 4}],
        outputs={"grad": ()},
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert compiled({"x": x, "on": np.ones(2, np.float32)})["grad"].tolist() == x.sum(0).tolist()


def masked_descend(bound: Any, donated: Any, batch: Any) -> Any:
    _, grad = masked_grad(bound["w"], batch)
    return {"grad": grad}, donated


def masked_loss(w: Any, batch: Any) -> Any:
    return ((batch["x"] * w).sum(-1) * batch["on"]).sum()


masked_grad = value_and_grad(masked_loss)


def test_it_takes_a_function() -> None:
    with pytest.raises(GraphError, match="value_and_grad takes a function, not a float"):
        value_and_grad(3.0)  # type: ignore[arg-type]
