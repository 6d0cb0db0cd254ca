"""Configs: strict reading, both styles of file, every odd-but-legal value, presets and parameter counts."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds import presets
from msds.config import (
    DeepseekConfig,
    LlamaConfig,
    RopeScaling,
    config_json,
    config_warnings,
    count_parameters,
    max_context,
    parse_config,
    read_config,
    read_generation_config,
)
from msds.errors import ConfigError

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
V3: dict[str, Any] = {
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
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
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
V2: dict[str, Any] = {
    **{k: v for k, v in V3.items() if k not in ("num_nextn_predict_layers", "architectures")},
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
}
LLAMA: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}
QWEN2: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen2",
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": False,
}
FAMILIES = {"deepseek_v3": V3, "deepseek_v2": V2, "llama": LLAMA, "qwen2": QWEN2}


def write(folder: Path, data: object, name: str = "config.json") -> Path:
    (folder / name).write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return folder


def edited(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`base` with changed fields; the value ... deletes one."""
    data = {**base, **changes}
    return {name: value for name, value in data.items() if value is not ...}


# --- reading -----------------------------------------------------------------------------------------------


def test_hub_style_deepseek_v3_is_read_field_by_field(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, V3))
    assert isinstance(config, DeepseekConfig)
    for name in V3.keys() & {field.name for field in dataclasses.fields(config)} - {"rope_scaling"}:
        assert getattr(config, name) == V3[name], name
    assert config.eos_token_ids == (1,)
    assert config.rope_scaling == RopeScaling(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    assert config.qk_head_dim == 24
    assert [config.is_moe_layer(layer) for layer in range(5)] == [False, True, True, True, True]
    assert config.num_moe_layers == 3
    assert isinstance(hash(config), int)
    assert config_warnings(tmp_path) == ()
    assert read_config(tmp_path / "config.json") == config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", [None, "yarn", "llama3", "linear", "dynamic"])
def test_transformers_5_style_reads_equal_to_hub_style(
    tmp_path: Path, family: str, scaling: str | None
) -> None:
    import transformers

    classes = {
        "deepseek_v3": transformers.DeepseekV3Config,
        "deepseek_v2": transformers.DeepseekV2Config,
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
    }
    choices = {"yarn": YARN, "llama3": LLAMA3, "linear": {"type": "linear", "factor": 2}}
    choices["dynamic"] = {"type": "dynamic", "factor": 2.0}
    hub = edited(FAMILIES[family], rope_scaling=choices.get(scaling or ""), quantization_config=FP8)
    expected, _ = parse_config(hub)
    classes[family].from_dict(json.loads(json.dumps(hub))).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written
    assert "rope_theta" not in written
    assert read_config(tmp_path) == expected
    assert config_warnings(tmp_path) == ()


def test_transformers_own_names_for_mtp_layers_and_experts_are_read() -> None:
    renamed = edited(
        V3, num_nextn_predict_layers=..., num_mtp_layers=2, n_routed_experts=..., num_local_experts=8
    )
    config, _ = parse_config(renamed)
    assert isinstance(config, DeepseekConfig)
    assert (config.num_nextn_predict_layers, config.n_routed_experts) == (2, 8)


def test_families_fill_in_what_their_definition_implies() -> None:
    implied = dict.fromkeys(("scoring_func", "topk_method", "norm_topk_prob", "moe_layer_freq"), ...)
    v3, _ = parse_config(edited(V3, **implied))
    v2, _ = parse_config(edited(V2, **implied, n_group=..., topk_group=None))
    assert isinstance(v3, DeepseekConfig)
    assert isinstance(v2, DeepseekConfig)
    assert (v3.scoring_func, v3.topk_method, v3.norm_topk_prob) == ("sigmoid", "noaux_tc", True)
    assert (v2.scoring_func, v2.topk_method, v2.norm_topk_prob) == ("softmax", "greedy", False)
    assert (v2.n_group, v2.topk_group, v2.num_nextn_predict_layers) == (1, 1, 0)
    llama, _ = parse_config(edited(LLAMA, num_key_value_heads=..., attention_bias=True, head_dim=32))
    qwen2, _ = parse_config(edited(QWEN2, bos_token_id=None, eos_token_id=None))
    assert isinstance(llama, LlamaConfig)
    assert isinstance(qwen2, LlamaConfig)
    assert (llama.num_key_value_heads, llama.head_dim) == (4, 32)
    assert (llama.attention_bias, llama.attention_out_bias) == (True, True)
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.head_dim) == (True, False, 16)
    assert (qwen2.bos_token_id, qwen2.eos_token_ids) == (None, ())


