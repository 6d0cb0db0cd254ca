"""A training checkpoint read as a Hugging Face one: the same names, shapes and numbers, nothing written in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from msds.checkpoint import Checkpoint, TensorInfo
from msds.checkpoint.dtypes import CHUNK_BYTES, Array, decode, encode, stored_type
from msds.checkpoint.reading import Index, bounds, slice_shape
from msds.checkpoint.shards import name_some
from msds.config import DeepseekConfig, ModelConfig
from msds.errors import CheckpointError
from msds.layouts.forms import EXPERT
from msds.layouts.locate import Contents, is_training_checkpoint, read_contents
from msds.layouts.orders import Orders, order_needed, read_record
from msds.layouts.rules import Rule, experts_of, fill, known_layouts, match_stored
from msds.layouts.stored import Piece, StoredTensor
from msds.models.names import mtp_copies

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """What Hugging Face tensors are made of: `names` from `stored`, of each the part of `expert` if it is stacked."""

    rule: Rule
    names: tuple[str, ...]
    stored: tuple[StoredTensor, ...]
    orders: Orders
    expert: int | None
    experts: int

    def shape(self, place: int) -> Shape:
        """The shape of one stored part."""
        full = self.stored[place].shape
        if self.expert is None:
            return full
        return full[1:] if len(full) == 3 else (full[0] // self.experts, *full[1:])

    def pieces(self) -> Iterator[Piece]:
        """All that the files hold of it."""
        for tensor in self.stored:
            yield from tensor.pieces

    def read(self, checkpoint: TrainingCheckpoint) -> list[Array]:
        """The raw numbers of all `names`."""
        parts = []
        for place, tensor in enumerate(self.stored):
            rows = tensor.shape[0] if tensor.shape else 1
            start, stop = 0, rows
            if self.expert is not None:
                start, stop = (part * (rows // self.experts) for part in (self.expert, self.expert + 1))
            parts.append(tensor.read_rows(checkpoint.files, start, stop).reshape(self.shape(place)))
        return self.rule.form.to_hf(parts, checkpoint.config, self.orders)


@dataclass(frozen=True)
class TrainingCheckpoint(Checkpoint):
    """A training checkpoint behind `Checkpoint`'s interface. `skipped`: stored names left out, and why."""

    config: ModelConfig = field(kw_only=True)
    origins: Mapping[str, tuple[Origin, int]] = field(kw_only=True, repr=False)
    skipped: Mapping[str, str] = field(kw_only=True, repr=False)
    orders: Orders = field(kw_only=True)
    _last: dict[int, list[Array]] = field(default_factory=dict, repr=False, compare=False)

    def read_raw(self, name: str) -> Array:
        """All of a tensor as raw numbers."""
        origin, place = self.origins[name]
        if id(origin) not in self._last:
            self._last.clear()  # parts of one fused tensor are asked for one after the other
            self._last[id(origin)] = origin.read(self)
        return self._last[id(origin)][place]

    def stored_in(self) -> set[Path]:
        """The files of all pieces, which may be those of several ranks."""
        return {piece.tensor.file for origin, _ in self.origins.values() for piece in origin.pieces()}

    def facts(self) -> Iterator[list[object]]:
        """As `Checkpoint.facts`: what each tensor is made of, and in which order."""
        yield from super().facts()
        for name, (origin, place) in self.origins.items():
            yield [name, place, origin.names, origin.expert, origin.experts, repr(origin.orders)]
            for piece in origin.pieces():
                yield [piece.tensor.file.name, piece.tensor.name, piece.tensor.extents, piece.ranges]

    def pieces_into(self, name: str, out: Array, dtype: str, index: Index | None = None) -> Iterator[tuple[int, Array]]:
        """As `Checkpoint.pieces_into`; one tensor of the files is in memory for it."""
        info = self.info(name)
        if out.shape != slice_shape(info, index) or not out.flags.c_contiguous:
            raise CheckpointError(f"tensor {name}: cannot fill an array of shape {list(out.shape)}")
        selected = tuple(slice(*axis) for axis in bounds(name, info.shape, index))
        raw = self.read_raw(name)[selected] if selected else self.read_raw(name)
        if dtype == info.dtype:
            out[...] = raw
            yield 0, out.reshape(-1)
            return
        stored = stored_type(info.dtype)
        source, flat = np.ascontiguousarray(raw).reshape(-1), out.reshape(-1)
        step = CHUNK_BYTES // 4
        for start in range(0, flat.size, step):
            part, numbers = flat[start : start + step], source[start : start + step]
            values = part if dtype == "float32" else np.empty(part.size, np.float32)
            decode(numbers, stored, values)
            if values is not part:
                part[...] = encode(values, dtype)
            yield start, part


