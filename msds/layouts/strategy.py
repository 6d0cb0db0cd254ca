"""Which slice of a tensor each training rank has saved, from MindSpore's strategy files (protobuf or JSON).

message ParallelStrategyMap { uint32 current_stage = 1; repeated ParallelLayoutItem parallel_layout_item = 3; }
message ParallelLayoutItem { string param_name = 1; ParallelLayouts parallel_layouts = 2; }
message ParallelLayouts { repeated DevMatrix dev_matrix = 1; repeated TensorMap tensor_map = 2; int32 field = 5;
                          int32 opt_weight_shard_step = 6; int32 opt_weight_shard_size = 7; }
DevMatrix and TensorMap: { repeated int dim = 1; }
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from msds.errors import CheckpointError
from msds.layouts.stored import Ranges
from msds.layouts.wire import Field, WireError, fields, integers, text


@dataclass(frozen=True)
class Slicing:
    """How one parameter is cut. `devices`: the mesh, outermost axis first. `axes`: per tensor axis the mesh axes that
    cut it, counted from the innermost (0). `shards`: parts of axis 0 that the optimiser's ranks hold beyond that."""

    devices: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    shards: int = 1

    def counts(self) -> tuple[int, ...]:
        """Parts of every axis."""
        counts = [prod(self._size(axis) for axis in axes) for axes in self.axes]
        if counts:
            counts[0] *= self.shards
        return tuple(counts)

    def ranges(self, rank: int, slice_shape: tuple[int, ...]) -> Ranges:
        """Where the slice of a rank (counted within its pipeline stage) lies in the whole tensor."""
        place = dict(zip(range(len(self.devices) - 1, -1, -1), _coordinates(rank, self.devices), strict=True))
        parts = []
        for axes in self.axes:
            part = 0
            for axis in axes:
                part = part * self._size(axis) + place[axis]
            parts.append(part)
        if self.shards > 1:
            used = {axis for axes in self.axes for axis in axes}
            replica = 0
            for axis in range(len(self.devices) - 1, -1, -1):  # outermost first
                if axis not in used:
                    replica = replica * self._size(axis) + place[axis]
            parts[0] = parts[0] * self.shards + replica % self.shards
        return tuple((part * size, (part + 1) * size) for part, size in zip(parts, slice_shape, strict=True))

    def _size(self, axis: int) -> int:
        return self.devices[len(self.devices) - 1 - axis]


@dataclass(frozen=True)
class Strategy:
    """The slicing of every cut parameter by its name, and the ranks of one pipeline stage."""

    slicings: Mapping[str, Slicing]
    stage_ranks: int


def read_strategy(path: Path) -> Strategy:
    """A strategy file, or all of a folder (one per rank or stage). CheckpointError names file and parameter."""
    files = [path] if path.is_file() else sorted([*path.glob("*.ckpt"), *path.glob("*.json")])
    if not files:
        raise CheckpointError(f"{path} holds no strategy: name MindSpore's strategy .ckpt or .json, or their folder")
    slicings: dict[str, Slicing] = {}
    for file in files:
        items = _json_items(file) if file.suffix == ".json" else _protobuf_items(file)
        for name, layout in items:
            stage, dash, plain = name.partition("-")  # a merged file says "stage-name"
            plain = plain if dash and stage.isdigit() else name
            slicing = _slicing(file, plain, layout)
            if slicings.setdefault(plain, slicing) != slicing:
                raise CheckpointError(
                    f"{file}: {plain} is cut differently in another strategy file: keep one run's files"
                )
    sizes = {prod(slicing.devices) for slicing in slicings.values()}
    if len(sizes) != 1:
        raise CheckpointError(f"{path}: strategies are for {sorted(sizes)} ranks per stage: expected one number")
    return Strategy(slicings, sizes.pop())


_Layout = dict[str, Any]
"""dev_matrix: list; tensor_map: a list per axis; field, step, size: numbers."""


