"""The references agree with transformers and with numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.reference import numpy_deepseek, numpy_llama, numpy_rope
from tests.reference.checkpoints import (
    numpy_forward,
    read_config,
    to_numpy_tensors,
    transformers_greedy,
    transformers_logits,
)
from tests.reference.variants import SHORT, V3, VARIANTS, YARN_V3

IDS = np.random.default_rng(7).integers(0, 512, 40)
FAR = np.concatenate([np.arange(20), 900 + 37 * np.arange(20)])  # a gap of 880, then steps of 37
BEYOND_V3 = np.concatenate([np.arange(20), 9000 + 300 * np.arange(20)])  # beyond V3's original 4096
HONOURED = [name for name, variant in VARIANTS.items() if variant.reference == "transformers"]
DECIDED = [name for name, variant in VARIANTS.items() if variant.reference == "numpy"]
REFUSED = {"v3_null_shared", "v3_null_experts", "v3_fp8"}


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """Largest absolute difference relative to the largest logit."""
    return float(np.abs(got - want).max() / np.abs(want).max())


class TestAgainstTransformers:
    @pytest.mark.parametrize("name", HONOURED)
    def test_logits(self, tiny, name):
        folder = tiny(name)
        got = numpy_forward(folder, IDS)["logits"]
        assert difference(got, transformers_logits(folder, IDS)) < 1e-5

    @pytest.mark.parametrize("name", HONOURED)
    def test_far_positions(self, tiny, name):
        # The angle is a float32 product; a last bit of the frequency is 1e-4 rad out here.
        where = BEYOND_V3 if name.startswith("v") else FAR
        got = numpy_forward(tiny(name), IDS, where)["logits"]
        assert difference(got, transformers_logits(tiny(name), IDS, where)) < 1e-4
        assert difference(got, numpy_forward(tiny(name), IDS)["logits"]) > 1e-2

    @pytest.mark.parametrize("name", sorted(set(DECIDED) - REFUSED))
    def test_transformers_gives_something_else_where_numpy_decides(self, tiny, name):
        theirs = transformers_logits(tiny(name), IDS)
        assert difference(theirs, numpy_forward(tiny(name), IDS)["logits"]) > 1e-2

    @pytest.mark.parametrize("name", sorted(REFUSED))
    def test_transformers_refuses(self, tiny, name):
        from huggingface_hub.errors import StrictDataclassError

        assert np.isfinite(numpy_forward(tiny(name), IDS)["logits"]).all()
        # FP8: ValueError for the partial block, or before that ImportError where accelerate is not installed.
        with pytest.raises((StrictDataclassError, ValueError, ImportError)):
            transformers_logits(tiny(name), IDS)

    @pytest.mark.parametrize("name", ["v3_base", "v2_lite", "qwen2_base", "llama_bias"])
    def test_greedy(self, tiny, name):
        ids = list(IDS[:9])
        for _ in range(12):
            ids.append(int(numpy_forward(tiny(name), ids)["logits"][-1].argmax()))
        assert ids[9:] == transformers_greedy(tiny(name), IDS[:9], 12)

    @pytest.mark.parametrize("name", ["v3_base", "v2_group_limited", "qwen2_yarn", "llama_llama3_rope"])
    def test_config_style_of_transformers_5(self, tiny, name):
        modern = tiny(name, style="transformers5")
        assert "rope_parameters" in read_config(modern)
        got = numpy_forward(modern, IDS)["logits"]
        np.testing.assert_array_equal(got, numpy_forward(tiny(name), IDS)["logits"])
        assert difference(got, transformers_logits(modern, IDS)) < 1e-5

    @pytest.mark.parametrize("name", ["v3_base", "v3_all_dense_mtp", "v3_two_mtp", "v3_tied"])
    def test_mtp(self, tiny, name):
        """The main model's hidden rows, each joined with the token after it, through every depth."""
        folder, depths = tiny(name), VARIANTS[name].config["num_nextn_predict_layers"]
        tensors, config = to_numpy_tensors(folder), read_config(folder)
        hidden = numpy_deepseek.forward(tensors, config, IDS[:30])["hidden"]
        theirs = _transformers_mtp(folder, tensors, depths)
        for depth in range(depths):
            next_ids, where = IDS[depth + 1 : depth + 31], np.arange(depth + 1, depth + 31)
            with torch.no_grad():
                want = theirs.forward_layer(
                    depth,
                    torch.tensor(hidden, dtype=torch.float32)[None],
                    torch.tensor(where)[None],
                    None,
                    input_ids=torch.tensor(next_ids)[None],
                )
                logits = theirs._project_to_logits(want)[0].numpy()
            got = numpy_deepseek.mtp(tensors, config, hidden, next_ids, where, depth)
            assert difference(got["hidden"], want[0].numpy()) < 1e-5
            assert difference(got["logits"], logits) < 1e-5
            hidden = got["hidden"]


