"""The models that are measured: a folder, a real small one, or a random mid-size DeepSeek-V3."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.real.fetch import SMOLLM2, model_folder

CACHE = Path(tempfile.gettempdir()) / "msds-benchmarks"

MID: dict[str, Any] = {  # 222.7 M parameters, 52.2 M of them active per token: large against caches, quick to run
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "float32",
}

V3_TINY = MID | {  # the depth and structure of DeepSeek-V3, widths as small as its structure allows
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def resolve(name: str) -> Path:
    """The folder of `mid`, of `smollm2` (from the README's models folder, or downloaded), or of a path."""
    CACHE.mkdir(exist_ok=True)
    if name == "mid":
        return _write_mid(CACHE / "mid")
    if name == SMOLLM2.name:
        return model_folder(SMOLLM2, CACHE)
    return Path(name)


def read_once(folder: Path) -> None:
    """Bring the weights into the page cache, so that load times are of the loaders and not of the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def _write_mid(folder: Path) -> Path:
    """Random weights, seed 0, as transformers draws and saves them; the hub's style of config."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**MID))
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(0, 0.02)  # drawn as zeros, which would leave the bias out of the routing
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        written = Path(scratch) / "mid"
        model.save_pretrained(written)
        (written / "config.json").write_text(json.dumps(MID, indent=2))
        written.rename(folder)
    return folder
