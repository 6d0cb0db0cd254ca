"""The tiny checkpoints are what the catalogue says, and the faults they are made for show in their logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.reference import numpy_deepseek, numpy_llama
from tests.reference.checkpoints import (
    numpy_forward,
    read_config,
    reference_logits,
    to_numpy_tensors,
    write_checkpoint,
)
from tests.reference.test_reference import BEYOND_V3, DECIDED, FAR, HONOURED, IDS, difference
from tests.reference.variants import V3, VARIANTS, YARN_V3


class TestCheckpoints:
    @pytest.mark.parametrize("name", ["v3_base", "llama_base"])
    def test_sharded_and_single_hold_the_same(self, tiny, name):
        single, sharded = to_numpy_tensors(tiny(name)), to_numpy_tensors(tiny(name, shards=3))
        assert len(list(tiny(name, shards=3).glob("*.safetensors"))) >= 3
        assert (tiny(name, shards=3) / "model.safetensors.index.json").exists()
        assert single.keys() == sharded.keys()
        for key, value in single.items():
            np.testing.assert_array_equal(value, sharded[key])

    @pytest.mark.parametrize("name", ["v3_base", "qwen2_base"])
    def test_bfloat16_is_the_rounded_float32(self, tiny, name):
        exact, rounded = to_numpy_tensors(tiny(name)), to_numpy_tensors(tiny(name, dtype="bfloat16"))
        assert read_config(tiny(name, dtype="bfloat16"))["torch_dtype"] == "bfloat16"
        for key, value in exact.items():
            want = torch.from_numpy(value)
            if not key.endswith("e_score_correction_bias"):
                want = want.to(torch.bfloat16).to(torch.float32)
            np.testing.assert_array_equal(rounded[key], want.numpy())

    def test_fp8_types_and_blocks(self, tiny):
        """Types as on the hub, a partial block, and scales that differ enough to tell blocks apart."""
        from safetensors import safe_open

        with safe_open(tiny("v3_fp8") / "model.safetensors", framework="pt") as file:
            types = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118 (not a dict)
            scale = file.get_tensor("model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv")
        assert scale.shape == (5, 4)
        assert types["model.layers.1.mlp.experts.3.up_proj.weight"] == torch.float8_e4m3fn
        assert types["model.layers.3.self_attn.o_proj.weight"] == torch.float8_e4m3fn
        assert types["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
        for name in ("layers.3.eh_proj", "layers.1.mlp.gate", "embed_tokens", "norm"):
            assert types[f"model.{name}.weight"] == torch.bfloat16
        blocks = to_numpy_tensors(tiny("v3_fp8"))["model.layers.0.self_attn.o_proj.weight"]
        spread = np.abs(blocks.reshape(4, 16, 4, 16)).max(axis=(1, 3))
        assert spread.max() > 4 * spread.min()  # a scale from the wrong block would show

    def test_seed_settles_the_weights(self, tiny, tmp_path):
        again = to_numpy_tensors(write_checkpoint("v3_base", tmp_path / "again"))
        other = to_numpy_tensors(write_checkpoint("v3_base", tmp_path / "other", seed=1))
        for key, value in to_numpy_tensors(tiny("v3_base")).items():
            np.testing.assert_array_equal(value, again[key])
            assert not np.array_equal(value, other[key])

    def test_what_transformers_cannot_hold_has_no_transformers_style(self, tmp_path):
        with pytest.raises(ValueError, match="v3_null_shared"):
            write_checkpoint("v3_null_shared", tmp_path / "x", style="transformers5")

    def test_tokenizer_and_chat_template(self, tiny):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tiny("v3_base", tokenizer=True))
        assert len(tokenizer) < V3["vocab_size"]
        text = "the sea, 你好 👩‍🚀\n"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYo"},
            {"role": "user", "content": "Bye"},
        ]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert rendered == (
            "<｜begin▁of▁sentence｜>S<｜User｜>Hi<｜Assistant｜>\n\nYo<｜end▁of▁sentence｜>"
            "<｜User｜>Bye<｜Assistant｜><think>\n"
        )
        assert tokenizer.encode("<｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜>")[::2] == [0, 1]


def _bias_weighs(scores, bias, config):
    biased = scores if bias is None else scores + bias
    return RIGHT_GATE(biased, None, config)


def _best_of_group(scores, bias, config):
    idx, _ = RIGHT_GATE(scores + bias, None, {**config, "topk_method": "group_limited_greedy"})
    weights = np.take_along_axis(scores, idx, axis=-1)
    return idx, config["routed_scaling_factor"] * weights / weights.sum(-1, keepdims=True)


def _masked_with_zero(scores, bias, config):
    groups = (scores + bias).reshape(len(scores), config["n_group"], -1)
    kept = numpy_deepseek.top(np.sort(groups)[..., -2:].sum(-1), config["topk_group"])
    is_kept = (np.arange(config["n_group"])[None, :, None] == kept[:, None, :]).any(-1)
    ranking = np.where(is_kept[..., None], groups, 0.0).reshape(scores.shape)
    idx = numpy_deepseek.top(ranking, config["num_experts_per_tok"])
    weights = np.take_along_axis(scores, idx, axis=-1)
    return idx, config["routed_scaling_factor"] * weights / weights.sum(-1, keepdims=True)


def _halves(x, cos, sin):
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


RIGHT_GATE = numpy_deepseek.gate  # kept: the faults below stand in its place


class TestCheckpointsCanTell:
    """Each fault, put into the NumPy model, moves the logits far beyond any tolerance used in these tests."""

    @pytest.mark.parametrize(
        ("name", "attribute", "fault"),
        [
            ("v3_base", "gate", _bias_weighs),
            ("v3_base", "gate", _best_of_group),
            ("v3_negative_bias", "gate", _masked_with_zero),
            ("v3_base", "rotate_interleaved", _halves),
            ("v3_base", "softmax_scale", lambda config: 24**-0.5),
            ("v3_norm_eps", "LATENT_EPS", 1e-2),
        ],
    )
    def test_formula(self, tiny, monkeypatch, name, attribute, fault):
        right = numpy_forward(tiny(name), IDS, BEYOND_V3)["logits"]
        monkeypatch.setattr(numpy_deepseek, attribute, fault)
        assert difference(numpy_forward(tiny(name), IDS, BEYOND_V3)["logits"], right) > 1e-3

    @pytest.mark.parametrize(
        ("name", "field", "value"),
        [
            ("v3_base", "rope_scaling", None),
            ("v3_mscale_differs", "rope_scaling", YARN_V3),
            ("v3_base", "rope_theta", 20000),
            ("v3_base", "topk_group", 4),
            ("v3_base", "n_group", 2),
            ("v3_base", "norm_topk_prob", False),
            ("v3_base", "routed_scaling_factor", 1.0),
            ("v3_base", "n_shared_experts", 0),
            ("v3_base", "scoring_func", "softmax"),
            ("v2_group_limited", "topk_method", "greedy"),
            ("v3_norm_eps", "rms_norm_eps", 1e-6),
            ("v3_attention_bias", "attention_bias", False),
            ("v3_moe_layer_freq", "num_hidden_layers", 2),
            ("llama_yarn", "rope_scaling", None),
            ("llama_yarn_factor", "rope_scaling", VARIANTS["llama_yarn"].config["rope_scaling"]),
            ("llama_llama3_rope", "rope_scaling", None),
            ("llama_bias", "mlp_bias", False),
            ("qwen2_tied_other_head", "tie_word_embeddings", False),
        ],
    )
    def test_config_field(self, tiny, name, field, value):
        tensors, config = to_numpy_tensors(tiny(name)), read_config(tiny(name))
        model = numpy_deepseek if name.startswith("v") else numpy_llama
        where = BEYOND_V3 if name.startswith("v") else FAR
        right = model.forward(tensors, config, IDS, where)["logits"]
        wrong = model.forward(tensors, {**config, field: value}, IDS, where)["logits"]
        assert difference(wrong, right) > 1e-3

    def test_who_decides(self, tiny):
        """Every numpy decision has its reason, and reference_logits follows the catalogue."""
        assert all(VARIANTS[name].reason for name in DECIDED)
        assert not any(VARIANTS[name].reason for name in HONOURED)
        for name in ("v3_base", "v3_softmax_scoring"):
            got = reference_logits(name, tiny(name), IDS)
            assert difference(got, numpy_forward(tiny(name), IDS)["logits"]) < 1e-5
