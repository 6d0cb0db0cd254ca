"""Models as pure functions over parameter trees: one file per mathematics, chosen by config.json's `model_type`."""

from __future__ import annotations

import importlib
from types import ModuleType

from msds.config import ModelConfig

FAMILIES = {
    "deepseek_v2": "msds.models.deepseek",
    "deepseek_v3": "msds.models.deepseek",
    "llama": "msds.models.llama",
    "qwen2": "msds.models.llama",
}
"""`model_type` to the module with its spec, cache_spec, derive, forward, prefill, decode, head (and mtp)."""


def model_functions(config: ModelConfig) -> ModuleType:
    """The module of pure functions for a config. Imports MindSpore."""
    return importlib.import_module(FAMILIES[config.model_type])
