"""Folders between Hugging Face's names and MindSpore's training layouts: every number moved, none changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from msds.checkpoint import (
    Checkpoint,
    TensorSource,
    check_checkpoint,
    shares_embedding,
    write_checkpoint,
)
from msds.checkpoint.dtypes import Array
from msds.checkpoint.folders import copy_companions, new_folder
from msds.checkpoint.shards import name_some
from msds.checkpoint.tied import are_equal
from msds.config import ModelConfig, read_config
from msds.errors import CheckpointError
from msds.layouts.orders import LAYOUT_NAME, Orders
from msds.layouts.rules import LAYOUTS, Rule, experts_of, fill, rule_for_hf
from msds.layouts.view import TrainingCheckpoint, fill_stored, open_checkpoint, open_training, shared_by_mtp
from msds.models.names import mtp_copies
from msds.models.specs import model_specs
from msds.weights import checkpoint_entries, settle_mtp, stored_skips

NAME_MAP = "param_name_map.json"
"""Tensor to file, as MindFormers reads it."""


def convert_to_hf(
    source: Path,
    target: Path,
    orders: Orders | None = None,
    *,
    config_from: Path | None = None,
    strategy: Path | None = None,
    suffix: str | None = None,
    compare: Path | None = None,
    progress: bool | None = None,
) -> TrainingCheckpoint:
    """Writes a training checkpoint as the Hugging Face folder `target`, in the number types it is stored in.

    source, orders, strategy, suffix: as for `open_training`. config_from: a folder with config.json and tokenizer, or
    a config.json; default: `source`. compare: a folder whose tensors the written ones must be (`compare_folders`).
    Returns the checkpoint that was read, closed. CheckpointError or ConfigError before anything is written; `target`
    appears when it is complete and compared.
    """
    home = config_from or (source if source.is_dir() else source.parent)
    if not (home / "config.json" if home.is_dir() else home).is_file():
        raise CheckpointError(
            f"{home} has no config.json, which says what the sizes mean: give --config FOLDER, or put the model's "
            "config.json and tokenizer there"
        )
    config = read_config(home)
    if compare is not None:
        read_config(compare)  # refuse a wrong folder now, not after the writing
    checkpoint = open_training(source, config, orders, strategy=strategy, suffix=suffix)
    try:
        _check(checkpoint, config)
        with new_folder(target) as folder:
            if home.is_file():
                shutil.copyfile(home, folder / "config.json")
            copy_companions(home if home.is_dir() else home.parent, folder)
            copy_companions(source if source.is_dir() else source.parent, folder)
            write_checkpoint(folder, _hf_sources(checkpoint), progress=progress)
            if compare is not None:
                compare_folders(folder, compare)
    finally:
        checkpoint.close()
    return checkpoint


def convert_to_mindspore(
    source: Path,
    target: Path,
    layout: str = "mindformers",
    orders: Orders | None = None,
    *,
    compare: Path | None = None,
    progress: bool | None = None,
) -> Path:
    """Writes a Hugging Face folder in a training layout: safetensors, MindFormers' name map, config and tokenizer.

    `msds_layout.json` beside them says the orders and which copies were absent, so that the folder loads, and converts
    back to the same bytes. Needs memory for the largest tensor, which is that of all experts of a layer.
    CheckpointError for float8 weights, and for what the layout has no place for.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout {layout!r} is unknown: {'; '.join(LAYOUTS)}")
    orders = (orders or Orders()).with_defaults()
    config = read_config(source)
    if compare is not None:
        read_config(compare)
    checkpoint = Checkpoint.open(source, weight_block_size=config.weight_block_size)
    try:
        _check(checkpoint, config)
        sources = list(_stored_sources(checkpoint, config, layout, orders))
        with new_folder(target) as folder:
            copy_companions(source, folder)
            write_checkpoint(folder, sources, metadata={"format": "ms"}, progress=progress)
            written = Checkpoint.open(folder)
            names = {name: info.file.name for name, info in sorted(written.tensors.items())}
            _write_json(folder / NAME_MAP, names)
            record = {"layout": layout, "orders": orders.said()}
            absent = sorted(set(mtp_copies(config)) - set(checkpoint.tensors))
            _write_json(folder / LAYOUT_NAME, record | ({"absent": absent} if absent else {}))
            if compare is not None:
                compare_folders(folder, compare)
    finally:
        checkpoint.close()
    return target


def compare_folders(folder: Path, reference: Path) -> int:
    """The number of tensors, all bit for bit the same in both folders, whatever layouts these have.

    CheckpointError says which tensors one of them lacks, or which layer differs first, and in which tensors.
    """
    config = read_config(reference)
    first, second = open_checkpoint(folder, config), open_checkpoint(reference, config)
    try:
        if absent := [name for name in second.tensors if name not in first]:
            raise CheckpointError(f"{name_some(absent)} of {reference} would be absent")
        if added := [name for name in first.tensors if name not in second]:
            raise CheckpointError(f"{name_some(added)} would be there, but {reference} lacks them")
        names = sorted(first.tensors, key=_layer)
        different = [name for name in names if not _is_same(first, second, name)]
    finally:
        first.close()
        second.close()
    if different:
        where = _layer(different[0])[0]
        shown = [name for name in different if _layer(name)[0] == where]
        place = "the embedding" if where < 0 else "behind the layers" if where == _BEHIND else f"layer {where}"
        raise CheckpointError(
            f"the weights differ from those of {reference} in {len(different)} of {len(names)} tensors, "
            f"first in {place}: {name_some(shown)}. Exchanged gate and up, or another order of "
            "fused rows, look like this: see --order"
        )
    return len(names)


