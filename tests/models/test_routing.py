"""`route` of DeepSeek against mixtures worked out by hand: what ranks, what weighs, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from msds.config import read_config
from msds.models import deepseek
from msds_graphs.compile import compile
from msds_ops.linear import linear_float32
from msds_ops.moe import scores_from_logits

SCORES = [0.60, 0.10, 0.50, 0.45, 0.70, 0.05, 0.20, 0.20]
"""Eight experts in four groups of two."""

V3 = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5}


@pytest.fixture
def route(tiny):
    """route(scores, bias, **config fields) -> (experts, weights) of one token with these scores."""

    def routed(scores, bias=None, base="v3_base", **fields):
        config = replace(read_config(tiny(base)), **{**V3, **fields})

        def step(bound, donated, batch):
            scores = scores_from_logits(linear_float32(batch["gate"]["weight"], batch["x"]), config.scoring_func)
            topk_idx, weights = deepseek.route(batch["gate"], scores, config)
            return {"experts": topk_idx, "weights": weights}, donated

        scores = np.asarray(scores, np.float64)
        logits = np.log(scores) if config.scoring_func == "softmax" else np.log(scores / (1 - scores))
        gate = {"weight": logits[:, None].astype(np.float32)}
        if bias is not None:
            gate["e_score_correction_bias"] = np.asarray(bias, np.float32)
        batch = {"gate": gate, "x": np.ones((1, 1), np.float32)}
        out = compile(step, bound=(), batch=batch)(batch)
        return out["experts"][0].tolist(), out["weights"][0]

    return routed


def test_the_bias_ranks_and_does_not_weigh(route):
    bias = np.zeros(8)
    bias[3] = 0.4
    experts, weights = route(SCORES, bias)
    assert experts == [3, 4]
    np.testing.assert_allclose(weights, [0.97826, 1.52174], rtol=1e-5)


def test_the_bias_is_float32_whatever_the_dtype(route, tiny):
    """0.50 + 7.98 beats 0.47 + 8.00; with the biases in bfloat16 it would not. So they are never stored in it."""
    assert route([0.50, 0.47], [7.98, 8.00], n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1)[0] == [
        0
    ]
    gate = deepseek.spec(read_config(tiny("v3_base")), "bfloat16")["layers"][1]["mlp"]["gate"]
    assert {leaf.dtype for leaf in gate.values()} == {"float32"}


def test_groups_by_the_method(route):
    scores = [0.9, 0.1, 0.1, 0.1, 0.6, 0.5, 0.3, 0.1]
    groups = {"n_group": 2, "topk_group": 1}
    assert route(scores, np.zeros(8), **groups)[0] == [4, 5]  # 1.0 against 1.1, the sums of the best two
    share = np.array(scores) / np.sum(scores)
    experts, weights = route(scores, base="v2_group_limited", **groups)
    assert experts == [0, 1]  # 0.9 against 0.6, the best of each; then a tie for the lower index
    np.testing.assert_allclose(weights, 2.5 * share[:2], rtol=1e-5)


def test_refused_groups_stay_refused_below_zero(route):
    experts, _ = route(SCORES, np.full(8, -1.0), topk_group=1)
    assert experts == [2, 3]  # their sum is -1.05; were the others masked with 0, any of them would win


def test_ties_go_to_the_lower_index(route):
    assert route([0.5] * 8, np.zeros(8))[0] == [0, 1]
    assert route([0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1], np.zeros(8), topk_group=1)[0] == [2, 3]


def test_normalisation_and_scale(route):
    bias = np.zeros(8)
    np.testing.assert_allclose(route(SCORES, bias, norm_topk_prob=False)[1], [1.75, 1.25], rtol=1e-5)
    np.testing.assert_allclose(route(SCORES, bias, num_experts_per_tok=1)[1], [1.75], rtol=1e-5)
    share = np.array(SCORES) / np.sum(SCORES)
    greedy = {"base": "v2_lite", "topk_method": "greedy"}
    experts, weights = route(SCORES, norm_topk_prob=True, **greedy)  # V2 normalises instead of scaling
    assert experts == [4, 0]
    np.testing.assert_allclose(weights, [7 / 13, 6 / 13], rtol=1e-5)
    np.testing.assert_allclose(route(SCORES, norm_topk_prob=False, **greedy)[1], 2.5 * share[[4, 0]], rtol=1e-5)
