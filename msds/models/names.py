"""Tree paths to Hugging Face tensor names: the whole checkpoint table in one rule per line."""

import re

from msds.config import ModelConfig

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\w+)")
_MTP = re.compile(r"mtp\.(\d+)\.(.*)")


def hf_names(path: str, config: ModelConfig) -> tuple[str, ...]:
    """The stored tensors that make one parameter: one name, or one per expert to be stacked in order."""
    if path.startswith("lm_head."):
        return (path,)
    name = "model." + path
    if match := _MTP.fullmatch(path):  # MTP layers are stored behind the main ones
        name = f"model.layers.{config.num_hidden_layers + int(match[1])}.{match[2]}"
    if match := _EXPERT.fullmatch(name):
        return tuple(f"{match[1]}.{expert}.{match[2]}.weight" for expert in range(config.n_routed_experts))
    return (name,)


def is_stacked(path: str) -> bool:
    """Whether a parameter is stacked from one tensor per expert."""
    return _EXPERT.fullmatch(path) is not None


def skipped_names(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """(pattern, reason) of stored tensors that are knowingly not loaded."""
    skipped = [(r".*\.rotary_emb\.inv_freq", "computed from the config")]
    depths = getattr(config, "num_nextn_predict_layers", 0)
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + depths):
        prefix = rf"model\.layers\.{layer}"
        skipped.append((rf"{prefix}\.embed_tokens\.weight", "an MTP layer shares the main model's embedding"))
        skipped.append((rf"{prefix}\.shared_head\.head\.weight", "an MTP layer shares the main model's head"))
    return tuple(skipped)
