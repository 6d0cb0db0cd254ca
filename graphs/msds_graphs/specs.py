"""ArraySpec: what an array will be, before it exists; and how it is initialised.

A spec tree drives everything about weights: initialisation, the checkpoint ledger, sharding, bytes.
A dimension that is a string is symbolic ("S", "Q"): its size comes from the bucket.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from msds_graphs.errors import GraphError
from msds_graphs.trees import Tree, tree_flatten, tree_unflatten

Dim: TypeAlias = int | str
Init: TypeAlias = str | tuple[str, float]

ITEM_SIZES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes per element of every dtype name a spec may carry."""

_PLAIN_INITS = ("zeros", "ones")
_SCALED_INITS = ("normal", "uniform")


@dataclass(frozen=True)
class ArraySpec:
    """shape: sizes, or names of symbolic dimensions; dtype: a name of ITEM_SIZES.

    axes: the logical name of each dimension (None: replicated), or () when the spec carries no names.
    init: "zeros", "ones", ("normal", standard deviation) or ("uniform", bound of [-bound, bound)).
    GraphError for anything else.
    """

    shape: tuple[Dim, ...]
    dtype: str
    axes: tuple[str | None, ...] = ()
    init: Init = "zeros"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "axes", tuple(self.axes))
        for dim in self.shape:
            if isinstance(dim, bool) or not isinstance(dim, (int, str)) or dim == "":
                raise GraphError(f"dimension {dim!r} of {self.shape}: use a size or the name of a symbolic dim")
            if isinstance(dim, int) and dim < 0:
                raise GraphError(f"dimension {dim} of {self.shape}: sizes are not negative")
        if self.dtype not in ITEM_SIZES:
            raise GraphError(f"dtype {self.dtype!r} is unknown: use one of {', '.join(ITEM_SIZES)}")
        if self.axes and len(self.axes) != len(self.shape):
            raise GraphError(f"axes {self.axes} name {len(self.axes)} of the {len(self.shape)} dims {self.shape}")
        _check_init(self.init)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbolic dimensions, in order, each once."""
        return tuple(dict.fromkeys(dim for dim in self.shape if isinstance(dim, str)))

    @property
    def size(self) -> int:
        """Number of elements; GraphError while a dimension is symbolic."""
        if self.symbols:
            raise GraphError(f"shape {self.shape} has symbolic dims {self.symbols}: resolve() it first")
        return math.prod(dim for dim in self.shape if isinstance(dim, int))

    @property
    def nbytes(self) -> int:
        """Bytes of the array; GraphError while a dimension is symbolic."""
        return self.size * ITEM_SIZES[self.dtype]

    def resolve(self, dims: Mapping[str, int]) -> ArraySpec:
        """The same spec with every symbolic dim replaced by its size; GraphError for one not in `dims`."""
        missing = [name for name in self.symbols if name not in dims]
        if missing:
            raise GraphError(f"dims {missing} of {self.shape} have no size: the sizes given are {dict(dims)}")
        return replace(self, shape=tuple(dims[dim] if isinstance(dim, str) else dim for dim in self.shape))


def _check_init(init: object) -> None:
    if init in _PLAIN_INITS:
        return
    if isinstance(init, tuple) and len(init) == 2 and init[0] in _SCALED_INITS:
        scale = init[1]
        if isinstance(scale, (int, float)) and math.isfinite(scale) and scale >= 0:
            return
    raise GraphError(
        f"init {init!r} is unknown: use 'zeros', 'ones', ('normal', std) or ('uniform', bound), "
        "with a finite scale >= 0"
    )


def init_tree(spec_tree: Tree, seed: int) -> Tree:
    """NumPy arrays for a tree of specs.

    Each leaf's random stream is keyed by (seed, path): adding or removing a leaf changes no other.

    NumPy has no bfloat16: such leaves come as float32 arrays that hold bfloat16 values exactly. float8 leaves
    are derived from weights, never drawn, so only "zeros" and "ones" (as float32) exist for them.
    """
    leaves, treedef = tree_flatten(spec_tree)
    paths = treedef.paths()
    return tree_unflatten(treedef, (init_leaf(*pair, seed) for pair in zip(paths, leaves, strict=True)))


def init_leaf(path: str, spec: Any, seed: int) -> npt.NDArray[Any]:
    """The leaf at `path` of `init_tree`."""
    if not isinstance(spec, ArraySpec):
        raise GraphError(f"{path!r} is a {type(spec).__name__}: init_tree takes a tree of ArraySpec")
    if spec.symbols:
        raise GraphError(f"{path!r} has symbolic dims {spec.symbols}: resolve() the spec first")
    shape = tuple(int(dim) for dim in spec.shape)
    dtype = storage_dtype(spec.dtype)
    if spec.init == "zeros":
        return np.zeros(shape, dtype)
    if spec.init == "ones":
        return np.ones(shape, dtype)
    if not spec.dtype.startswith(("float16", "float32", "float64", "bfloat16")):
        raise GraphError(f"{path!r}: init {spec.init!r} needs a floating dtype, not {spec.dtype}")
    key = hashlib.sha256(f"{seed}:{path}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    assert not isinstance(spec.init, str)
    kind, scale = spec.init
    # float32 draws, scaled in place: half the time of float64, and no second array as large as the weight.
    values = np.empty(shape, np.float32)
    if kind == "normal":
        generator.standard_normal(out=values, dtype=np.float32)
        values *= np.float32(scale)
    else:
        generator.random(out=values, dtype=np.float32)
        values *= np.float32(2 * scale)
        values -= np.float32(scale)
    return round_to_bfloat16(values) if spec.dtype == "bfloat16" else values.astype(dtype, copy=False)


def numpy_has(dtype: str) -> bool:
    """Whether `dtype` is a dtype of NumPy itself: all but bfloat16 and float8 are."""
    return dtype != "bfloat16" and not dtype.startswith("float8")


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype that holds values of `dtype` on the host: float32 for what NumPy lacks."""
    return np.dtype(dtype if numpy_has(dtype) else np.float32)


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 values rounded to bfloat16 (nearest, ties to even), still stored as float32; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(values.shape)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    result: npt.NDArray[np.float32] = np.where(np.isnan(values), values, rounded.view(np.float32))
    return result
