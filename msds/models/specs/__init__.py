"""What a model's arrays will be, from its config alone, and which rank holds which part of them. No MindSpore."""

from types import ModuleType

from msds.config import DeepseekConfig, ModelConfig
from msds.models.specs import deepseek, llama
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import Tree, tree_flatten


def model_specs(config: ModelConfig) -> ModuleType:
    """The module with `spec`, `cache_spec`, `derived_spec` and `derive` for a config."""
    return deepseek if isinstance(config, DeepseekConfig) else llama


def tree_bytes(spec_tree: Tree) -> int:
    """Bytes of all arrays of a spec tree."""
    leaves: list[ArraySpec] = tree_flatten(spec_tree)[0]
    return sum(leaf.nbytes for leaf in leaves)
