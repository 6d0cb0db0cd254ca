"""Reading configs: both styles of file, every odd-but-legal value, what is odd, rope scaling."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from msds.config import (
    DeepseekConfig,
    LlamaConfig,
    RopeScaling,
    config_json,
    config_warnings,
    max_context,
    parse_config,
    read_config,
)
from tests.config.samples import FAMILIES, FP8, LLAMA, LLAMA3, QWEN2, V2, V3, YARN, edited, write
from tests.reference.variants import VARIANTS


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
def test_transformers_5_style_reads_equal_to_hub_style(tmp_path: Path, family: str, scaling: str | None) -> None:
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
    renamed = edited(V3, num_nextn_predict_layers=..., num_mtp_layers=2, n_routed_experts=..., num_local_experts=8)
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
    ("one expert", V3, {"n_routed_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}),
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
def test_odd_but_legal_configs_are_read_and_written_back(base: dict[str, Any], changes: dict[str, Any]) -> None:
    config, warnings = parse_config(edited(base, **changes))
    assert warnings == ()
    assert parse_config(json.loads(json.dumps(config_json(config)))) == (config, ())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_the_tiny_checkpoints_is_legal(name: str) -> None:
    parse_config(VARIANTS[name].config, name)


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
        (V3, {"rope_scaling": edited(YARN, mscale=...)}, "rope_scaling.mscale_all_dim: .*transformers"),
        (QWEN2, {"rope_scaling": edited(YARN, mscale=...)}, "rope_scaling.mscale_all_dim: .*no effect"),
        (QWEN2, {"eos_token_id": 600}, "eos_token_id: 600 lies outside vocab_size = 512"),
        (V3, {"num_nextn_predict_layers": ...}, "num_nextn_predict_layers: missing, taken as 0"),
        (V3, {"architectures": ["DeepseekV3Model"]}, "architectures: .*DeepseekV3ForCausalLM"),
    ],
)
def test_odd_things_warn_and_do_not_fail(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    _, warnings = parse_config(edited(base, **changes))
    assert len(warnings) == 1
    assert re.search(message, warnings[0])


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


YARN_AMPLITUDES: list[dict[str, float]] = [
    {},
    {"mscale": 0.707, "mscale_all_dim": 1.0},
    {"mscale": 0.5},
    {"mscale_all_dim": 1.0},
    {"mscale": 0.0, "mscale_all_dim": 1.0},
    {"attention_factor": 1.25},
]


@pytest.mark.parametrize("fields", YARN_AMPLITUDES)
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_yarn_amplitude_is_that_of_transformers(fields: dict[str, float], factor: float) -> None:
    from transformers import Qwen2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 2048, **fields}
    config, _ = parse_config(edited(QWEN2, rope_scaling=scaling))
    assert config.rope_scaling is not None
    theirs = ROPE_INIT_FUNCTIONS["yarn"](Qwen2Config.from_dict(edited(QWEN2, rope_scaling=dict(scaling))), "cpu")[1]
    assert config.rope_scaling.amplitude == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "amplitude"),
    [({"mscale": 0.5}, 1.184444), ({"mscale_all_dim": 1.0}, 1.0), ({}, 1.368888)],
)
def test_yarn_amplitude_of_mla_is_that_of_the_published_code(fields: dict[str, float], amplitude: float) -> None:
    """m(mscale) / m(mscale_all_dim) with 1 and 0 for what is absent, m(x) = 0.1 x ln(40) + 1."""
    scaling = {**edited(YARN, mscale=..., mscale_all_dim=...), **fields}
    config, warnings = parse_config(edited(V3, rope_scaling=scaling))
    assert config.rope_scaling is not None
    assert config.rope_scaling.amplitude == pytest.approx(amplitude, abs=1e-6)
    assert len(warnings) == len(fields)


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
