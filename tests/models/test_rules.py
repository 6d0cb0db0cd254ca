"""The rules of the project's models: every axis has one, slices reproduce what heads and experts need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds import presets
from msds.config import read_config
from msds.models.specs import model_specs, tree_bytes
from msds.models.specs.parts import rank_bytes
from msds.models.specs.rules import check_plan, sharding_rules
from msds_graphs.errors import GraphError
from msds_graphs.ranks import ALONE
from msds_graphs.sharding import ShardPlan, rank_shards
from msds_graphs.trees import tree_items
from tests.reference.variants import VARIANTS

POWERS = st.sampled_from([1, 2, 4, 8])


def trees(config):
    specs = model_specs(config)
    return specs.derived_spec(config), specs.cache_spec(config, 3, 4)


@pytest.mark.parametrize("name", VARIANTS)
def test_one_rank_holds_all_of_every_tree(tiny, name):
    config = read_config(tiny(name))
    for tree in trees(config):
        shards = rank_shards(tree, sharding_rules(config), ShardPlan(), 0)
        assert {path: part.shape for path, part in shards.items()} == {path: s.shape for path, s in tree_items(tree)}
        assert sum(part.nbytes for part in shards.values()) == tree_bytes(tree) == rank_bytes(tree, config, ALONE)


@pytest.mark.parametrize("name", ["v3_two_mtp", "v3_no_q_lora", "v2_group_limited", "llama_base", "qwen2_base"])
@given(dp=POWERS, tp=POWERS, ep=POWERS, pp=st.sampled_from([1, 2, 3, 4]))
def test_a_plan_that_passes_cuts_every_array_into_tiles(tiny, name, dp, tp, ep, pp):
    """And what its sizes refuse, no slice is given for."""
    config = read_config(tiny(name))
    if (dp * tp) % ep:
        return
    plan, rules = ShardPlan(dp=dp, tp=tp, ep=ep, pp=pp), sharding_rules(config)
    try:
        check_plan(config, plan)
    except GraphError as error:
        if not any(text in str(error) for text in ("unevenly", "has no experts")):  # legal slices, but refused
            with pytest.raises(GraphError):
                rank_shards(model_specs(config).spec(config), rules, plan, 0)
        return
    for tree in trees(config):
        specs = dict(tree_items(tree))
        counts: dict[str, dict[int, np.ndarray]] = {}
        for rank in range(plan.ranks):
            stage = plan.coordinates(rank)["pp"]
            for path, part in rank_shards(tree, rules, plan, rank).items():
                count = counts.setdefault(path, {}).setdefault(stage, np.zeros(specs[path].shape, np.int32))
                count[part.index] += 1
        assert counts.keys() == specs.keys()
        for path, stages in counts.items():
            for count in stages.values():
                assert (count == count.flat[0]).all(), path


def test_slices_are_whole_heads(tiny):
    """Rank t of tp has the rows of its heads in the query and in both absorbed halves, and their columns in o_proj."""
    config = read_config(tiny("v3_base"))
    shards = rank_shards(trees(config)[0], sharding_rules(config), ShardPlan(tp=2), 1)
    half, heads = config.num_attention_heads // 2, config.num_attention_heads
    attention = "layers.0.self_attn."
    q = shards[attention + "q_b_proj.weight"].index[0]
    assert (q.start, q.stop) == (half * config.qk_head_dim, heads * config.qk_head_dim)
    assert shards[attention + "absorbed.w_uk"].index[0] == slice(half, heads)
    kv = config.qk_nope_head_dim + config.v_head_dim
    assert shards[attention + "kv_b_proj.weight"].index[0] == slice(half * kv, heads * kv)
    assert shards[attention + "o_proj.weight"].index[1] == slice(half * config.v_head_dim, heads * config.v_head_dim)
    for name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"):
        part = shards[attention + name]
        assert all(i.start == 0 for i in part.index)  # latents are whole


def test_routers_are_whole_and_experts_are_spread(tiny):
    config = read_config(tiny("v3_base"))
    experts, width = config.n_routed_experts, config.moe_intermediate_size
    shards = rank_shards(trees(config)[0], sharding_rules(config), ShardPlan(dp=2, tp=4, ep=4), 5)
    moe = "layers.2.mlp."
    assert shards[moe + "gate.weight"].shape == (experts, config.hidden_size)
    gate = shards[moe + "experts.gate_proj"].index
    assert gate[0] == slice(experts // 4 * 2, experts // 4 * 3)  # rank 5 is the second half of the third of four
    assert gate[1] == slice(width // 2, width)
    assert shards[moe + "experts.down_proj"].index[2] == gate[1]


@pytest.mark.parametrize(
    ("config", "plan", "message"),
    [
        (presets.deepseek_v3(), "tp3", r"number of heads 128 cannot be cut by tp = 3: the nearest legal are 2 and 4"),
        (presets.deepseek_v3(), "tp256.ep256", r"number of heads 128 .*tp = 256: the nearest legal is 128"),
        (presets.deepseek_v2(), "dp64.ep64", r"number of experts 160 .*ep = 64: the nearest legal are 40 and 80"),
        (presets.r1_distill_qwen_7b(), "tp8", r"heads 28 .*are 7 and 14; .*key/value heads 4 .*the nearest legal is 4"),
        (presets.r1_distill_qwen_1_5b(), "tp4", r"key/value heads 2 cannot be cut by tp = 4: the nearest legal is 2"),
        (presets.r1_distill_llama_8b(), "tp2.ep2", r"ep is 2, but the model has no experts: the legal ep is 1"),
        (presets.r1_distill_llama_8b(), "pp64", r"pp is 64: 32 layers make at most 32 stages"),
        (presets.deepseek_v2(), "dp20.ep20", r"ep = 20 cuts the 8 groups of experts unevenly: .* 16 and 24"),
        (replace(presets.r1_distill_llama_8b(), intermediate_size=14335), "tp2", r"MLP width 14335 .* 1 and 5"),
        (replace(presets.deepseek_v3(), moe_intermediate_size=2050), "tp4", r"expert width 2050 .*dp \* tp / ep = 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(config, plan, message):
    with pytest.raises(GraphError, match=message):
        check_plan(config, ShardPlan.parse(plan))


def test_a_vocabulary_is_padded():
    config = replace(presets.r1_distill_llama_8b(), vocab_size=1001)
    check_plan(config, ShardPlan(tp=4))
    part = rank_shards(trees(config)[0], sharding_rules(config), ShardPlan(tp=4), 3)["lm_head.weight"]
    assert (part.index[0], part.padding[0], part.shape[0]) == (slice(753, 1001), 3, 251)


@pytest.mark.parametrize(("tied", "mtp", "both"), [(False, 0, False), (True, 0, True), (False, 1, True)])
def test_the_embedding_is_where_it_is_used(tied, mtp, both):
    """The last stage needs it for a tied head and for MTP layers."""
    config = replace(presets.deepseek_v3(), tie_word_embeddings=tied, num_nextn_predict_layers=mtp)
    plan = ShardPlan(pp=2)
    stages = [rank_shards(trees(config)[0], sharding_rules(config), plan, rank) for rank in range(2)]
    assert "embed_tokens.weight" in stages[0]
    assert ("embed_tokens.weight" in stages[1]) is both
    assert "norm.weight" not in stages[0]
    assert ("lm_head.weight" in stages[1]) is not tied
    assert "layers.30.input_layernorm.weight" in stages[0]
    assert "layers.31.input_layernorm.weight" in stages[1]
