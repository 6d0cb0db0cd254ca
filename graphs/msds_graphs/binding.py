"""Parameters: how arrays become the bound trees that graphs close over, and how they get new values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.graph.api import _pynative_executor

from msds_graphs.batch import dtype_name, refuse_named_tuples, spec_of
from msds_graphs.errors import GraphError
from msds_graphs.specs import ArraySpec, init_leaf, numpy_has, storage_dtype
from msds_graphs.trees import Tree, at, join, tree_flatten, tree_flatten_as, tree_unflatten

_PREFIXES = itertools.count()
_YIELDS = 256


def ms_dtype(name: str) -> Any:
    """The MindSpore dtype of a spec's dtype name ("bool" is bool_ there)."""
    return ms.bool_ if name == "bool" else getattr(ms, name)


def bind(tree: Tree, prefix: str, specs: Tree | None = None) -> Tree:
    """A tree of the same structure whose leaves are Parameters named `prefix.path`.

    Leaves: NumPy arrays, tensors, ArraySpecs (initialised with seed 0), or Parameters, which stay the same
    object: a tree bound once can be bound to many steps, which then share it. `specs`: a tree of ArraySpec of
    the same structure; shapes must agree and floating arrays are stored in the spec's dtype, which is how
    float32 arrays become bfloat16 Parameters.

    On the CPU a writable, contiguous NumPy array is not copied: the Parameter takes over its memory, so give
    the array away (writing to it writes the Parameter, and the reverse). Read-only arrays, such as mapped
    files, are copied. One graph cannot hold two Parameters of one name, so prefixes are to differ.
    """
    refuse_named_tuples(tree, prefix)
    leaves, structure = tree_flatten(tree)
    wanted = [None] * len(leaves) if specs is None else tree_flatten_as(structure, specs, f"specs of {prefix}")
    rows = zip(structure.paths(), leaves, wanted, strict=True)
    return tree_unflatten(structure, [_bind_leaf(prefix, path, leaf, spec) for path, leaf, spec in rows])


def fresh_prefix(name: str) -> str:
    """A prefix that no other bind of this process was given by us: `name.0`, `name.1`, ..."""
    return f"{name}.{next(_PREFIXES)}"


def _bind_leaf(prefix: str, path: str, leaf: Any, spec: ArraySpec | None) -> Parameter:
    actual = spec_of(leaf, path, prefix) if spec is None or isinstance(leaf, ArraySpec) else spec
    if spec is not None and tuple(getattr(leaf, "shape", ())) != spec.shape:
        raise GraphError(f"{prefix} {at(path)} has shape {tuple(leaf.shape)}, its spec {spec.shape}")
    if isinstance(leaf, Parameter):
        if spec is not None and dtype_name(leaf) != spec.dtype:
            raise GraphError(f"{prefix} {at(path)} is bound as {dtype_name(leaf)}, its spec says {spec.dtype}")
        return leaf
    if isinstance(leaf, ArraySpec):
        leaf = init_leaf(path, leaf, seed=0)
    if not isinstance(leaf, np.ndarray):
        leaf = leaf.asnumpy()
    return _parameter(leaf, actual.dtype, join(prefix, path))


def _parameter(array: np.ndarray[Any, Any], dtype: str, name: str) -> Parameter:
    wanted = storage_dtype(dtype)
    if array.dtype != wanted:
        if dtype_name(array) != dtype and not np.can_cast(array.dtype, wanted, "same_kind"):
            raise GraphError(f"{name!r} is {dtype_name(array)} and cannot be stored as {dtype}: cast it")
        array = array.astype(wanted)
    tensor = to_tensor(array, dtype)
    # Parameter(tensor) copies; a one-element Parameter that is then given the tensor does not. Nothing is
    # compiled with it yet, so no graph can lose sight of it.
    parameter = Parameter(Tensor(np.zeros((1,) * tensor.ndim, np.int8), tensor.dtype), name=name)
    parameter.assign_value(tensor)
    parameter.requires_grad = False  # gradients are taken with respect to trees, never by this flag
    return parameter


def _owned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.flags.writeable and array.flags.c_contiguous:
        return array
    return np.array(array, order="C")


def assign(params: Tree, tree: Tree) -> None:
    """Writes `tree` (NumPy arrays or tensors) into bound Parameters; every compiled graph sees it.

    All of it is validated first: GraphError for another structure, shape or dtype, with nothing written.
    """
    leaves, structure = tree_flatten(params)
    paths = structure.paths()
    values = tree_flatten_as(structure, tree, "assigned tree")
    for path, parameter, value in zip(paths, leaves, values, strict=True):
        _check_assignable(path, parameter, value)
    for parameter, value in zip(leaves, values, strict=True):
        # Parameter.set_data would detach compiled graphs from the Parameter for good; assign reaches all.
        ops.assign(parameter, _as_tensor(value, dtype_name(parameter)))
    wait()  # a NumPy value is read in place, and its owner may change it after we return


def wait(outputs: Sequence[Any] = ()) -> None:
    """Returns when all submitted work is done, and raises what it raised. outputs: those of the graph, if it was one.

    Graphs and single operations run after the call that submitted them has returned, on the CPU as well;
    mindspore.runtime.synchronize, the public form of this, refuses the CPU.
    """
    if outputs:
        # MindSpore's own waiting spins, and with few cores it takes one from the graph: a decode step of 5 ms took 25.
        # Asking an output for an attribute sleeps, but only until the kernel that makes it has started: so all of them
        # are asked (a training step is a third faster than with one), and yielding lets the last kernels run.
        for output in outputs:
            _ = output.size
        for _ in range(_YIELDS):
            os.sched_yield()
    _pynative_executor.sync()


def _check_assignable(path: str, parameter: Any, value: Any) -> None:
    if not isinstance(parameter, Parameter):
        raise GraphError(f"{path!r} is a {type(parameter).__name__}, not a Parameter: bind() the tree first")
    if not isinstance(value, (np.ndarray, Tensor)):
        raise GraphError(f"value {at(path)} is a {type(value).__name__}: pass a NumPy array or tensor")
    if tuple(value.shape) != tuple(parameter.shape):
        raise GraphError(f"value {at(path)} has shape {tuple(value.shape)}, bound {tuple(parameter.shape)}")
    bound = dtype_name(parameter)
    if not numpy_has(bound) and ms.get_context("device_target") == "CPU":
        raise GraphError(f"{path!r} is {bound}, which MindSpore cannot assign on the CPU: bind it as float32")
    if dtype_name(value) != bound and value.dtype != storage_dtype(bound):
        raise GraphError(f"value {at(path)} has dtype {dtype_name(value)}, bound {bound}: cast it")


def _as_tensor(value: Any, dtype: str) -> Tensor:
    if isinstance(value, Tensor):
        return value if dtype_name(value) == dtype else value.astype(ms_dtype(dtype))
    return to_tensor(value, dtype)


def to_tensor(array: np.ndarray[Any, Any], dtype: str) -> Tensor:
    """A host array as a tensor of a spec's dtype; it shares the array's memory where NumPy has that dtype."""
    return Tensor.from_numpy(_owned(array)) if numpy_has(dtype) else Tensor(array, ms_dtype(dtype))


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor on the host; bfloat16 and float8, which NumPy lacks, as float32."""
    array: np.ndarray[Any, Any] = tensor.asnumpy()
    return array if array.dtype.kind in "biuf" and array.dtype.isbuiltin else array.astype(np.float32)
