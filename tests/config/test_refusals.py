"""Refusals: each faulty config ends in one error that names field and value."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from msds.config import (
    parse_config,
    read_config,
)
from msds.errors import ConfigError
from tests.config.samples import FP8, LLAMA, LLAMA3, QWEN2, V2, V3, YARN, edited, write

FAULTY: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("activation", V3, {"hidden_act": "gelu"}, 'hidden_act = "gelu".*silu'),
    ("odd rope", V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7.*6 and 8"),
    ("odd head", LLAMA, {"head_dim": 15}, "head_dim = 15.*14 and 16"),
    ("odd head, derived", LLAMA, {"hidden_size": 60}, "head_dim = 15"),
    (
        "heads by kv heads",
        LLAMA,
        {"num_key_value_heads": 3},
        "num_key_value_heads = 3.*nearest legal value is [24]",
    ),
    ("width by heads", QWEN2, {"num_attention_heads": 6}, "hidden_size = 64.*num_attention_heads = 6"),
    ("qwen2 kv heads missing", QWEN2, {"num_key_value_heads": ...}, "num_key_value_heads is missing"),
    ("MLA kv heads", V3, {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("groups", V3, {"n_group": 3}, "n_group = 3.*n_routed_experts = 8.*nearest legal value is [24]"),
    ("groups of one", V3, {"n_group": 8}, "n_group = 8.*at least 2.*4"),
    ("group null", V3, {"n_group": None}, "n_group is null"),
    ("too many groups", V3, {"topk_group": 5}, "topk_group = 5.*n_group = 4"),
    ("experts out of reach", V3, {"num_experts_per_tok": 5}, "num_experts_per_tok = 5.*hold 4"),
    (
        "more than there are",
        V2,
        {"topk_method": "greedy", "num_experts_per_tok": 9},
        "num_experts_per_tok = 9",
    ),
    ("scoring", V3, {"scoring_func": "tanh"}, 'scoring_func = "tanh".*sigmoid'),
    ("method", V3, {"topk_method": "random"}, 'topk_method = "random".*noaux_tc'),
    ("frequency", V3, {"moe_layer_freq": 0}, "moe_layer_freq = 0"),
    ("frequency as a list", V3, {"moe_layer_freq": [0, 1]}, r"moe_layer_freq = \[0, 1\]"),
    (
        "window",
        QWEN2,
        {"use_sliding_window": True, "max_window_layers": 1},
        "use_sliding_window = true.*4096",
    ),
    ("layer types", QWEN2, {"layer_types": ["sliding_attention"] * 3}, "layer_types.*sliding_attention"),
    (
        "longrope",
        LLAMA,
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        "rope_scaling.rope_type = .longrope",
    ),
    ("scaling without type", LLAMA, {"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type = null"),
    ("scaling is text", LLAMA, {"rope_scaling": "yarn"}, 'rope_scaling = "yarn"'),
    (
        "factor below 1",
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        "rope_scaling.factor = 0.5",
    ),
    ("factor missing", LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (
        "yarn without original length",
        V3,
        {"rope_scaling": edited(YARN, original_max_position_embeddings=...)},
        "rope_scaling.original_max_position_embeddings is missing",
    ),
    ("yarn ramp", V3, {"rope_scaling": {**YARN, "beta_slow": 64}}, "rope_scaling.beta_fast = 32.*64"),
    ("llama3 ramp", LLAMA, {"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "high_freq_factor = 1"),
    ("partial rotation", LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5.*1.0"),
    ("rotation of halves", V3, {"rope_interleave": False}, "rope_interleave = false.*true"),
    (
        "gptq",
        LLAMA,
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quant_method = .gptq.*BF16",
    ),
    ("awq", QWEN2, {"quantization_config": {"quant_method": "awq"}}, "quant_method = .awq.*BF16"),
    ("bitsandbytes", V3, {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ("compressed", V3, {"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ("mindie", V3, {"quantize": "w8a8_dynamic"}, 'quantize = "w8a8_dynamic"'),
    (
        "fp8 e5m2",
        V3,
        {"quantization_config": {**FP8, "fmt": "e5m2"}},
        "quantization_config.fmt = .e5m2.*e4m3",
    ),
    ("fp8 static", V3, {"quantization_config": {**FP8, "activation_scheme": "static"}}, "static.*dynamic"),
    (
        "fp8 per tensor",
        V3,
        {"quantization_config": edited(FP8, weight_block_size=None)},
        "weight_block_size = null",
    ),
    ("fp8 block 0", V3, {"quantization_config": {**FP8, "weight_block_size": [0, 128]}}, r"= \[0, 128\]"),
    ("negative size", V3, {"vocab_size": -512}, "vocab_size = -512"),
    ("zero size", LLAMA, {"intermediate_size": 0}, "intermediate_size = 0"),
    ("rank 0", V3, {"q_lora_rank": 0}, "q_lora_rank = 0"),
    ("rank missing", V3, {"q_lora_rank": ...}, "q_lora_rank is missing"),
    ("boolean size", LLAMA, {"num_hidden_layers": True}, "num_hidden_layers = true"),
    ("text size", LLAMA, {"num_attention_heads": "32"}, 'num_attention_heads = "32"'),
    ("fraction", V3, {"hidden_size": 64.5}, "hidden_size = 64.5"),
    ("size beyond int32", V3, {"vocab_size": 10**12}, "vocab_size = 1000000000000"),
    ("flag as a number", V3, {"norm_topk_prob": 1}, "norm_topk_prob = 1.*true or false"),
    ("NaN", V3, {"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN"),
    ("infinite", LLAMA, {"rope_theta": float("inf")}, "rope_theta = Infinity"),
    ("huge number", V3, {"rms_norm_eps": 10**400}, "rms_norm_eps = 1000"),
    ("negative eps", V3, {"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06"),
    ("scaling missing", V3, {"routed_scaling_factor": ...}, "routed_scaling_factor is missing"),
    ("dtype", LLAMA, {"torch_dtype": "int8"}, 'torch_dtype = "int8".*bfloat16'),
    ("two dtypes", LLAMA, {"dtype": "float32"}, "dtype = .float32.*torch_dtype"),
    ("two thetas", LLAMA, {"rope_scaling": {**LLAMA3, "rope_theta": 1e4}}, "rope_theta = 10000"),
    ("two scalings", LLAMA, {"rope_parameters": {**LLAMA3, "factor": 4.0}}, "rope_scaling.factor = 8.0.*4.0"),
    ("two MTP counts", V3, {"num_mtp_layers": 3}, "num_mtp_layers = 3.*num_nextn_predict_layers = 1"),
    ("eos", V3, {"eos_token_id": [1, "2"]}, r"eos_token_id = \[1, \"2\"\]"),
    ("bos", V3, {"bos_token_id": -1}, "bos_token_id = -1"),
    ("qwen2 without biases", QWEN2, {"attention_bias": False}, "attention_bias = false.*true"),
    ("qwen2 mlp bias", QWEN2, {"mlp_bias": True}, "mlp_bias = true.*false"),
    ("softcapping", LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    (
        "model type",
        V3,
        {"model_type": "deepseek_v32"},
        'model_type = "deepseek_v32".*nearest supported: deepseek_v3',
    ),
    ("model type missing", V3, {"model_type": ...}, "model_type = null.*llama"),
    ("model type a list", V3, {"model_type": ["llama"]}, "model_type = .*llama"),
]


@pytest.mark.parametrize(
    ("base", "changes", "message"), [case[1:] for case in FAULTY], ids=[case[0] for case in FAULTY]
)
def test_a_faulty_config_ends_in_one_error_with_field_and_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, edited(base, **changes)))
    text = str(error.value)
    assert re.search(message, text), text
    assert str(tmp_path) in text
    assert "\n" not in text, f"one fault was made, several are reported: {text}"


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(edited(V3, hidden_act="relu", n_group=3, vocab_size="x", rope_scaling={**YARN, "factor": 0}))
    text = str(error.value)
    assert "4 faults" in text
    for part in ('hidden_act = "relu"', "n_group = 3", 'vocab_size = "x"', "rope_scaling.factor = 0"):
        assert part in text


def test_a_rule_is_silent_about_fields_that_are_already_at_fault() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(edited(V3, n_routed_experts="eight"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "an object"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        ('{"model_type": "llama", "model_type": "qwen2"}', "model_type is given twice"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_holds_no_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_config(write(tmp_path, content))
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="elsewhere does not exist"):
        read_config(tmp_path / "elsewhere")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_config(tmp_path)


def test_a_modelslim_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, V3)
    write(tmp_path, {"model_quant_type": "W8A8"}, "quant_model_description.json")
    with pytest.raises(ConfigError, match=r"quant_model_description\.json.*ModelSlim.*BF16"):
        read_config(tmp_path)


def test_configs_that_are_not_read_from_files_obey_the_same_rules() -> None:
    config, _ = parse_config(V3)
    llama, _ = parse_config(LLAMA)
    qwen2, _ = parse_config(QWEN2)
    for base, changes in (
        (config, {"n_group": 3}),
        (config, {"scoring_func": "tanh"}),
        (config, {"model_type": "llama"}),
        (config, {"hidden_size": 0}),
        (llama, {"head_dim": 7}),
        (llama, {"num_key_value_heads": 0}),
        (llama, {"attention_bias": True}),
        (llama, {"torch_dtype": "int4"}),
        (qwen2, {"attention_bias": False}),
    ):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            dataclasses.replace(base, **changes)  # type: ignore[arg-type]
