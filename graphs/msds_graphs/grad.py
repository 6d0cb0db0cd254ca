"""value_and_grad over trees, for use inside a function that `compile` turns into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms

from msds_graphs.errors import GraphError
from msds_graphs.trees import Tree


def value_and_grad(fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., tuple[Any, Tree]]:
    """A function of the same arguments as `fn` that returns (loss, gradients).

    fn(tree, *rest) -> scalar loss, or (loss, aux) with has_aux, where aux is a tensor or tree: then the
    result is ((loss, aux), gradients). The gradients are with respect to the first argument only, a tree of
    the same structure and dtypes, zero where the loss does not depend on a leaf. That argument is a tree of
    Parameters (bound or donated) or of tensors.

    Six levels is all that MindSpore nests, and the gradients lie one down in (loss, gradients): of a tree deeper
    than five, hold the leaves as a tuple, differentiate by that, and let `fn` rebuild the tree with
    msds_graphs.steps.unflatten.

    To be called in a function given to `compile`, so that a whole training step is one graph:

        loss_and_grad = value_and_grad(loss)

        def step(bound, donated, batch):
            value, grads = loss_and_grad(donated["params"], (), batch)
            ...
            return {"loss": value}, {"params": new_params, ...}
    """
    if not callable(fn):
        raise GraphError(f"value_and_grad takes a function, not a {type(fn).__name__}")

    # Differentiated as one argument that is a tree: MindSpore's gradient takes no function of *args.
    def with_grad(tree, *rest):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        def of_tree(values):  # type: ignore[no-untyped-def]
            return fn(values, *rest)

        return ms.value_and_grad(of_tree, 0, None, has_aux)(tree)

    return with_grad