def _check(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Every parameter of the model has its tensor, and no tensor is left."""
    settled = settle_mtp(checkpoint, config, None)
    if not checkpoint.faults:
        shares_embedding(checkpoint, config.tie_word_embeddings)
    entries = checkpoint_entries(model_specs(settled).spec(settled), settled)
    ledger = check_checkpoint(checkpoint, entries, stored_skips(config, settled))
    if ledger.strays:
        raise CheckpointError(
            f"{checkpoint.folder} has tensors that this config has no parameter for: {name_some(ledger.strays)}. "
            "They would be lost: is it the config of this checkpoint?"
        )


def _hf_sources(checkpoint: TrainingCheckpoint) -> Iterable[TensorSource]:
    for name, info in checkpoint.tensors.items():
        yield TensorSource(name, info.dtype, info.shape, partial(checkpoint.read, name, raw=True))


@dataclass(frozen=True)
class _Group:
    """One stored group: its rule and numbers, and the Hugging Face names, per expert where it is stacked."""

    rule: Rule
    numbers: dict[str, int]
    names: tuple[tuple[str, ...], ...]

    def make(self, checkpoint: Checkpoint, config: ModelConfig, orders: Orders, place: int) -> Array:
        parts = []
        for names in self.names:
            arrays = [checkpoint.read(name, raw=True) for name in names]
            parts.append(self.rule.form.to_stored(arrays, config, orders)[place])
        if not self.rule.is_stacked:
            return parts[0]
        return np.stack(parts) if self.rule.stack == 3 else np.concatenate(parts)


def _stored_sources(checkpoint: Checkpoint, config: ModelConfig, layout: str, orders: Orders) -> Iterable[TensorSource]:
    for group in _groups(checkpoint, config, layout):
        first = [checkpoint.info(name) for name in group.names[0]]
        dtypes = {checkpoint.info(name).dtype for names in group.names for name in names}
        if len(dtypes) > 1:
            raise CheckpointError(f"{name_some([info.name for info in first])} become one tensor, but differ in type")
        empty = [np.empty(info.shape, np.uint8) for info in first]
        try:
            shapes = [array.shape for array in group.rule.form.to_stored(empty, config, orders)]
        except ValueError as error:
            raise CheckpointError(f"tensor {first[0].name} {list(first[0].shape)} does not fit: {error}") from None
        for place, (pattern, shape) in enumerate(zip(group.rule.stored, shapes, strict=True)):
            count = len(group.names)
            if group.rule.is_stacked:
                shape = (count, *shape) if group.rule.stack == 3 else (count * shape[0], *shape[1:])
            make = partial(group.make, checkpoint, config, orders, place)
            yield TensorSource(fill_stored(pattern, group.numbers), first[0].dtype, shape, make)


def _groups(checkpoint: Checkpoint, config: ModelConfig, layout: str) -> Iterable[_Group]:
    """Every tensor in one group, those excepted that the layout does not store because they are copies."""
    groups: dict[tuple[Rule, tuple[tuple[str, int], ...]], _Group] = {}
    copies = shared_by_mtp(config)
    for name, info in checkpoint.tensors.items():
        if info.dtype.startswith("float8"):
            raise CheckpointError(
                f"tensor {name} is {info.dtype}: a training layout has no place for block scales; start from the "
                "bfloat16 weights of this model"
            )
    for name in checkpoint.tensors:
        if name.endswith("rotary_emb.inv_freq"):  # computed from the config
            continue
        found = rule_for_hf(name, layout, config)
        if found is None:
            _refuse_unless_copy(checkpoint, name, copies, layout, config)
            continue
        rule, numbers = found
        stored_numbers = {key: value for key, value in numbers.items() if not (rule.is_stacked and key == "e")}
        experts: Sequence[dict[str, int]] = [numbers]
        if rule.is_stacked:
            experts = [{**stored_numbers, "e": expert} for expert in range(experts_of(config))]
        names = tuple(tuple(fill(pattern, one, config) for pattern in rule.hf) for one in experts)
        if absent := [one for group in names for one in group if one not in checkpoint]:
            raise CheckpointError(f"tensor {name} becomes part of a fused one, which also needs {name_some(absent)}")
        groups.setdefault((rule, tuple(stored_numbers.items())), _Group(rule, stored_numbers, names))
    return groups.values()


def _refuse_unless_copy(
    checkpoint: Checkpoint, name: str, copies: dict[str, str], layout: str, config: ModelConfig
) -> None:
    """A tensor without a place in the layout may only be one that comes back as a copy of another."""
    original = copies.get(name)
    homes = [other for other in LAYOUTS if rule_for_hf(name, other, config)]
    if original is None:
        where = f"; {' and '.join(homes)} has one" if homes else ""
        raise CheckpointError(f"layout {layout} has no place for tensor {name}{where}")
    if original not in checkpoint or not are_equal(checkpoint, name, original):
        where = f"use --layout {homes[0]}, or " if homes else ""
        raise CheckpointError(
            f"layout {layout} stores {original} in place of {name}, but the two differ: {where}"
            "leave the MTP layers out (num_nextn_predict_layers 0 and no tensors of theirs)"
        )


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BEHIND = 1 << 30


def _layer(name: str) -> tuple[int, str]:
    """Where a tensor is in the model: embedding, layers in order, what follows."""
    if match := _LAYER.match(name):
        return int(match[1]), name
    return (-1 if name.startswith("model.embed_tokens") else _BEHIND), name


def _is_same(first: Checkpoint, second: Checkpoint, name: str) -> bool:
    if first.info(name).dtype != second.info(name).dtype:
        return False
    return bool(np.array_equal(first.read(name, raw=True), second.read(name, raw=True)))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