LEGAL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("full-rank queries", V3, {"q_lora_rank": None}),
    ("no rope scaling", V3, {"rope_scaling": None}),
    ("rope scaling default", V3, {"rope_scaling": {"rope_type": "default"}}),
    ("different mscales", V3, {"rope_scaling": {**YARN, "mscale": 0.707}}),
    ("neither mscale", V3, {"rope_scaling": edited(YARN, mscale=..., mscale_all_dim=...)}),
    ("linear", V2, {"rope_scaling": {"type": "linear", "factor": 4}}),
    ("dynamic", LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    ("yarn on qwen2", QWEN2, {"rope_scaling": edited(YARN, mscale=..., mscale_all_dim=...)}),
    ("yarn with its own amplitude", QWEN2, {"rope_scaling": {**YARN, "attention_factor": 1.2}}),
    ("no shared expert", V3, {"n_shared_experts": 0}),
    ("shared expert null", V3, {"n_shared_experts": None}),
    ("two shared experts", V3, {"n_shared_experts": 2}),
    ("no dense layer", V3, {"first_k_dense_replace": 0}),
    ("only dense layers", V3, {"first_k_dense_replace": 99}),
    ("no experts at all", V3, {"n_routed_experts": None, "num_experts_per_tok": None, "n_group": None}),
    ("every second layer MoE", V3, {"moe_layer_freq": 2}),
    ("v_head_dim apart", V3, {"v_head_dim": 10}),
    ("one group", V3, {"n_group": 1, "topk_group": 1}),
    ("groups ignored by greedy", V3, {"topk_method": "greedy", "n_group": 3, "topk_group": 7}),
    ("V2 routing in V3", V3, {"topk_method": "group_limited_greedy"}),
    ("V3 routing in V2", V2, {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    ("softmax scores", V3, {"scoring_func": "softmax"}),
    ("not normalised", V3, {"norm_topk_prob": False}),
    ("normalised V2", V2, {"norm_topk_prob": True}),
    ("tied", V3, {"tie_word_embeddings": True}),
    ("tied qwen2", QWEN2, {"tie_word_embeddings": True}),
    ("qwen2 biases spelt out", QWEN2, {"attention_bias": True}),
    ("attention biases", V3, {"attention_bias": True}),
    ("no MTP", V3, {"num_nextn_predict_layers": 0}),
    ("two MTP layers", V3, {"num_nextn_predict_layers": 2}),
    ("fp8 blocks that are not 128", V3, {"quantization_config": {**FP8, "weight_block_size": [16, 32]}}),
    ("fp8 with ue8m0 scales", V3, {"quantization_config": {**FP8, "scale_fmt": "ue8m0"}}),
    ("window that no layer has", QWEN2, {"use_sliding_window": True}),
    (
        "window as long as the context",
        QWEN2,
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8192},
    ),
    ("window null", QWEN2, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}),
    ("full attention spelt out", QWEN2, {"layer_types": ["full_attention"] * 3}),
    ("pretraining_tp", LLAMA, {"pretraining_tp": 4}),
    ("mlp biases", LLAMA, {"mlp_bias": True}),
    ("head_dim apart", LLAMA, {"head_dim": 10, "num_attention_heads": 6}),
    ("dtype with torch prefix", LLAMA, {"torch_dtype": "torch.bfloat16"}),
    ("several eos ids", V3, {"eos_token_id": [1, 2, 1]}),
    ("integers for numbers", V3, {"rms_norm_eps": 1, "routed_scaling_factor": 2}),
]


@pytest.mark.parametrize(("base", "changes"), [case[1:] for case in LEGAL], ids=[case[0] for case in LEGAL])
def test_odd_but_legal_configs_are_read_and_written_back(
    base: dict[str, Any], changes: dict[str, Any]
) -> None:
    config, warnings = parse_config(edited(base, **changes))
    assert warnings == ()
    assert parse_config(json.loads(json.dumps(config_json(config)))) == (config, ())


# --- refusals ----------------------------------------------------------------------------------------------

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
    (
        "one mscale",
        V3,
        {"rope_scaling": edited(YARN, mscale=...)},
        "rope_scaling.mscale_all_dim = 1.0.*mscale",
    ),
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
        parse_config(
            edited(V3, hidden_act="relu", n_group=3, vocab_size="x", rope_scaling={**YARN, "factor": 0})
        )
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