def open_checkpoint(folder: Path, config: ModelConfig) -> Checkpoint:
    """The weights of a folder, Hugging Face's or of a training run, under Hugging Face names."""
    if is_training_checkpoint(folder):
        return open_training(folder, config)
    return Checkpoint.open(folder, weight_block_size=config.weight_block_size)


def open_training(
    source: Path,
    config: ModelConfig,
    orders: Orders | None = None,
    *,
    strategy: Path | None = None,
    suffix: str | None = None,
) -> TrainingCheckpoint:
    """A training checkpoint: a file, a folder of files, or `rank_N` folders with their strategy (`read_contents`).

    orders: of fused tensors, beyond what `msds_layout.json` says. CheckpointError names every tensor that no layout
    knows, whose order is not known, or whose partner is missing.
    """
    said = read_record(source if source.is_dir() else source.parent)
    orders = (orders or Orders()).over(said.orders)
    contents = read_contents(source, strategy=strategy, suffix=suffix)
    groups = _groups(source, contents, config)
    faults: list[str] = []
    origins: dict[str, tuple[Origin, int]] = {}
    tensors: dict[str, TensorInfo] = {}
    for (rule, numbers), stored in groups.items():
        try:
            for origin, shapes in _origins(rule, dict(numbers), stored, config, orders):
                for place, (name, shape) in enumerate(zip(origin.names, shapes, strict=True)):
                    if name in origins:
                        other = origins[name][0].stored[0].name
                        raise CheckpointError(f"{name} would be made of {other} and of {origin.stored[0].name}")
                    origins[name] = (origin, place)
                    tensors[name] = _info(name, shape, origin)
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError("\n  ".join([f"{source} cannot be read ({len(faults)} faults):", *dict.fromkeys(faults)]))
    _add_copies(origins, tensors, config, said.absent)
    return TrainingCheckpoint(
        source,
        tensors,
        (),
        frozenset(),
        None,
        config=config,
        origins=origins,
        skipped=contents.skipped,
        orders=orders,
    )


_Key = tuple[Rule, tuple[tuple[str, int], ...]]


def _groups(source: Path, contents: Contents, config: ModelConfig) -> dict[_Key, dict[int, StoredTensor]]:
    """Stored tensors by the rule and numbers they share."""
    groups: dict[_Key, dict[int, StoredTensor]] = {}
    unknown = []
    for name, tensor in contents.tensors.items():
        match = match_stored(name)
        if match is None or not match.rule.fits(config):
            unknown.append(name)
            continue
        groups.setdefault((match.rule, tuple(match.numbers.items())), {})[match.place] = tensor
    if unknown:
        raise CheckpointError(
            f"{source}: no known training layout of a {config.model_type} model has {name_some(unknown)}. "
            f"Known are: {known_layouts()}"
        )
    if not groups:
        raise CheckpointError(f"{source} holds no weights, only {name_some(list(contents.skipped))}")
    return groups


