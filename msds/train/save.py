"""A trained tree as a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from msds.checkpoint.dtypes import encode
from msds.checkpoint.folders import copy_companions, new_folder
from msds.checkpoint.save import TensorSource, write_checkpoint
from msds.config import ModelConfig
from msds.errors import CheckpointError
from msds.models.names import hf_names, is_stacked, mtp_copies
from msds_graphs.trees import Tree, tree_flatten


def weight_sources(tree: Tree, config: ModelConfig, dtype: str) -> list[TensorSource]:
    """The tensors of a Hugging Face checkpoint for a canonical tree; float32 leaves of gates stay float32.

    MTP layers get their copies of embedding and head, as in DeepSeek's checkpoints: other engines look for them there.
    """
    leaves, structure = tree_flatten(tree)
    sources: list[TensorSource] = []
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        stored = "float32" if "e_score_correction_bias" in path else dtype
        names = hf_names(path, config)
        parts = leaf if is_stacked(path) else [leaf]
        for name, part in zip(names, parts, strict=True):
            sources.append(TensorSource(name, stored, part.shape, partial(encode, part, stored)))
    if "mtp" in tree:
        named = {source.name: source for source in sources}
        sources += [replace(named[original], name=name) for name, original in mtp_copies(config).items()]
    return sources


def write_folder(target: Path, source: Path, tree: Tree, config: ModelConfig, *, dtype: str = "bfloat16") -> Path:
    """A trained model as a new Hugging Face folder: config and tokenizer of `source`, weights of `tree` in `dtype`.

    CheckpointError unless `target` is absent or an empty folder, and for weights that are no numbers. It appears when
    it is whole.
    """
    leaves, structure = tree_flatten(tree)
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        if not np.isfinite(leaf).all():
            raise CheckpointError(f"{path} has values that are not finite: there is nothing to export")
    with new_folder(target) as folder:
        copy_companions(source, folder)
        settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
        for stale in ("dtype", "quantization_config", "compression_config"):
            settings.pop(stale, None)
        settings["torch_dtype"] = dtype
        (folder / "config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
        write_checkpoint(folder, weight_sources(tree, config, dtype))
    return target
