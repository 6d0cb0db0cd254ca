"""The flat function that graph mode compiles for a function over trees. All of this is parsed by MindSpore.

Only flat tensors cross the boundary of a graph, because MindSpore takes tensors inside containers for
constants and turns a returned dict into a tuple. So a step unflattens its arguments and flattens its results
in the graph, where both cost nothing at run time, and tells Python once, while compiling, what it returned.
"""

# ruff: noqa: RUF005, SIM118 - graph mode parses neither (*a, b) nor iteration over a dict itself
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Parameter, Tensor, ops
from mindspore.ops.primitive import constexpr


def unflatten(indices, leaves):
    """`indices`: a tree whose leaves are positions in `leaves`."""
    if isinstance(indices, dict):
        tree = {}
        for key in indices.keys():
            tree[key] = unflatten(indices[key], leaves)
        return tree
    if isinstance(indices, tuple):
        children = ()
        for child in indices:
            children = children + (unflatten(child, leaves),)
        return children
    return leaves[indices]


def flatten(tree):
    """The leaves in insertion order, as a tuple."""
    if isinstance(tree, dict):
        leaves = ()
        for key in tree.keys():
            leaves = leaves + flatten(tree[key])
        return leaves
    if isinstance(tree, (tuple, list)):
        leaves = ()
        for child in tree:
            leaves = leaves + flatten(child)
        return leaves
    return (tree,)


def flatten_like(like, tree):
    """The leaves of `tree` in the insertion order of `like`, which has the same structure up to key order."""
    if isinstance(like, dict):
        leaves = ()
        for key in like.keys():
            leaves = leaves + flatten_like(like[key], tree[key])
        return leaves
    if isinstance(like, (tuple, list)):
        leaves = ()
        for index in range(len(like)):
            leaves = leaves + flatten_like(like[index], tree[index])
        return leaves
    return (tree,)


def tokens(tree):
    """The structure as a flat tuple of tokens (MindSpore folds constants no deeper than six levels).

    A dict is "{", then "key", the key and the child's tokens for each child, then "end"; a tuple is "(", its
    children's tokens, "end"; a tensor "leaf", shape, dtype; anything else "other".
    """
    if isinstance(tree, dict):
        found = ("{",)
        for key in tree.keys():
            found = found + ("key", key) + tokens(tree[key])
        return found + ("end",)
    if isinstance(tree, (tuple, list)):
        found = ("(",)
        for child in tree:
            found = found + tokens(child)
        return found + ("end",)
    if isinstance(tree, Tensor):
        return ("leaf", tree.shape, tree.dtype)
    return ("other",)


def detached(leaf):
    """A copy of a bare Parameter: returned as it is, it would be read only after later writes."""
    if isinstance(leaf, Parameter):
        return ops.deepcopy(leaf)
    return leaf


def make_step(
    fn: Callable[..., Any],
    trees: tuple[Any, Any, Any],
    on_result: Callable[[tuple[Any, ...]], None],
    *,
    in_place: bool,
    returns_donated: bool = False,
) -> Callable[..., Any]:
    """The function `step(*leaves) -> flat outputs` for `fn`, at least one. Called once per compilation.

    trees: bound Parameters, donated Parameters, and the batch's tree of leaf positions. on_result is called
    while compiling with the tokens of what `fn` returned, and raises to refuse it. in_place: `fn` has written
    the donated Parameters itself; else the returned tree is assigned to them. returns_donated: the returned
    donated leaves follow the outputs.
    """
    bound, donated, indices = trees
    slots = tuple(flatten(donated))
    several = len(slots) > 1

    @constexpr
    def accept(found):
        on_result(found)
        return True

    def step(*leaves):
        result = fn(bound, donated, unflatten(indices, leaves))
        outputs = ()
        if accept(tokens(result)):  # decided while compiling, so a refused result is not looked into
            for leaf in flatten(result[0]):
                outputs = outputs + (detached(leaf),)
            written = flatten_like(donated, result[1])
            if not in_place:
                # All new values exist before the first write: one may be another slot's old Parameter.
                values = ()
                for value in written:
                    values = values + (ops.deepcopy(value) if several else value,)
                for position in range(len(slots)):
                    ops.assign(slots[position], values[position])
            if returns_donated:
                outputs = outputs + written
            if len(outputs) == 0:
                # When nothing computed leaves this block, MindSpore drops it, writes and all; and a graph
                # without outputs swallows its errors. So there is always an output.
                outputs = (ops.deepcopy(leaves[0]),)
        return outputs

    return step
