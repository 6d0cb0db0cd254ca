"""Presets and parameter counts, against published totals and transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds import presets
from msds.config import (
    DeepseekConfig,
    config_json,
    config_warnings,
    count_parameters,
    parse_config,
    read_config,
)
from tests.config.samples import FAMILIES, FP8, LLAMA3, V3, YARN, edited, write

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
    theirs += sum(tensor.numel() for name, tensor in model.named_buffers() if "e_score_correction_bias" in name)
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
