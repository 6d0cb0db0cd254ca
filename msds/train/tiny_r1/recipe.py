"""The tiny R1 before training: config, tokenizer and random weights as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msds.checkpoint.folders import new_folder
from msds.checkpoint.save import write_checkpoint
from msds.train.tiny_r1.problems import Problem, generate_problems
from msds.train.tiny_r1.tokenizer import VOCAB_SIZE, write_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "kv_lora_rank": 64,
    "max_position_embeddings": 1024,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 96,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "use_cache": True,
    "v_head_dim": 32,
    "vocab_size": VOCAB_SIZE,
}

GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
"""Greedy: a sum has one answer."""
TOKENIZER_PROBLEMS = 4000


def write_untrained(target: Path, *, seed: int = 0) -> Path:
    """Config, tokenizer and weights drawn from `seed`; CheckpointError unless `target` is absent or an empty folder."""
    from msds.config import read_config
    from msds.models import model_functions
    from msds.train.save import weight_sources
    from msds_graphs.specs import init_tree

    with new_folder(target) as folder:
        _write_json(folder / "config.json", CONFIG)
        _write_json(folder / "generation_config.json", GENERATION_CONFIG)
        problems = generate_problems(TOKENIZER_PROBLEMS, seed=seed, held_out=False)
        write_tokenizer(folder, _texts(problems))
        config = read_config(folder)
        tree = init_tree(model_functions(config).spec(config), seed)
        write_checkpoint(folder, weight_sources(tree, config, "float32"))
    return target


def _texts(problems: list[Problem]) -> Iterator[str]:
    for problem in problems:
        yield problem.question
        yield problem.reasoning
        yield problem.messages[1]["content"].rpartition("\n")[2]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
