"""From a checkpoint folder to the canonical parameter tree. No MindSpore: arrays are NumPy until a step binds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from msds import __version__
from msds.checkpoint import (
    Checkpoint,
    Entry,
    Held,
    ShardCache,
    Skip,
    check_shard_folder,
    load,
    shard_file,
    shard_key,
    shares_embedding,
)
from msds.config import DeepseekConfig, ModelConfig
from msds.errors import CheckpointError, OptionError
from msds.models.names import hf_names, is_stacked, skipped_tensors
from msds.models.specs import model_specs
from msds.models.specs.parts import Part, local_specs, rank_parts, with_tables
from msds.models.specs.placement import ExpertPlacement
from msds_graphs.plan import Plan
from msds_graphs.trees import Tree, tree_flatten, tree_unflatten


def has_mtp_layers(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether the files hold the MTP layers that the config announces."""
    if not isinstance(config, DeepseekConfig) or not config.num_nextn_predict_layers:
        return False
    return f"model.layers.{config.num_hidden_layers}.eh_proj.weight" in checkpoint


def settle_mtp(checkpoint: Checkpoint, config: ModelConfig, mtp: bool | None) -> ModelConfig:
    """The config of what will be loaded: without MTP layers if they are unwanted (False) or not stored (None).

    CheckpointError when they are wanted (True) and absent.
    """
    present = has_mtp_layers(checkpoint, config)
    if mtp and not present:
        raise CheckpointError(
            f"{checkpoint.folder} has no MTP layer (num_nextn_predict_layers is "
            f"{getattr(config, 'num_nextn_predict_layers', 0)}, and model.layers.{config.num_hidden_layers}."
            "eh_proj.weight is not stored): speculation needs one; turn it off or use the checkpoint that has it"
        )
    return config if present and mtp is not False else without_mtp(config)


def without_mtp(config: ModelConfig) -> ModelConfig:
    """The config of the main model alone."""
    return replace(config, num_nextn_predict_layers=0) if isinstance(config, DeepseekConfig) else config


def checkpoint_entries(spec: Tree, config: ModelConfig, parts: Mapping[str, Part] | None = None) -> list[Entry]:
    """One ledger entry per parameter of a spec tree: all of it, or the part that a rank holds."""
    leaves, structure = tree_flatten(spec)
    entries = []
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        entry = Entry(path, hf_names(path, config), leaf.shape, leaf.dtype, is_stacked(path))
        if parts is not None:
            part = parts[path]
            entry = replace(entry, index=part.index, rows=part.experts, padding=part.padding)
        entries.append(entry)
    return entries


def load_weights(
    checkpoint: Checkpoint,
    spec: Tree,
    config: ModelConfig,
    skipped: Sequence[Skip],
    parts: Mapping[str, Part] | None = None,
    *,
    progress: bool | None = None,
) -> Tree:
    """The canonical tree of NumPy arrays in the spec's dtypes, every parameter filled exactly once.

    parts: path -> what of it this rank holds (`rank_parts`); nothing else is read. None: all.
    `config` is the settled one (`settle_mtp`). Raises CheckpointError with all faults at once, before allocating.
    """
    if not checkpoint.faults:  # a head that a damaged file may hold is not a head that is missing
        shares_embedding(checkpoint, config.tie_word_embeddings)
    entries = checkpoint_entries(spec, config, parts)
    arrays: dict[str, Any] = load(checkpoint, entries, skipped, progress=progress)
    return tree_unflatten(tree_flatten(spec)[1], [arrays[entry.path] for entry in entries])


def stored_skips(stored: ModelConfig, settled: ModelConfig) -> tuple[Skip, ...]:
    """What is knowingly left in the files: `stored` as config.json says, `settled` as it will be loaded."""
    return skipped_tensors(stored, has_mtp=getattr(settled, "num_nextn_predict_layers", 0) > 0)


def derived_tree(
    params: Tree, functions: ModuleType, config: ModelConfig, placements: Sequence[ExpertPlacement]
) -> Tree:
    """What is bound of a rank's canonical tree: with the derived leaves and the tables of placements beside it."""
    return with_tables(functions.derive(params, config=config), config, placements)


def check_shard_cache(folder: Path | str, model: Path | str) -> None:
    """OptionError where the folder cannot be one for caches of this model's folder."""
    check_shard_folder(folder)
    if Path(folder).resolve() == Path(model).resolve():
        raise OptionError(f"shard_cache is {str(folder)!r}, the model's own folder: name one of its own")


def open_shard_cache(
    folder: Path | str,
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: str,
    plan: Plan,
    placements: Sequence[ExpertPlacement],
) -> ShardCache | None:
    """The file of what `derived_tree` gives for these; None for a damaged checkpoint, which cannot be loaded anyway.

    It supersedes those of the same folder, plan, rank, number type, MTP layers, expert slots and implementations.
    OptionError as `check_shard_cache`.
    """
    check_shard_cache(folder, checkpoint.folder)
    if checkpoint.faults:
        return None
    ranks, model = plan.ranks, checkpoint.folder.resolve()
    asked = {
        "dtype": dtype,
        "plan": ranks.plan.to_json(),
        "rank": ranks.rank,
        "implementations": plan.impl,
    }
    purpose = asked | {
        "folder": str(model),
        "mtp": getattr(config, "num_nextn_predict_layers", 0),
        "slots": placements[0].slots_per_rank if placements else 0,
    }
    ingredients = asked | {
        "version": __version__,
        "config": repr(config),
        "placements": [[one.num_experts, one.slots] for one in placements],
    }
    label = f"{model.name}.{ranks.plan}.rank{ranks.rank}"
    return shard_file(folder, label, purpose, shard_key(checkpoint, ingredients))


def through_cache(cache: ShardCache, spec: Tree, convert: Callable[[], Tree], *, progress: bool | None = None) -> Tree:
    """The tree of a cache's file if that is there and whole; otherwise `convert()`, which is then written to it.

    spec: ArraySpecs, or arrays of the same type and shape, of what `convert` gives.
    """
    leaves, structure = tree_flatten(spec)
    wanted = {
        path: Held(str(leaf.dtype), tuple(leaf.shape)) for path, leaf in zip(structure.paths(), leaves, strict=True)
    }
    found = cache.read(wanted, progress=progress)
    if found is None:
        tree = convert()
        values = zip(structure.paths(), tree_flatten(tree)[0], strict=True)
        cache.write({path: (value, wanted[path].dtype) for path, value in values}, progress=progress)
        return tree
    return tree_unflatten(structure, [found[path] for path in structure.paths()])


def held_spec(config: ModelConfig, dtype: str, plan: Plan, placements: Sequence[ExpertPlacement]) -> Tree:
    """The shapes of what `derived_tree` gives on a rank."""
    spec = model_specs(config).derived_spec(config, dtype)
    return with_tables(local_specs(spec, rank_parts(spec, config, plan.ranks, placements)), config, placements)
