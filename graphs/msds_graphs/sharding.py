"""ShardPlan: how ranks divide a tree of arrays, as data; and which slice of each array each rank holds. Host code.

Beside `Plan`, which says how each op is computed, this says who computes what of it. Four numbers, written
`dp2.tp4.ep8` (those left out are 1):

    pp   pipeline stages: the layers are cut into as many runs of consecutive layers
    dp   replicas within a stage, each with its own sequences and cache
    tp   ranks that share one replica: they cut heads, MLP widths and the vocabulary
    ep   ranks that the experts of a stage are spread over

A mesh holds pp * dp * tp ranks: those of a stage follow each other, replica by replica. The same dp * tp ranks hold
each expert of the stage once: `ep` must divide dp * tp, and the rest, dp * tp / ep consecutive ranks, cut the width
of each expert. So a rank of a stage has two addresses, (dp, tp) and (ep, ep_rest).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from msds_graphs.errors import GraphError
from msds_graphs.mesh import Mesh
from msds_graphs.specs import ITEM_SIZES, ArraySpec
from msds_graphs.trees import Tree, tree_items

AXES = ("pp", "dp", "tp", "ep")
_VIEWS = (("dp", "tp"), ("ep", "ep_rest"))
"""The two ways in which the ranks of a stage are numbered; an array is cut by one of them."""


@dataclass(frozen=True)
class ShardPlan:
    """dp, tp, ep, pp as the module says. GraphError where they are no counts or ep does not divide dp * tp."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            value = getattr(self, axis)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise GraphError(f"{axis} is {value!r}: it must be a whole number of at least 1")
        if self.stage_ranks % self.ep:
            alone = f"; write tp{self.ep}.ep{self.ep} or dp{self.ep}.ep{self.ep}" if self.stage_ranks == 1 else ""
            raise GraphError(
                f"ep {self.ep} does not divide dp * tp = {self.dp} * {self.tp} = {self.stage_ranks}, the ranks that "
                f"the experts are spread over: legal are {_divisors_text(self.stage_ranks)}{alone}"
            )

    @classmethod
    def parse(cls, text: str) -> ShardPlan:
        """`dp2.tp4.ep8` or `{"dp": 2, "tp": 4, "ep": 8}`; GraphError for another axis or one that is given twice."""
        return cls(**written_axes(text))

    def __str__(self) -> str:
        named = [f"{axis}{getattr(self, axis)}" for axis in ("dp", "tp", "ep", "pp") if getattr(self, axis) > 1]
        return ".".join(named) or "tp1"

    def to_json(self) -> dict[str, int]:
        """The four numbers by name."""
        return asdict(self)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.tp

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.tp

    def replica_share(self, count: int) -> int:
        """The most of so many things, spread evenly, that one replica has."""
        return -(-count // self.dp)

    def check_mesh(self, mesh: Mesh) -> None:
        """GraphError, with the arithmetic, unless the plan uses every rank of the mesh once."""
        if self.ranks != mesh.ranks:
            raise GraphError(
                f"plan {self} needs pp * dp * tp = {self.pp} * {self.dp} * {self.tp} = {self.ranks} ranks, "
                f"mesh {mesh} has {mesh.ranks} (ep does not count: experts share the ranks of dp and tp)"
            )

    def sizes(self) -> dict[str, int]:
        """Ranks along each axis that can cut an array."""
        return {"dp": self.dp, "tp": self.tp, "ep": self.ep, "ep_rest": self.stage_ranks // self.ep}

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place on each axis: pp, dp, tp, ep, ep_rest."""
        if not 0 <= rank < self.ranks:
            raise GraphError(f"rank {rank} is outside plan {self} of {self.ranks} ranks")
        stage, within = divmod(rank, self.stage_ranks)
        rest = self.stage_ranks // self.ep
        dp, tp = divmod(within, self.tp)
        return {"pp": stage, "dp": dp, "tp": tp, "ep": within // rest, "ep_rest": within % rest}

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only (within its view of the stage), in order."""
        fixed = {
            "pp": ("dp", "tp"),
            "dp": ("pp", "tp"),
            "tp": ("pp", "dp"),
            "ep": ("pp", "ep_rest"),
            "ep_rest": ("pp", "ep"),
        }[axis]
        place = self.coordinates(rank)
        return tuple(
            other for other in range(self.ranks) if all(self.coordinates(other)[name] == place[name] for name in fixed)
        )


def written_axes(text: str) -> dict[str, int]:
    """The axes that a plan names, whether or not they make a plan; GraphError as `ShardPlan.parse`."""
    found: dict[str, int] = {}
    for axis, value in _json_axes(text) if text.lstrip().startswith("{") else _dotted_axes(text):
        if axis not in AXES:
            raise GraphError(f"plan {text!r} has axis {axis!r}: the axes are dp, tp, ep and pp")
        if axis in found:
            raise GraphError(f"plan {text!r} gives {axis} twice")
        found[axis] = value
    return found


def _dotted_axes(text: str) -> Iterator[tuple[str, int]]:
    for part in text.split("."):
        match = re.fullmatch(r"([a-z_]+)([0-9]+)", part)
        if match is None:
            raise GraphError(f"plan {text!r}: {part!r} is not an axis with a number; write for example dp2.tp4.ep8")
        yield match[1], int(match[2])


def _json_axes(text: str) -> Iterator[tuple[str, int]]:
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except json.JSONDecodeError as error:
        raise GraphError(f"plan {text!r} is not JSON: {error}") from None
    yield from pairs


@dataclass(frozen=True)
class Rules:
    """Where the dimensions and parts of a tree go.

    axes: logical axis -> "tp", "ep", "ep_rest" or None (whole on every rank); every axis of the tree must be named.
    places: first name of a path -> "first", "last" or "ends" of the pipeline, or "spread": its children, one per
    layer, are cut into runs. units: logical axis -> indivisible units (heads) where that is not the dimension itself.
    padded: axes whose last slices may be filled up. hints: what an axis counts, for messages.
    """

    axes: Mapping[str, str | None]
    places: Mapping[str, str]
    units: Mapping[str, int] = field(default_factory=dict)
    padded: frozenset[str] = frozenset()
    hints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """What one rank holds of an array: `index` of the whole array, and after it `padding` rows of zeros per dim."""

    index: tuple[slice, ...]
    padding: tuple[int, ...]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape, padding included."""
        return tuple(part.stop - part.start + pad for part, pad in zip(self.index, self.padding, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def shard(path: str, spec: ArraySpec, rules: Rules, plan: ShardPlan, rank: int) -> Shard:
    """The slice of the array at `path` for a rank of a stage that holds it.

    GraphError for an axis that no rule names, two dims that meet in one mesh axis, and sizes that do not divide, with
    the nearest legal sizes.
    """
    mesh_axes = _mesh_axes(path, spec, rules)
    sizes, place = plan.sizes(), plan.coordinates(rank)
    index, padding = [], []
    for dim, logical, axis in zip(spec.shape, spec.axes or (None,) * len(spec.shape), mesh_axes, strict=True):
        assert isinstance(dim, int), f"{path} has the symbolic dim {dim}"
        if axis is None or sizes[axis] == 1:
            index.append(slice(0, dim))
            padding.append(0)
            continue
        assert logical is not None
        part = _part_size(path, dim, logical, rules, sizes[axis], axis)
        start = min(dim, place[axis] * part)
        stop = min(dim, start + part)
        index.append(slice(start, stop))
        padding.append(part - (stop - start))
    return Shard(tuple(index), tuple(padding), spec.dtype)


def _mesh_axes(path: str, spec: ArraySpec, rules: Rules) -> tuple[str | None, ...]:
    """The mesh axis of each dim; two of an array may not meet, nor come from the two views of a stage."""
    found: dict[str, str] = {}
    result: list[str | None] = []
    for logical in spec.axes or (None,) * len(spec.shape):
        if logical is not None and logical not in rules.axes:
            raise GraphError(f"axis {logical!r} of {path} has no rule: the rules know {', '.join(rules.axes)}")
        axis = None if logical is None else rules.axes[logical]
        result.append(axis)
        if axis is None or logical is None:
            continue
        for other, name in found.items():
            if other == axis:
                raise GraphError(f"axes {name!r} and {logical!r} of {path} both go to mesh axis {axis!r}: map one away")
            if not any(axis in view and other in view for view in _VIEWS):
                raise GraphError(
                    f"axes {name!r} and {logical!r} of {path} go to mesh axes {other!r} and {axis!r}, which number the "
                    "same ranks in two ways: an array is cut by (dp, tp) or by (ep, ep_rest)"
                )
        found[axis] = logical
    return tuple(result)


def _part_size(path: str, dim: int, logical: str, rules: Rules, parts: int, axis: str) -> int:
    """Elements of each part of a dim, the same for every rank; the last parts of a padded axis are filled up."""
    if logical in rules.padded:
        return -(-dim // parts)
    units = rules.units.get(logical, dim)
    if units % parts or dim % units:
        what = rules.hints.get(logical, f"axis {logical!r}")
        raise GraphError(
            f"{what} {units} of {path} cannot be cut by {axis} = {parts}: legal are {_divisors_text(units, parts)}"
        )
    return dim // parts


def _divisors_text(number: int, near: int | None = None) -> str:
    """The divisors of a number, or the two around `near`."""
    divisors = [n for n in range(1, number + 1) if number % n == 0] if number <= 1 << 20 else [1, number]
    if near is None:
        return ", ".join(map(str, divisors))
    below = [n for n in divisors if n < near]
    above = [n for n in divisors if n > near]
    return " and ".join(map(str, below[-1:] + above[:1]))


def stage_layers(num_layers: int, plan: ShardPlan, stage: int) -> range:
    """The layers of a stage: consecutive, their counts at most one apart, the longer runs first."""
    if plan.pp > num_layers:
        raise GraphError(f"pp is {plan.pp}: {num_layers} layers make at most {num_layers} stages")
    short, longer = divmod(num_layers, plan.pp)
    start = stage * short + min(stage, longer)
    return range(start, start + short + (stage < longer))


@dataclass(frozen=True)
class PlacedLeaf:
    """An array of a tree and its place in the pipeline; for a spread one, which of how many layers it belongs to."""

    path: str
    spec: ArraySpec
    place: str
    layer: int = 0
    num_layers: int = 0


def place_leaves(spec_tree: Tree, rules: Rules) -> tuple[PlacedLeaf, ...]:
    """Every array of a spec tree with its place; GraphError for one that the rules do not place."""
    placed = []
    for path, spec in tree_items(spec_tree):
        name, _, rest = path.partition(".")
        if name not in rules.places:
            raise GraphError(f"{path} has no place: the rules place {', '.join(rules.places)}")
        if rules.places[name] == "spread":
            placed.append(PlacedLeaf(path, spec, "spread", int(rest.partition(".")[0]), len(spec_tree[name])))
        else:
            placed.append(PlacedLeaf(path, spec, rules.places[name]))
    return tuple(placed)


def held_leaves(placed: Sequence[PlacedLeaf], plan: ShardPlan, stage: int) -> list[PlacedLeaf]:
    """The arrays that the ranks of a pipeline stage hold a part of."""
    is_first, is_last = stage == 0, stage == plan.pp - 1
    present = {"first": is_first, "last": is_last, "ends": is_first or is_last}
    runs: dict[int, range] = {}

    def is_held(leaf: PlacedLeaf) -> bool:
        if leaf.place != "spread":
            return present[leaf.place]
        if leaf.num_layers not in runs:
            runs[leaf.num_layers] = stage_layers(leaf.num_layers, plan, stage)
        return leaf.layer in runs[leaf.num_layers]

    return [leaf for leaf in placed if is_held(leaf)]


def rank_shards(spec_tree: Tree, rules: Rules, plan: ShardPlan, rank: int) -> dict[str, Shard]:
    """Path -> slice of every array that a rank holds a part of: where sharded loading and execution take slices from.

    Paths keep the layer numbers of the whole tree. GraphError as `shard`.
    """
    held = held_leaves(place_leaves(spec_tree, rules), plan, plan.coordinates(rank)["pp"])
    return {leaf.path: shard(leaf.path, leaf.spec, rules, plan, rank) for leaf in held}
