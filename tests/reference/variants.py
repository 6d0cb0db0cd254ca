"""The catalogue of tiny checkpoints: one named variant per odd-but-legal config that the product must run.

Each has a hub-style `config.json` and says who decides what is right: transformers where it obeys every
field of the config, else the NumPy reference (which is compared with transformers on all the others).
Shapes stay equal across variants wherever the oddity allows, so that compiled graphs can be shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Config = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """`writer` overrides the config of the model that transformers builds and saves, if it cannot build ours.

    stored_head: a tied checkpoint that stores lm_head.weight all the same, as a copy or as something else.
    fp8: linears of the layers are e4m3 in 16 x 16 blocks, the rest is bfloat16.
    bias_shift: added to every e_score_correction_bias.
    """

    name: str
    config: Config
    reference: Literal["transformers", "numpy"] = "transformers"
    reason: str = ""
    writer: Config = field(default_factory=dict)
    stored_head: Literal["copy", "different"] | None = None
    fp8: bool = False
    bias_shift: float = 0.0

    @property
    def family(self) -> str:
        return str(self.config["model_type"])


YARN_V3: Config = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}

V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "kv_lora_rank": 16,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,  # four to a group: the sum of a group's best two is not the group's sum
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN_V3,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "use_cache": True,
    "v_head_dim": 16,
    "vocab_size": 512,
}

V2: Config = {
    **{key: value for key, value in V3.items() if key != "num_nextn_predict_layers"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": None,
    "rope_scaling": {**YARN_V3, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}

LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 512,
}

QWEN2: Config = {
    **{key: value for key, value in LLAMA.items() if key not in ("attention_bias", "mlp_bias", "rope_scaling")},
    "architectures": ["Qwen2ForCausalLM"],
    "max_window_layers": 2,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 2048,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}

SHORT = 64  # original context of the stretched Llama and Qwen2 variants: tests step beyond it cheaply
LLAMA3_ROPE: Config = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": SHORT,
    "rope_type": "llama3",
}
YARN: Config = {"factor": 4.0, "original_max_position_embeddings": SHORT, "rope_type": "yarn"}


def _v3(name: str, reason: str = "", writer: Config | None = None, fp8: bool = False, **fields: Any) -> Variant:
    reference: Literal["transformers", "numpy"] = "numpy" if reason else "transformers"
    return Variant(name, {**V3, **fields}, reference, reason, writer or {}, fp8=fp8)


_DEEPSEEK = [
    _v3("v3_base"),
    _v3("v3_no_mtp", num_nextn_predict_layers=0),
    _v3("v3_two_mtp", num_nextn_predict_layers=2),
    _v3("v3_no_q_lora", q_lora_rank=None),
    _v3("v3_no_rope_scaling", rope_scaling=None),
    _v3("v3_linear_rope", rope_scaling={"factor": 4.0, "type": "linear"}),
    _v3("v3_no_shared", n_shared_experts=0),
    _v3(
        "v3_null_shared",
        reason="transformers refuses null, the published code means none by it",
        writer={"n_shared_experts": 0},
        n_shared_experts=None,
    ),
    _v3("v3_two_shared", n_shared_experts=2),
    _v3("v3_all_dense", first_k_dense_replace=3, num_nextn_predict_layers=0),
    _v3("v3_all_dense_mtp", first_k_dense_replace=3),  # the MTP layer is a MoE all the same
    _v3(
        "v3_null_experts",
        reason="transformers refuses null, the published code makes every layer dense",
        writer={"n_routed_experts": 16, "first_k_dense_replace": 3},
        n_routed_experts=None,
        num_nextn_predict_layers=0,
    ),
    _v3("v3_all_moe", first_k_dense_replace=0),
    _v3(
        "v3_moe_layer_freq",
        reason="transformers ignores moe_layer_freq",
        first_k_dense_replace=0,
        moe_layer_freq=2,
        num_nextn_predict_layers=0,
    ),
    _v3("v3_v_dim", v_head_dim=24),
    _v3("v3_one_group", n_group=1, topk_group=1),
    _v3("v3_all_groups", topk_group=4),
    # Below zero all over: a refused group masked with 0 instead of -inf would come back.
    Variant("v3_negative_bias", V3, bias_shift=-2.0),
    _v3("v3_softmax_scoring", reason="transformers ignores scoring_func", scoring_func="softmax"),
    _v3("v3_no_norm_topk", norm_topk_prob=False),
    _v3(
        "v3_one_expert",
        reason="transformers normalises even a single weight, to 1; the published code only several",
        num_experts_per_tok=1,
    ),
    _v3("v3_scale_1", routed_scaling_factor=1.0),
    _v3("v3_mscale_differs", rope_scaling={**YARN_V3, "mscale_all_dim": 0.5}),
    _v3(
        "v3_no_mscale_all_dim",
        reason="transformers then ignores mscale as well, the published amplitude is m(mscale)",
        rope_scaling={**{k: v for k, v in YARN_V3.items() if k != "mscale_all_dim"}, "mscale": 0.5},
    ),
    _v3("v3_norm_eps", rms_norm_eps=1e-2),  # tells rms_norm_eps from the 1e-6 of the latent norms
    _v3("v3_tied", tie_word_embeddings=True),
    _v3("v3_attention_bias", attention_bias=True),
    _v3("v3_attention_bias_no_q_lora", attention_bias=True, q_lora_rank=None),
    _v3(
        "v3_fp8",
        reason="transformers guesses the block from the shapes and fails on partial blocks",
        fp8=True,
        kv_lora_rank=64,  # kv_a_proj has 72 rows: four and a half blocks
        torch_dtype="bfloat16",
    ),
    Variant("v2_lite", V2),
    Variant(
        "v2_group_limited",
        {
            **V2,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
        },
    ),
    Variant(
        "v2_norm_topk",
        {**V2, "norm_topk_prob": True, "routed_scaling_factor": 4.0},
        "numpy",
        "transformers ignores norm_topk_prob in V2, the published code normalises instead of scaling",
    ),
    Variant("v2_null_groups", {**V2, "n_group": None, "topk_group": None, "rope_scaling": None}),
]

_DENSE = [
    Variant("qwen2_base", {**QWEN2, "tie_word_embeddings": False}),
    Variant("qwen2_tied", QWEN2),
    Variant("qwen2_tied_stored_head", QWEN2, stored_head="copy"),
    Variant(
        "qwen2_tied_other_head",
        QWEN2,
        "numpy",
        "transformers unties what the config ties when the stored head differs; the config decides here",
        stored_head="different",
    ),
    Variant("qwen2_yarn", {**QWEN2, "rope_scaling": {**YARN, "type": "yarn"}}),
    Variant("llama_base", LLAMA),
    Variant("llama_tied", {**LLAMA, "tie_word_embeddings": True}),
    Variant("llama_mha", {**LLAMA, "num_key_value_heads": 4}),
    Variant("llama_llama3_rope", {**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}),
    Variant("llama_linear_rope", {**LLAMA, "rope_scaling": {"factor": 4.0, "type": "linear"}}),
    Variant("llama_dynamic_rope", {**LLAMA, "rope_scaling": {"factor": 4.0, "type": "dynamic"}}),
    Variant("llama_yarn", {**LLAMA, "rope_scaling": YARN}),
    Variant("llama_yarn_factor", {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.3}}),
    Variant("llama_head_dim", {**LLAMA, "head_dim": 24}),
    Variant("llama_bias", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
]

VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _DEEPSEEK + _DENSE}