# --- warnings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (V3, {"wondrous_new_field": [1]}, r"wondrous_new_field: unknown field.*\[1\]"),
        (LLAMA, {"rope_theta": ...}, "rope_theta: missing, taken as 10000"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "beta_fast": 32}}, "rope_scaling.beta_fast: unknown"),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}},
            "rope_scaling.mscale: unknown",
        ),
        (QWEN2, {"eos_token_id": 600}, "eos_token_id: 600 lies outside vocab_size = 512"),
        (V3, {"num_nextn_predict_layers": ...}, "num_nextn_predict_layers: missing, taken as 0"),
        (V3, {"architectures": ["DeepseekV3Model"]}, "architectures: .*DeepseekV3ForCausalLM"),
    ],
)
def test_odd_things_warn_and_do_not_fail(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    _, warnings = parse_config(edited(base, **changes))
    assert len(warnings) == 1
    assert re.search(message, warnings[0])


# --- rope --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mscale", "softmax_factor", "scale"), [(1.0, 1.873854, 0.135234), (0.707, 1.589626, 0.114721)]
)
def test_yarn_of_the_published_deepseek_models(mscale: float, softmax_factor: float, scale: float) -> None:
    scaling = RopeScaling(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=mscale,
        mscale_all_dim=mscale,
    )
    assert scaling.amplitude == 1.0
    assert scaling.mla_softmax_factor == pytest.approx(softmax_factor, abs=1e-6)
    assert 192**-0.5 * scaling.mla_softmax_factor == pytest.approx(scale, abs=1e-6)


@pytest.mark.parametrize("fields", [{}, {"mscale": 0.707, "mscale_all_dim": 1.0}, {"attention_factor": 1.25}])
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_yarn_amplitude_is_that_of_transformers(fields: dict[str, float], factor: float) -> None:
    from transformers import Qwen2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 2048, **fields}
    config, _ = parse_config(edited(QWEN2, rope_scaling=scaling))
    assert config.rope_scaling is not None
    theirs = ROPE_INIT_FUNCTIONS["yarn"](
        Qwen2Config.from_dict(edited(QWEN2, rope_scaling=dict(scaling))), "cpu"
    )[1]
    assert config.rope_scaling.amplitude == pytest.approx(theirs, rel=1e-12)


def test_only_yarn_has_an_amplitude_and_only_a_stated_mscale_a_softmax_factor() -> None:
    for scaling in (LLAMA3, {"type": "linear", "factor": 4.0}, {"type": "dynamic", "factor": 4.0}):
        config, _ = parse_config(edited(LLAMA, rope_scaling=scaling))
        assert config.rope_scaling is not None
        assert (config.rope_scaling.amplitude, config.rope_scaling.mla_softmax_factor) == (1.0, 1.0)


def test_max_context_is_the_declared_length_except_under_dynamic_scaling() -> None:
    assert max_context(parse_config(V3)[0]) == 163840
    assert max_context(parse_config(LLAMA)[0]) == 8192
    dynamic = {"type": "dynamic", "factor": 2.0}
    assert max_context(parse_config(edited(LLAMA, rope_scaling=dynamic))[0]) == 8192
    dynamic["original_max_position_embeddings"] = 2048
    assert max_context(parse_config(edited(LLAMA, rope_scaling=dynamic))[0]) == 2048


# --- generation_config.json --------------------------------------------------------------------------------


def test_generation_config_joins_the_ids_that_end_a_text(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    assert read_generation_config(tmp_path).eos_token_ids == (2, 3)
    generation = {
        "_from_model_config": True,
        "bos_token_id": 1,
        "do_sample": True,
        "eos_token_id": [3, 7],
        "no_repeat_ngram_size": 3,
        "repetition_penalty": None,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.39.3",
    }
    config = read_generation_config(write(tmp_path, generation, "generation_config.json"))
    assert config.eos_token_ids == (2, 3, 7)
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.6, 0.95, 20)
    assert (config.min_p, config.repetition_penalty) == (None, None)
    assert config.not_applied == ("no_repeat_ngram_size",)


def test_a_folder_without_either_file_says_nothing(tmp_path: Path) -> None:
    config = read_generation_config(tmp_path)
    assert config.eos_token_ids == ()
    assert config.temperature is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": "0.6"}, 'temperature = "0.6"'),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"top_p": 1.5}, "top_p = 1.5.*at most 1"),
        ({"top_p": 0}, "top_p = 0"),
        ({"top_k": 2.5}, "top_k = 2.5"),
        ({"do_sample": "yes"}, 'do_sample = "yes"'),
        ({"repetition_penalty": 0}, "repetition_penalty = 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id = "),
    ],
)
def test_a_faulty_generation_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_generation_config(write(tmp_path, changes, "generation_config.json"))


