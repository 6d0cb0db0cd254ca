"""The batch of a step on the host: its declared structure, checked, measured and padded to a bucket.

Arrays only, no MindSpore: device tensors are recognised by their `asnumpy` and pass through where they fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from msds_graphs.buckets import Bucket
from msds_graphs.errors import GraphError
from msds_graphs.specs import ITEM_SIZES, ArraySpec, storage_dtype
from msds_graphs.trees import Tree, TreeDef, at, describe, is_named_tuple, join, tree_flatten, tree_flatten_as

Array: TypeAlias = npt.NDArray[Any]
Axes: TypeAlias = tuple[str | None, ...]


def dtype_name(leaf: Any) -> str:
    """The dtype of an array or device tensor as a name of ITEM_SIZES; MindSpore says "Float32"."""
    return str(leaf.dtype).lower()


def spec_of(leaf: Any, path: str, what: str) -> ArraySpec:
    """The spec of a declared leaf: an ArraySpec as it is, or that of an example array.

    An example of 64 bits is refused, because NumPy makes them unasked: who means it writes an ArraySpec.
    """
    if isinstance(leaf, ArraySpec):
        return leaf
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise GraphError(
            f"{what} {at(path)} is {describe(leaf)} ({leaf!r:.60}): leaves are ArraySpecs, NumPy arrays or tensors"
        )
    dtype = dtype_name(leaf)
    if dtype in ("float64", "int64", "uint64"):
        raise GraphError(
            f"{what} {at(path)} is an example of dtype {dtype}, NumPy's default: cast it to 32 bits, or "
            f"declare ArraySpec({tuple(leaf.shape)}, {dtype!r}) if 64 bits are meant"
        )
    if dtype not in ITEM_SIZES:
        raise GraphError(f"{what} {at(path)} has dtype {dtype}: use one of {', '.join(ITEM_SIZES)}")
    return ArraySpec(tuple(leaf.shape), dtype)


def refuse_named_tuples(tree: Tree, what: str, path: str = "") -> None:
    """GraphError with the path of the first named tuple: graph mode reads no field of one holding tensors."""
    if is_named_tuple(tree):
        raise GraphError(
            f"{what} {at(path)} is the named tuple {type(tree).__name__}, whose fields graph "
            f"mode cannot read: use a dict with keys {list(tree._fields)} (tree._asdict())"
        )
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (tuple, list)) else ()
    for key, child in children:
        refuse_named_tuples(child, what, join(path, str(key)))


class BatchLayout:
    """What a batch must be. specs: tree of ArraySpec or example arrays; pad: fill values, a prefix of it.

    symbols: the symbolic dimensions in order of appearance; structure: the declared TreeDef.
    """

    def __init__(self, specs: Tree, pad: Tree = 0) -> None:
        refuse_named_tuples(specs, "batch")
        leaves, self.structure = tree_flatten(specs)
        self.paths = self.structure.paths()
        self.specs = [spec_of(*pair, "batch") for pair in zip(leaves, self.paths, strict=True)]
        self._dtypes = [storage_dtype(spec.dtype) for spec in self.specs]
        self.symbols = tuple(dict.fromkeys(name for spec in self.specs for name in spec.symbols))
        self._fills = _spread(pad, self.structure, _is_fill, "pad")
        self._check_fills()
        self._shapes: dict[Bucket, list[tuple[int, ...]]] = {}

    def _check_fills(self) -> None:
        for path, fill, dtype in zip(self.paths, self._fills, self._dtypes, strict=True):
            is_truth = dtype == np.bool_ and np.asarray(fill).ndim == 0 and fill in (0, 1)  # so that 0 fits every leaf
            if np.asarray(fill).ndim or not (is_truth or np.can_cast(np.min_scalar_type(fill), dtype, "same_kind")):
                raise GraphError(f"pad value {fill!r} {at(path)} does not fit dtype {dtype}")

    def flatten(self, batch: Tree) -> list[Any]:
        """The leaves in declared order; GraphError naming the first path where the structure differs."""
        return tree_flatten_as(self.structure, batch, "batch")

    def measure(self, leaves: Sequence[Any]) -> dict[str, int]:
        """The sizes of the symbolic dims; GraphError with the path for a wrong type, dtype, rank or size."""
        dims: dict[str, int] = {}
        for index, leaf in enumerate(leaves):
            spec = self.specs[index]
            if not isinstance(leaf, np.ndarray) and not hasattr(leaf, "asnumpy"):
                raise self._fault(index, f"is {describe(leaf)}: pass a NumPy array of dtype {spec.dtype}")
            if leaf.dtype != self._dtypes[index] and dtype_name(leaf) != spec.dtype:
                raise self._fault(index, f"has dtype {dtype_name(leaf)}, declared {spec.dtype}: cast it")
            shape = leaf.shape
            if len(shape) != len(spec.shape):
                raise self._fault(index, f"has shape {tuple(shape)}, declared {spec.shape}")
            for declared, size in zip(spec.shape, shape, strict=True):
                if isinstance(declared, str):
                    if dims.setdefault(declared, size) != size:
                        other = dims[declared]
                        raise self._fault(index, f"has {declared}={size}, an earlier leaf {declared}={other}")
                elif declared != size:
                    raise self._fault(index, f"has shape {tuple(shape)}, declared {spec.shape}")
        for name, size in dims.items():
            if size < 1:
                raise GraphError(f"the batch has {name}={size}: nothing to run")
        return dims

    def _fault(self, index: int, message: str) -> GraphError:
        return GraphError(f"batch {at(self.paths[index])} {message}")

    def shapes(self, bucket: Bucket) -> list[tuple[int, ...]]:
        """The padded shape of each leaf."""
        if bucket not in self._shapes:
            specs = [spec.resolve(bucket) for spec in self.specs]
            self._shapes[bucket] = [tuple(int(dim) for dim in spec.shape) for spec in specs]
        return self._shapes[bucket]

    def pad(self, leaves: Sequence[Any], bucket: Bucket) -> list[Any]:
        """Fresh buffers of the bucket's shapes: the leaf in the low corner, the fill value elsewhere.

        Never the caller's own buffer, which may change while a device still reads it. A device tensor of the
        right shape passes through; one that must be padded goes through the host.
        """
        padded: list[Any] = []
        for leaf, shape, fill, dtype in zip(leaves, self.shapes(bucket), self._fills, self._dtypes, strict=True):
            if not isinstance(leaf, np.ndarray):
                if tuple(leaf.shape) == shape:
                    padded.append(leaf)
                    continue
                leaf = leaf.asnumpy()
            if leaf.shape == shape:
                padded.append(np.array(leaf, dtype, order="C"))
                continue
            buffer = np.full(shape, fill, dtype)
            buffer[tuple(map(slice, leaf.shape))] = leaf
            padded.append(buffer)
        return padded

    def filler(self, bucket: Bucket) -> list[Array]:
        """A batch of nothing but fill values in the bucket's shapes: what warm-up runs."""
        rows = zip(self.shapes(bucket), self._fills, self._dtypes, strict=True)
        return [np.full(shape, fill, dtype) for shape, fill, dtype in rows]