def _transformers_mtp(folder, tensors, depths):
    """transformers' MTP module, the folder's weights put in by hand: its own loader knows only layer 61."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = MtpModel(main, depths).eval()
    layers, experts = main.config.num_hidden_layers, main.config.n_routed_experts
    for name, parameter in model.layers.state_dict().items():
        depth, rest = name.split(".", 1)
        prefix = f"model.layers.{layers + int(depth)}."
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if rest == "mlp.experts.gate_up_proj":
            kinds = ("gate_proj", "up_proj")
        elif rest == "mlp.experts.down_proj":
            kinds = ("down_proj",)
        else:
            parameter.copy_(torch.from_numpy(tensors[prefix + rest]))
            continue
        rows = [
            np.concatenate([tensors[f"{prefix}mlp.experts.{expert}.{kind}.weight"] for kind in kinds])
            for expert in range(experts)
        ]
        parameter.copy_(torch.from_numpy(np.stack(rows)))
    return model


class TestRope:
    def test_yarn_frequencies_of_v3(self):
        scaling = numpy_rope.rope_settings({"rope_scaling": YARN_V3, "rope_theta": 10000})[1]
        ratio = numpy_rope.inverse_frequencies(64, 1e4, scaling) / numpy_rope.inverse_frequencies(64, 1e4, None)
        np.testing.assert_allclose(ratio[:11], 1.0, rtol=1e-6)
        np.testing.assert_allclose(ratio[[11, 16, 22]], [0.925, 0.55, 0.10], rtol=1e-5)
        np.testing.assert_allclose(ratio[23:], 0.025, rtol=1e-6)

    def test_yarn_frequencies_of_the_tiny_config(self):
        scaling = numpy_rope.rope_settings(V3)[1]
        got = numpy_rope.inverse_frequencies(8, 1e4, scaling)
        np.testing.assert_allclose(got, [1, 0.1, 0.005125, 2.5e-5], rtol=1e-6)

    def test_llama3_frequencies_of_the_distilled_model(self):
        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        plain = numpy_rope.inverse_frequencies(128, 5e5, None)
        ratio = numpy_rope.inverse_frequencies(128, 5e5, scaling) / plain
        np.testing.assert_allclose(ratio[:29], 1.0, rtol=1e-6)
        np.testing.assert_allclose(ratio[[29, 32]], [0.8282, 0.3711], atol=5e-5)
        np.testing.assert_allclose(ratio[35:], 0.125, rtol=1e-6)

    @pytest.mark.parametrize(
        ("mscale", "scale"),
        [(1.0, 0.135234), (0.707, 0.114721), (None, 0.072169)],
        ids=["v3", "v2_lite", "none"],
    )
    def test_softmax_scale_and_amplitude(self, mscale, scale):
        scaling = None if mscale is None else {**YARN_V3, "mscale": mscale, "mscale_all_dim": mscale}
        config = {**V3, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_scaling": scaling}
        assert numpy_deepseek.softmax_scale(config) == pytest.approx(scale, abs=5e-7)
        cos, sin = numpy_deepseek.rope(config, np.arange(50))
        assert np.abs(cos).max() == 1.0
        np.testing.assert_allclose(cos**2 + sin**2, 1.0, rtol=1e-12)

    def test_amplitude_is_a_quotient(self):
        config = VARIANTS["v3_mscale_differs"].config
        cos, _ = numpy_deepseek.rope(config, np.array([0]))
        want = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
        np.testing.assert_allclose(cos, want, rtol=1e-12)

    def test_which_dims_make_a_pair(self):
        cos, sin = numpy_rope.rotation(np.array([3]), numpy_rope.inverse_frequencies(8, 1e4, None), 1.0)
        unit = np.eye(8)[None, :1]  # [1, 1, 8]
        turned = [math.cos(3), math.sin(3)]
        interleaved = numpy_deepseek.rotate_interleaved(unit, cos[:, None], sin[:, None])[0, 0]
        np.testing.assert_allclose(interleaved, [*turned, 0, 0, 0, 0, 0, 0], rtol=1e-6)
        halves = numpy_llama.rotate_halves(unit, cos, sin)[0, 0]
        np.testing.assert_allclose(halves, [turned[0], 0, 0, 0, turned[1], 0, 0, 0], rtol=1e-6)

    def test_odd_dim_is_refused(self):
        with pytest.raises(ValueError, match="7"):
            numpy_rope.inverse_frequencies(7, 1e4, None)

    def test_short_contexts_are_left_behind(self):
        assert FAR.max() > SHORT
        assert BEYOND_V3.max() > YARN_V3["original_max_position_embeddings"]


def gate(scores, bias=None, **fields):
    """Experts and weights of one token, in ascending order of expert."""
    config = {**V3, "num_experts_per_tok": 2, **fields}
    bias = None if bias is None else np.asarray(bias, dtype=np.float64)
    idx, weights = numpy_deepseek.gate(np.asarray([scores], dtype=np.float64), bias, config)
    order = np.argsort(idx[0])
    return idx[0][order].tolist(), weights[0][order]


class TestGate:
    SCORES = (0.60, 0.10, 0.50, 0.45, 0.70, 0.05, 0.20, 0.20)

    def test_bias_ranks_and_does_not_weigh(self):
        experts, weights = gate(self.SCORES, [0, 0, 0, 0.4, 0, 0, 0, 0])
        assert experts == [3, 4]
        np.testing.assert_allclose(weights, [0.97826, 1.52174], atol=5e-6)

    def test_bias_needs_its_last_bits(self):
        fields = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
        assert gate([0.50, 0.47], [7.98, 8.00], **fields)[0] == [0]
        as_bfloat16 = torch.tensor([7.98, 8.00]).to(torch.bfloat16).to(torch.float64).numpy()
        assert gate([0.50, 0.47], as_bfloat16, **fields)[0] == [1]

    def test_group_score_is_the_sum_of_the_best_two_in_v3_and_the_best_in_v2(self):
        scores = [0.9, 0.1, 0.1, 0.1, 0.6, 0.5, 0.3, 0.1]
        fields = {"n_group": 2, "topk_group": 1}
        assert gate(scores, np.zeros(8), **fields)[0] == [4, 5]
        v2 = {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "norm_topk_prob": False}
        experts, weights = gate(scores, **fields, **v2)
        assert experts == [0, 1]  # the three tenths tie: the lower index
        np.testing.assert_allclose(weights, [2.25, 0.25])

    def test_third_of_a_group_does_not_count(self):
        scores = [0.5, 0.5, 0.5, 0.5, 0.6, 0.5, 0.0, 0.0]
        assert gate(scores, np.zeros(8), n_group=2, topk_group=1)[0] == [4, 5]

    def test_refused_groups_stay_refused_below_zero(self):
        experts, _ = gate(self.SCORES, np.full(8, -1.0), topk_group=1)
        assert experts == [2, 3]  # the group's sum is -1.05; masked with 0, any other expert would beat it

    def test_ties_go_to_the_lower_index(self):
        assert gate([0.5] * 8, np.zeros(8))[0] == [0, 1]
        assert gate([0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1], np.zeros(8), topk_group=1)[0] == [2, 3]

    def test_normalisation_and_scale(self):
        bias = np.zeros(8)
        np.testing.assert_allclose(gate(self.SCORES, bias, norm_topk_prob=False)[1], [1.25, 1.75])
        np.testing.assert_allclose(gate(self.SCORES, bias, num_experts_per_tok=1)[1], [1.75])
        v2 = {"model_type": "deepseek_v2", "topk_method": "greedy"}
        np.testing.assert_allclose(gate(self.SCORES, **v2)[1], [6 / 13, 7 / 13])

    def test_unknown_method_is_refused(self):
        with pytest.raises(ValueError, match="random"):
            gate(self.SCORES, topk_method="random")


class TestFp8:
    def test_partial_blocks(self):
        scale = 100.0 * np.arange(5)[:, None] + np.arange(56)[None, :]
        got = numpy_deepseek.dequantise(np.ones((576, 7168)), scale, (128, 128))
        assert (got[511, 0], got[512, 0], got[575, 7167]) == (300, 400, 455)
        assert numpy_deepseek.dequantise(np.ones((300, 200)), np.ones((3, 2)), (128, 128)).shape == (300, 200)

    def test_grid_of_another_shape_is_refused(self):
        with pytest.raises(ValueError, match=r"\(2, 2\).*\(300, 200\).*\(3, 2\)"):
            numpy_deepseek.dequantise(np.ones((300, 200)), np.ones((2, 2)), (128, 128))
