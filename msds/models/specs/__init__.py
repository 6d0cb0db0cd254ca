"""What a model's arrays will be, from its config alone, and which rank holds which part of them. No MindSpore."""

from types import ModuleType

from msds.config import DeepseekConfig, ModelConfig
from msds.models.specs import deepseek, llama
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import Tree, tree_flatten


def model_specs(config: ModelConfig) -> ModuleType:
    """The module with `spec`, `cache_spec`, `derived_spec` and `derive` for a config."""
    return deepseek if isinstance(config, DeepseekConfig) else llama


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the tree that a model keeps on one rank that holds all of it: the canonical leaves and the derived."""
    return tree_bytes(model_specs(config).derived_spec(config, dtype))


def block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one cache block of `block_size` tokens, all layers together, on one rank that holds all of it."""
    return tree_bytes(model_specs(config).cache_spec(config, 1, block_size, dtype))


def tree_bytes(spec_tree: Tree) -> int:
    """Bytes of all arrays of a spec tree."""
    leaves: list[ArraySpec] = tree_flatten(spec_tree)[0]
    return sum(leaf.nbytes for leaf in leaves)
