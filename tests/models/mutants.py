"""Mutants of the product: a source file with one formula changed, put in the place of the original.

Graph mode parses the source of the functions it compiles, so a mutant is a file: the original's text with some
passages replaced, imported under a name of its own. Every passage must occur exactly once, so a mutation that no
longer fits the code fails instead of passing for nothing.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import msds.models.cut
import msds.models.deepseek
import msds.models.ends
import msds.models.llama
import msds.models.rotary
import msds.models.specs.deepseek
import msds_ops.attention
import msds_ops.cache
import msds_ops.linear
import msds_ops.moe
import msds_ops.rope

FILES: dict[str, ModuleType] = {
    "cut": msds.models.cut,
    "deepseek": msds.models.deepseek,
    "deepseek_specs": msds.models.specs.deepseek,
    "llama": msds.models.llama,
    "ends": msds.models.ends,
    "rotary": msds.models.rotary,
    "attention": msds_ops.attention,
    "cache": msds_ops.cache,
    "linear": msds_ops.linear,
    "moe": msds_ops.moe,
    "rope": msds_ops.rope,
}
_NUMBERS = itertools.count()


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, changes: dict[str, str]) -> None:
    """Until the test ends, every model that is loaded uses `file` with `changes`: old passage -> new passage."""
    original = FILES[file]
    source = inspect.getsource(original)
    for old, new in changes.items():
        assert source.count(old) == 1, f"{file}.py has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    name = f"mutant_{next(_NUMBERS)}_{file}"
    path = folder / f"{name}.py"
    path.write_text(source)
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    mutant = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, name, mutant)
    specification.loader.exec_module(mutant)
    monkeypatch.setitem(sys.modules, original.__name__, mutant)  # model_functions imports a family by its name
    for user in FILES.values():
        for attribute, value in list(vars(user).items()):
            is_defined_there = value is vars(original).get(attribute) and not attribute.startswith("__")
            # what the original only imports is the same object in the mutant
            if is_defined_there and value is not vars(mutant)[attribute]:
                monkeypatch.setattr(user, attribute, vars(mutant)[attribute])


def shortened(folder: Path, into: Path, layer: int) -> Path:
    """A copy of a single-file checkpoint whose only layer, beside the MTP layers, is `layer`: it compiles faster."""
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    kept: dict[str, torch.Tensor] = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            match = re.match(r"model\.layers\.(\d+)\.(.*)", name)
            if match is None:
                kept[name] = file.get_tensor(name)
            elif int(match[1]) == layer:
                kept[f"model.layers.0.{match[2]}"] = file.get_tensor(name)
            elif int(match[1]) >= layers:
                kept[f"model.layers.{int(match[1]) - layers + 1}.{match[2]}"] = file.get_tensor(name)
    shutil.copytree(folder, into)
    save_file(kept, into / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": 1}
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = int("model.layers.0.mlp.gate.weight" not in kept)
    (into / "config.json").write_text(json.dumps(config))
    return into
