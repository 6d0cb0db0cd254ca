"""Model configs: frozen dataclasses with Hugging Face's field names, read strictly from a folder."""

from msds.config.deepseek import DeepseekConfig
from msds.config.llama import LlamaConfig
from msds.config.rope import ROPE_TYPES, RopeScaling

ModelConfig = DeepseekConfig | LlamaConfig

__all__ = ["ROPE_TYPES", "DeepseekConfig", "LlamaConfig", "ModelConfig", "RopeScaling", "max_context"]


def max_context(config: ModelConfig) -> int:
    """Largest number of positions, prompt and answer together, that the config lets a text have.

    max_position_embeddings, except under dynamic scaling: there the original length, because the frequencies
    of a longer text would differ from those that its cached keys were rotated with.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        return min(scaling.original_max_position_embeddings, config.max_position_embeddings)
    return config.max_position_embeddings