def _is_fill(node: Any) -> bool:
    return not isinstance(node, (dict, tuple, list))


def _is_axes(node: Any) -> bool:
    """None, or a tuple of names and Nones: the axes of one array, not a node of a tree."""
    return node is None or (isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node))


def spread_axes(prefix: Tree, structure: TreeDef) -> list[Axes]:
    """The axes of each output leaf. `prefix`: axes at any node hold for all leaves below; None: no cut."""
    return [axes or () for axes in _spread(prefix, structure, _is_axes, "outputs")]


def _spread(prefix: Tree, structure: TreeDef, is_value: Any, what: str, path: str = "") -> list[Any]:
    if is_value(prefix):
        return [prefix] * structure.num_leaves
    keys = list(prefix) if isinstance(prefix, dict) else [str(index) for index in range(len(prefix))]
    if set(keys) != set(structure.keys) or isinstance(prefix, dict) != (structure.kind is dict):
        raise GraphError(
            f"{what} {at(path)} has {describe(prefix)}, the tree has there "
            f"{list(structure.keys) if structure.kind else 'a leaf'}"
        )
    children = prefix if isinstance(prefix, dict) else dict(zip(keys, prefix, strict=True))
    return [
        value
        for key, child in zip(structure.keys, structure.children, strict=True)
        for value in _spread(children[key], child, is_value, what, join(path, key))
    ]


def check_axes(
    axes: Sequence[Axes], shapes: Sequence[tuple[int, ...]], paths: Sequence[str], bucket: Mapping[str, int]
) -> None:
    """GraphError for an output axis that the bucket does not know, or whose size is not the bucket's."""
    for leaf_axes, shape, path in zip(axes, shapes, paths, strict=True):
        if len(leaf_axes) > len(shape):
            raise GraphError(f"outputs {at(path)}: axes {leaf_axes} for an array of shape {shape}")
        for position, name in enumerate(leaf_axes):
            if name is None:
                continue
            if name not in bucket:
                raise GraphError(f"outputs {at(path)}: axis {name!r} is no dim of the batch {list(bucket)}")
            if shape[position] != bucket[name]:
                raise GraphError(
                    f"outputs {at(path)}: axis {position} is declared {name!r}, which is {bucket[name]} in "
                    f"this bucket, but the array has shape {shape}"
                )


def unpad(array: Array, axes: Axes, dims: Mapping[str, int]) -> Array:
    """A view without the padding: each named axis cut to the size of this call."""
    if not any(axes):
        return array
    result: Array = array[tuple(slice(None if name is None else dims[name]) for name in axes)]
    return result