def _slicing(file: Path, name: str, layout: _Layout) -> Slicing:
    devices, axes = tuple(layout["dev_matrix"]), layout["tensor_map"]
    where = f"{file}: {name}"
    cut = tuple(tuple(axis for axis in one if axis != -1) for one in axes)
    used = [axis for one in cut for axis in one]
    if layout["field"] or not devices or min(devices) < 1:
        raise CheckpointError(f"{where}: device matrix {list(devices)} with field {layout['field']} cannot be read")
    if len(set(used)) != len(used) or any(not 0 <= axis < len(devices) for axis in used):
        raise CheckpointError(f"{where}: tensor map {axes} does not fit the device matrix {list(devices)}")
    free = [size for place, size in enumerate(devices) if len(devices) - 1 - place not in used and size > 1]
    shards = layout["size"]
    if not shards or not layout["step"]:
        return Slicing(devices, cut)
    shards = prod(free) if shards == -1 else shards
    if shards < 1 or prod(free) % shards or (shards < prod(free) and len(free) > 1):
        raise CheckpointError(f"{where}: {shards} optimiser shards over the repeated axes {free} cannot be read")
    return Slicing(devices, cut, shards)


def _json_items(file: Path) -> list[tuple[str, _Layout]]:
    try:
        items = json.loads(file.read_text(encoding="utf-8"))["parallel_layout_item"]
        return [
            (
                name,
                {
                    "dev_matrix": [int(size) for size in item["dev_matrix"]],
                    "tensor_map": [_axis_list(axis) for axis in item["tensor_map"]],
                    "field": int(item.get("field", 0)),
                    "step": int(item.get("opt_weight_shard_step", 0)),
                    "size": int(item.get("opt_weight_shard_size", 0)),
                },
            )
            for name, item in items.items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is not a strategy: expected "
            '{"parallel_layout_item": {NAME: {"dev_matrix": [...], "tensor_map": [...]}}}'
            f" ({error})"
        ) from None


def _axis_list(axis: int | Sequence[int]) -> list[int]:
    return [int(axis)] if isinstance(axis, int) else [int(one) for one in axis]


def _protobuf_items(file: Path) -> list[tuple[str, _Layout]]:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        items = []
        for item in fields(descriptor, 0, os.fstat(descriptor).st_size):
            if item.number == 3:
                items.append(_protobuf_item(descriptor, item))
        return items
    except WireError as error:
        raise CheckpointError(f"{file} is not a readable strategy file: {error}") from None
    finally:
        os.close(descriptor)


def _protobuf_item(descriptor: int, item: Field) -> tuple[str, _Layout]:
    name, layout = "", _Layout(dev_matrix=[], tensor_map=[], field=0, step=0, size=0)
    for part in _inside(descriptor, item):
        if part.number == 1:
            name = text(descriptor, part)
        elif part.number == 2:
            for one in _inside(descriptor, part):
                if one.number == 1:
                    layout["dev_matrix"] += _dims(descriptor, one)
                elif one.number == 2:
                    layout["tensor_map"].append(_dims(descriptor, one))
                elif one.number in (5, 6, 7):
                    layout[{5: "field", 6: "step", 7: "size"}[one.number]] = _int32(one.value)
    maps = layout["tensor_map"]
    # One map lists all axes; several maps have one axis each.
    layout["tensor_map"] = [[axis] for axis in maps[0]] if len(maps) == 1 else [one for one in maps if one]
    return name, layout


def _inside(descriptor: int, item: Field) -> list[Field]:
    if item.stretch is None:
        raise WireError(f"field {item.number} is a number where a message belongs")
    return list(fields(descriptor, *item.stretch))


def _dims(descriptor: int, item: Field) -> list[int]:
    return [_int32(value) for part in _inside(descriptor, item) for value in integers(descriptor, part)]


def _int32(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _coordinates(rank: int, devices: tuple[int, ...]) -> list[int]:
    coordinates = []
    for size in reversed(devices):
        coordinates.append(rank % size)
        rank //= size
    return coordinates[::-1]
