"""A trained tree as a Hugging Face folder, and the state of a run that resumes bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msds.checkpoint.dtypes import Array, encode
from msds.checkpoint.folders import copy_companions
from msds.checkpoint.save import TensorSource, tensor_source, write_checkpoint, write_file
from msds.config import ModelConfig
from msds.errors import CheckpointError
from msds.models.names import hf_names, is_stacked
from msds_graphs.trees import Tree, tree_flatten


def weight_sources(tree: Tree, config: ModelConfig, dtype: str) -> list[TensorSource]:
    """The tensors of a Hugging Face checkpoint for a canonical tree; float32 leaves of gates stay float32."""
    leaves, structure = tree_flatten(tree)
    sources: list[TensorSource] = []
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        stored = "float32" if "e_score_correction_bias" in path else dtype
        names = hf_names(path, config)
        parts = leaf if is_stacked(path) else [leaf]
        for name, part in zip(names, parts, strict=True):
            sources.append(TensorSource(name, stored, part.shape, partial(encode, part, stored)))
    return sources


def write_folder(target: Path, source: Path, tree: Tree, config: ModelConfig, *, dtype: str = "bfloat16") -> Path:
    """A trained model as a new Hugging Face folder: config and tokenizer of `source`, weights of `tree` in `dtype`.

    CheckpointError when `target` exists. It appears when it is whole.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists already: name a new folder")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        unfinished.mkdir(parents=True)
        copy_companions(source, unfinished)
        settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
        settings.pop("dtype", None)
        settings["torch_dtype"] = dtype
        (unfinished / "config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
        write_checkpoint(unfinished, weight_sources(tree, config, dtype))
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def write_state(path: Path, arrays: dict[str, Array], record: dict[str, Any]) -> None:
    """One safetensors file with the arrays of a run and, in its metadata, what else it needs to go on; atomic."""
    sources = [tensor_source(name, array) for name, array in arrays.items()]
    write_file(path, sources, metadata={"record": json.dumps(record)})


def read_state(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """What `write_state` wrote; CheckpointError when it is not such a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            record = json.loads((file.metadata() or {})["record"])
            return {name: np.array(file.get_tensor(name)) for name in file.keys()}, record  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a state of a training run: {error}") from None


def named(prefix: str, paths: tuple[str, ...], leaves: Any) -> Iterator[tuple[str, Array]]:
    """Leaves under `prefix.path`."""
    for path, leaf in zip(paths, leaves, strict=True):
        yield f"{prefix}.{path}", leaf