# --- presets and counts ------------------------------------------------------------------------------------

# Billions. V3: main model 671.0 of which 36.6 act on a token (published as 37), and 11.6 in the MTP layer,
# beside which the published files hold a copy of embedding and head: 684.5 in all (published as 685).
PUBLISHED = {
    "deepseek-v3": (671.03, 36.63),
    "deepseek-v3.1": (671.03, 36.63),
    "deepseek-r1": (671.03, 36.63),
    "deepseek-v2": (235.74, 20.85),
    "deepseek-v2-lite": (15.71, 2.45),
    "r1-distill-qwen-1.5b": (1.78, 1.54),
    "r1-distill-qwen-7b": (7.62, 7.07),
    "r1-distill-qwen-14b": (14.77, 13.99),
    "r1-distill-qwen-32b": (32.76, 31.99),
    "r1-distill-llama-8b": (8.03, 7.50),
    "r1-distill-llama-70b": (70.55, 69.50),
}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_have_the_published_numbers_of_parameters(name: str) -> None:
    count = count_parameters(presets.PRESETS[name]())
    assert (count.total / 1e9, count.active / 1e9) == pytest.approx(PUBLISHED[name], abs=0.006)


def test_v3_with_its_mtp_layer_and_the_copies_beside_it_is_685_billion() -> None:
    count = count_parameters(presets.deepseek_v3())
    assert count.mtp / 1e9 == pytest.approx(11.61, abs=0.005)
    assert (count.total + count.mtp + 2 * count.embedding) / 1e9 == pytest.approx(684.49, abs=0.01)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_survive_a_file(name: str, tmp_path: Path) -> None:
    config = presets.PRESETS[name]()
    assert read_config(write(tmp_path, config_json(config))) == config
    assert config_warnings(tmp_path) == ()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"attention_bias": True, "first_k_dense_replace": 2, "n_shared_experts": 2}),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 9}),
        ("deepseek_v2", {}),
        ("deepseek_v2", {"q_lora_rank": 24, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
    ],
)
def test_counts_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    import torch
    import transformers

    data = edited(FAMILIES[family], **changes)
    config, _ = parse_config(data)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**json.loads(json.dumps(data)))
        )
    theirs = sum(tensor.numel() for tensor in model.parameters())
    theirs += sum(
        tensor.numel() for name, tensor in model.named_buffers() if "e_score_correction_bias" in name
    )
    assert count_parameters(config).total == theirs


@st.composite
def deepseek_files(draw: st.DrawFn) -> dict[str, Any]:
    """Hub-style files of legal DeepSeek configs."""
    group_size, groups = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    topk_group = draw(st.integers(1, groups))
    return edited(
        V3,
        model_type=draw(st.sampled_from(["deepseek_v3", "deepseek_v2"])),
        n_group=groups,
        n_routed_experts=group_size * groups,
        topk_group=topk_group,
        num_experts_per_tok=draw(st.integers(1, topk_group * group_size)),
        topk_method=draw(st.sampled_from(["noaux_tc", "group_limited_greedy", "greedy"])),
        scoring_func=draw(st.sampled_from(["sigmoid", "softmax"])),
        q_lora_rank=draw(st.none() | st.integers(1, 64)),
        qk_rope_head_dim=2 * draw(st.integers(1, 8)),
        v_head_dim=draw(st.integers(1, 32)),
        first_k_dense_replace=draw(st.integers(0, 6)),
        moe_layer_freq=draw(st.integers(1, 3)),
        rope_scaling=draw(st.sampled_from([None, YARN, {**YARN, "truncate": False}, LLAMA3])),
        tie_word_embeddings=draw(st.booleans()),
        routed_scaling_factor=draw(st.floats(0.1, 16.0)),
        quantization_config=draw(st.sampled_from([None, FP8])),
    )


@given(deepseek_files())
def test_every_legal_config_survives_a_file_and_counts_add_up(data: dict[str, Any]) -> None:
    config, _ = parse_config(data)
    assert isinstance(config, DeepseekConfig)
    assert parse_config(json.loads(json.dumps(config_json(config)))) == (config, ())
    count = count_parameters(config)
    unchosen = config.n_routed_experts - config.num_experts_per_tok
    idle = config.num_moe_layers * unchosen * 3 * config.hidden_size * config.moe_intermediate_size
    lookup = 0 if config.tie_word_embeddings else count.embedding - config.hidden_size
    assert count.total - count.active == idle + lookup
