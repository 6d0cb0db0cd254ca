"""Tree paths to Hugging Face tensor names: the whole checkpoint table in one rule per line."""

import re

from msds.checkpoint import Skip
from msds.config import DeepseekConfig, ModelConfig

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\w+)")
_MTP = re.compile(r"mtp\.(\d+)\.(.*)")


def hf_names(path: str, config: ModelConfig) -> tuple[str, ...]:
    """The stored tensors that make one parameter: one name, or one per expert to be stacked in order."""
    if path.startswith("lm_head."):
        return (path,)
    name = "model." + path
    if match := _MTP.fullmatch(path):  # MTP layers are stored behind the main ones
        name = f"model.layers.{config.num_hidden_layers + int(match[1])}.{match[2]}"
    if isinstance(config, DeepseekConfig) and (match := _EXPERT.fullmatch(name)):
        return tuple(f"{match[1]}.{expert}.{match[2]}.weight" for expert in range(config.n_routed_experts))
    return (name,)


def is_stacked(path: str) -> bool:
    """Whether a parameter is stacked from one tensor per expert."""
    return _EXPERT.fullmatch(path) is not None


def mtp_copies(config: ModelConfig) -> dict[str, str]:
    """What DeepSeek's checkpoints store again in each MTP layer, and what it is a copy of: embedding and head."""
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    copies = {}
    for depth in range(getattr(config, "num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{config.num_hidden_layers + depth}."
        copies[f"{prefix}embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"{prefix}shared_head.head.weight"] = head
    return copies


def skipped_tensors(config: ModelConfig, *, has_mtp: bool) -> tuple[Skip, ...]:
    """Stored tensors that are knowingly not loaded; `has_mtp`: whether the tree has the MTP layers."""
    skipped = [Skip("*.rotary_emb.inv_freq", "computed from the config")]
    if config.tie_word_embeddings:
        skipped.append(Skip("lm_head.weight", "the head is the embedding, as the config says"))
    if has_mtp:
        skipped += [Skip(name, f"a copy of {original}") for name, original in mtp_copies(config).items()]
    else:
        depths = getattr(config, "num_nextn_predict_layers", 0)
        for layer in range(config.num_hidden_layers, config.num_hidden_layers + depths):
            skipped.append(Skip(f"model.layers.{layer}.*", "an MTP layer, and speculation is off"))
    return tuple(skipped)
