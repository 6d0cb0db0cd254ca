"""What the nodes of a program must have in common, as named facts: launchers compare them before anything starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from msds import __version__
from msds.checkpoint import MANIFEST_NAME
from msds.checkpoint.samples import sample_file
from msds.config import read_config
from msds.layouts import open_checkpoint
from msds.options import EngineOptions

FREE_OPTIONS = ("threads", "memory_fraction", "max_waiting")
"""Options of the engine that may differ: ranks agree on the least number of cache blocks, rank 0 alone has a queue."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SHOWN = 3
"""Differences that are named; the others are counted."""


def model_facts(path: str | Path, plan: str, engine: Mapping[str, Any]) -> dict[str, str]:
    """What ranks that hold a model together must have in common: software, plan, options, config and weights.

    engine: options of `LLM`; equal values are equal facts, given or default. MsdsError for what cannot be read.
    """
    config = read_config(path)
    known = {field.name for field in fields(EngineOptions)}
    options = EngineOptions(**{name: value for name, value in engine.items() if name in known})
    settled = {"max_model_len": options.resolve_max_model_len(config), "dtype": options.resolved_dtype}
    found = software_facts() | {"--plan": plan}
    for name in sorted(known.difference(FREE_OPTIONS)):
        found[f"--{name.replace('_', '-')}"] = str(settled.get(name, getattr(options, name)))
    for field in fields(config):
        found[f"{field.name} of config.json"] = repr(getattr(config, field.name))
    return found | weight_facts(path)


def software_facts() -> dict[str, str]:
    """Versions of what computes."""
    return {"version of msds": __version__, "version of mindspore": version("mindspore")}


def weight_facts(path: str | Path) -> dict[str, str]:
    """The files that tensors and the tokenizer are read from: sizes and samples, and a manifest that lies there.

    What `sample_file` cannot notice is not noticed here either: small changes in large files. `--check-sha256`, the
    default where the folder has a manifest, notices those on every node, and the manifest is compared here.
    """
    folder, config = Path(path), read_config(path)
    checkpoint = open_checkpoint(folder, config)
    try:
        tensors = hashlib.sha256(json.dumps(list(checkpoint.facts())).encode()).hexdigest()
        files = sorted(checkpoint.stored_in())
    finally:
        checkpoint.close()
    files += [folder / name for name in (*TOKENIZER_FILES, MANIFEST_NAME) if (folder / name).is_file()]
    found = {}
    for file in files:
        sample = sample_file(file)
        name = str(file.relative_to(folder)) if file.is_relative_to(folder) else file.name
        found[name] = f"{sample.size:,} bytes with samples {sample.digest[:12]}"
    return found | {"tensors of the checkpoint": tensors[:12]}


def differences(ours: Mapping[str, str], theirs: Mapping[str, str], our_node: int, their_node: int) -> str | None:
    """Which facts differ and how, or None: one line."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not names:
        return None
    found = [
        f"{name} is {ours.get(name, 'absent')} on node {our_node} and {theirs.get(name, 'absent')} on node {their_node}"
        for name in names[:SHOWN]
    ]
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        f"nodes {our_node} and {their_node} differ: {'; '.join(found)}{more}: give every node the same version, "
        "options and checkpoint"
    )
