"""Configs of published models, as functions: the same objects that `read_config` makes of their folders; and what a
MODEL of the command line means."""

from collections.abc import Callable
from pathlib import Path

from msds.config import DeepseekConfig, LlamaConfig, ModelConfig, RopeScaling, read_config
from msds.errors import ConfigError
from msds.pretrained import TINY_R1, model_folder


def deepseek_v3() -> DeepseekConfig:
    """DeepSeek-V3: 671 billion parameters, 37 billion active, FP8 with 128 x 128 blocks, one MTP layer."""
    return DeepseekConfig(
        model_type="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_nextn_predict_layers=1,
        num_attention_heads=128,
        n_shared_experts=1,
        n_routed_experts=256,
        routed_scaling_factor=2.5,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        moe_layer_freq=1,
        norm_topk_prob=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=_deepseek_yarn(1.0),
        torch_dtype="bfloat16",
        bos_token_id=0,
        eos_token_ids=(1,),
        weight_block_size=(128, 128),
    )


def deepseek_r1() -> DeepseekConfig:
    """DeepSeek-R1: the shape of V3, trained to reason."""
    return deepseek_v3()


def deepseek_v3_1() -> DeepseekConfig:
    """DeepSeek-V3.1: the shape of V3, thinking on request."""
    return deepseek_v3()


def deepseek_v2() -> DeepseekConfig:
    """DeepSeek-V2: 236 billion parameters, 21 billion active, BF16."""
    return DeepseekConfig(
        model_type="deepseek_v2",
        vocab_size=102400,
        hidden_size=5120,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=60,
        num_nextn_predict_layers=0,
        num_attention_heads=128,
        n_shared_experts=2,
        n_routed_experts=160,
        routed_scaling_factor=16.0,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_group=8,
        topk_group=3,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        norm_topk_prob=False,
        scoring_func="softmax",
        topk_method="group_limited_greedy",
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=_deepseek_yarn(0.707),
        torch_dtype="bfloat16",
        bos_token_id=100000,
        eos_token_ids=(100001,),
    )


def deepseek_v2_lite() -> DeepseekConfig:
    """DeepSeek-V2-Lite: 15.7 billion parameters, full-rank queries, greedy routing, BF16."""
    return DeepseekConfig(
        model_type="deepseek_v2",
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_nextn_predict_layers=0,
        num_attention_heads=16,
        n_shared_experts=2,
        n_routed_experts=64,
        routed_scaling_factor=1.0,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        norm_topk_prob=False,
        scoring_func="softmax",
        topk_method="greedy",
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=_deepseek_yarn(0.707),
        torch_dtype="bfloat16",
        bos_token_id=100000,
        eos_token_ids=(100001,),
    )


def r1_distill_qwen_1_5b() -> LlamaConfig:
    """DeepSeek-R1-Distill-Qwen-1.5B, from Qwen2.5-Math-1.5B with a head of its own."""
    return _distill_qwen(151936, 1536, 8960, layers=28, heads=12, kv_heads=2, theta=10000.0, eps=1e-6)


def r1_distill_qwen_7b() -> LlamaConfig:
    """DeepSeek-R1-Distill-Qwen-7B, from Qwen2.5-Math-7B."""
    return _distill_qwen(152064, 3584, 18944, layers=28, heads=28, kv_heads=4, theta=10000.0, eps=1e-6)


def r1_distill_qwen_14b() -> LlamaConfig:
    """DeepSeek-R1-Distill-Qwen-14B, from Qwen2.5-14B."""
    return _distill_qwen(152064, 5120, 13824, layers=48, heads=40, kv_heads=8, theta=1000000.0, eps=1e-5)


def r1_distill_qwen_32b() -> LlamaConfig:
    """DeepSeek-R1-Distill-Qwen-32B, from Qwen2.5-32B."""
    return _distill_qwen(152064, 5120, 27648, layers=64, heads=40, kv_heads=8, theta=1000000.0, eps=1e-5)


def r1_distill_llama_8b() -> LlamaConfig:
    """DeepSeek-R1-Distill-Llama-8B, from Llama-3.1-8B."""
    return _distill_llama(4096, 14336, layers=32, heads=32)


def r1_distill_llama_70b() -> LlamaConfig:
    """DeepSeek-R1-Distill-Llama-70B, from Llama-3.3-70B-Instruct."""
    return _distill_llama(8192, 28672, layers=80, heads=64)


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "deepseek-v3": deepseek_v3,
    "deepseek-v3.1": deepseek_v3_1,
    "deepseek-r1": deepseek_r1,
    "deepseek-v2": deepseek_v2,
    "deepseek-v2-lite": deepseek_v2_lite,
    "r1-distill-qwen-1.5b": r1_distill_qwen_1_5b,
    "r1-distill-qwen-7b": r1_distill_qwen_7b,
    "r1-distill-qwen-14b": r1_distill_qwen_14b,
    "r1-distill-qwen-32b": r1_distill_qwen_32b,
    "r1-distill-llama-8b": r1_distill_llama_8b,
    "r1-distill-llama-70b": r1_distill_llama_70b,
}


def is_preset(model: str) -> bool:
    """Whether a MODEL means a config without a folder; what exists here by that name is meant first."""
    return model in PRESETS and not Path(model).exists()


def resolve_model(model: str) -> ModelConfig:
    """The config of a checkpoint folder, a bare config.json, the shipped model or a preset; ConfigError lists the
    names."""
    if is_preset(model):
        return PRESETS[model]()
    path = model_folder(model)
    if not model or not Path(path).exists():
        raise ConfigError(
            f"model {model!r} is neither a folder, nor a config.json, nor a name that is known: {TINY_R1} ships with "
            f"msds, the presets are {', '.join(PRESETS)}"
        )
    return read_config(path)


def _deepseek_yarn(mscale: float) -> RopeScaling:
    return RopeScaling(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _distill_qwen(
    vocab_size: int,
    width: int,
    inner: int,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    theta: float,
    eps: float,
) -> LlamaConfig:
    return LlamaConfig(
        model_type="qwen2",
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=eps,
        rope_theta=theta,
        attention_bias=True,
        torch_dtype="bfloat16",
        bos_token_id=151643,
        eos_token_ids=(151643,),
    )


def _distill_llama(width: int, inner: int, *, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            rope_type="llama3",
            factor=8.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        torch_dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001,),
    )
