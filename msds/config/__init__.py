"""Model configs: frozen dataclasses with Hugging Face's field names, read strictly from a folder."""

from msds.config.counting import ParameterCount, count_parameters
from msds.config.deepseek import DeepseekConfig
from msds.config.generation import GenerationConfig, read_generation_config
from msds.config.llama import LlamaConfig
from msds.config.reading import (
    MODEL_TYPES,
    ModelConfig,
    config_json,
    config_warnings,
    parse_config,
    read_config,
    read_json,
)
from msds.config.rope import ROPE_TYPES, RopeScaling

__all__ = [
    "MODEL_TYPES",
    "ROPE_TYPES",
    "DeepseekConfig",
    "GenerationConfig",
    "LlamaConfig",
    "ModelConfig",
    "ParameterCount",
    "RopeScaling",
    "config_json",
    "config_warnings",
    "count_parameters",
    "max_context",
    "parse_config",
    "read_config",
    "read_generation_config",
    "read_json",
]


def max_context(config: ModelConfig) -> int:
    """Largest number of positions, prompt and answer together, that the config lets a text have.

    max_position_embeddings, except under dynamic scaling: there the original length, because the frequencies
    of a longer text would differ from those that its cached keys were rotated with.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        return min(scaling.original_max_position_embeddings, config.max_position_embeddings)
    return config.max_position_embeddings