def _origins(
    rule: Rule, numbers: dict[str, int], stored: Mapping[int, StoredTensor], config: ModelConfig, orders: Orders
) -> Iterator[tuple[Origin, list[Shape]]]:
    """The Hugging Face tensors of one rule and their shapes, from headers alone."""
    first = next(iter(stored.values()))
    if len(stored) < len(rule.stored):
        absent = [name for place, name in enumerate(rule.stored) if place not in stored]
        raise CheckpointError(f"tensor {first.name} lacks its other part, {fill_stored(absent[0], numbers)}")
    parts = tuple(stored[place] for place in range(len(rule.stored)))
    if len({tensor.dtype for tensor in parts}) > 1:
        raise CheckpointError(f"{' and '.join(tensor.name for tensor in parts)} differ in number type")
    experts = experts_of(config)
    if rule.is_stacked and not (
        experts
        and (first.shape[:1] == (experts,) if len(first.shape) == 3 else len(first.shape) == 2)
        and first.shape[0] % experts == 0
    ):
        raise CheckpointError(
            f"tensor {first.name} {list(first.shape)} is stacked over experts, but n_routed_experts is {experts}"
        )
    for expert in range(experts) if rule.is_stacked else [None]:
        named = numbers if expert is None else {**numbers, "e": expert}
        names = tuple(fill(name, named, config) for name in rule.hf)
        origin = Origin(rule, names, parts, orders, expert, experts)
        shapes = [origin.shape(place) for place in range(len(parts))]
        origin = Origin(rule, names, parts, _settled(origin, shapes[0], config, orders), expert, experts)
        try:
            yield origin, _hf_shapes(rule, tuple(shapes), config, origin.orders)
        except ValueError as error:
            shown = " and ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in parts)
            raise CheckpointError(f"tensor {shown} does not fit the config: {error}") from None


def _settled(origin: Origin, shape: Shape, config: ModelConfig, orders: Orders) -> Orders:
    """The orders to read a tensor with. That of a stacked expert follows from its shape unless it is square."""
    key = origin.rule.form.order
    if origin.rule.form is EXPERT and isinstance(config, DeepseekConfig) and orders.experts is None:
        want = (config.moe_intermediate_size, config.hidden_size)
        want = want[::-1] if origin.names[0].endswith("down_proj.weight") else want
        if want[0] != want[1]:
            return Orders(experts="in_out" if shape == want[::-1] else "out_in").over(orders)
    if key is not None and key not in orders.said():
        raise CheckpointError(order_needed(key, origin.stored[0].name))
    return orders


@lru_cache(maxsize=256)
def _hf_shapes(rule: Rule, shapes: tuple[Shape, ...], config: ModelConfig, orders: Orders) -> list[Shape]:
    """The shapes that a form makes, found by making them of empty numbers."""
    parts = [np.empty(shape, np.uint8) for shape in shapes]
    return [array.shape for array in rule.form.to_hf(parts, config, orders)]


def _info(name: str, shape: Shape, origin: Origin) -> TensorInfo:
    """Type and shape as they are; file and offsets say where reading begins, so that loads go front to back."""
    piece = origin.stored[0].pieces[0].tensor
    start = piece.extents[0][0] if piece.extents else 0
    size = stored_type(piece.dtype).nbytes * int(np.prod(shape, dtype=np.int64))
    if origin.expert is not None:
        start += origin.expert * size
    return TensorInfo(name, piece.dtype, shape, piece.file, (start, start + size))


def shared_by_mtp(config: ModelConfig) -> dict[str, str]:
    """What training layouts may leave out of MTP layers, and what it then is a copy of.

    The embedding and the head always are copies. The norm is one in MindFormers 1.x alone, whose MTP layers have none.
    """
    norms = {
        f"model.layers.{config.num_hidden_layers + depth}.shared_head.norm.weight": "model.norm.weight"
        for depth in range(getattr(config, "num_nextn_predict_layers", 0))
    }
    return mtp_copies(config) | norms


def _add_copies(
    origins: dict[str, tuple[Origin, int]], tensors: dict[str, TensorInfo], config: ModelConfig, absent: frozenset[str]
) -> None:
    """Gives stored MTP layers the tensors that they share with the main model, the `absent` ones excepted."""
    for name, original in shared_by_mtp(config).items():
        layer = ".".join(name.split(".")[:3])
        is_wanted = name not in origins and name not in absent
        if is_wanted and f"{layer}.eh_proj.weight" in origins and original in origins:
            origins[name] = origins[original]
            tensors[name] = replace(tensors[original], name=name)


def fill_stored(name: str, numbers: dict[str, int]) -> str:
    """A stored name pattern with its numbers."""
    for key, value in numbers.items():
        name = name.replace("{" + key + "}", str(value))
    return name
