"""What a step returned, read at compile time and held against what was declared. Host code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msds_graphs.batch import Axes, check_axes, dtype_name, spread_axes
from msds_graphs.errors import GraphError
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import Tree, TreeDef, at, tree_flatten, tree_flatten_as


@dataclass(frozen=True)
class Result:
    """outputs: the structure of the outputs; axes: for each output leaf the names of the axes to cut."""

    outputs: TreeDef
    axes: list[Axes]


def read_result(found: tuple[Any, ...], donated: Tree, prefix: Tree, bucket: Mapping[str, int]) -> Result:
    """The Result for the tokens of what a function returned (steps.tokens).

    GraphError when that is not (outputs, donated), an output is no tensor or of 64 bits unasked, the donated
    tree has changed in structure, shape or dtype, or an axis of `prefix` is not what the array has.
    """
    position, returned = _read(found, 0)
    assert position == len(found)
    if not isinstance(returned, tuple) or len(returned) != 2:
        kind = f"{len(returned)} values" if isinstance(returned, tuple) else "one value"
        raise GraphError(f"the function returned {kind}: return (outputs, donated), with donated=() if there is none")
    outputs, written = returned
    _check_donated(donated, written)
    leaves, structure = tree_flatten(outputs)
    paths = structure.paths()
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, ArraySpec):
            raise GraphError(f"output {path!r} is no tensor: return tensors only (constants are known outside)")
        if leaf.dtype == "float64":
            raise GraphError(f"output {path!r} is float64, which Ascend cannot compute with: cast it to float32")
    axes = spread_axes(prefix, structure)
    shapes = [tuple(int(dim) for dim in leaf.shape) for leaf in leaves]
    check_axes(axes, shapes, paths, bucket)
    return Result(structure, axes)


def _read(found: tuple[Any, ...], position: int) -> tuple[int, Tree]:
    """The position after the tree that starts at token `position`, and that tree, with ArraySpec leaves."""
    token = found[position]
    if token == "leaf":
        shape, dtype = found[position + 1], str(found[position + 2]).lower()
        return position + 3, ArraySpec(tuple(shape), dtype)
    if token == "other":
        return position + 1, None
    children: list[Tree] = []
    keys: list[str] = []
    position += 1
    while found[position] != "end":
        if token == "{":
            keys.append(found[position + 1])
            position += 2
        position, child = _read(found, position)
        children.append(child)
    return position + 1, dict(zip(keys, children, strict=True)) if token == "{" else tuple(children)


def _check_donated(donated: Tree, written: Tree) -> None:
    slots, structure = tree_flatten(donated)
    values = tree_flatten_as(structure, written, "the returned donated tree")
    for path, slot, value in zip(structure.paths(), slots, values, strict=True):
        if not isinstance(value, ArraySpec):
            raise GraphError(f"the returned donated tree {at(path)} is no tensor: return the new value")
        shape, dtype = tuple(slot.shape), dtype_name(slot)
        if value.shape != shape or value.dtype != dtype:
            raise GraphError(
                f"the returned donated tree {at(path)} is {value.dtype} {value.shape}, donated as {dtype} "
                f"{shape}: a donated leaf keeps its shape and dtype"
            )
