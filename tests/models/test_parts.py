"""A rank's part, loaded by slices, is that part of the whole; and plans that cannot be executed are refused."""

from __future__ import annotations

import numpy as np
import pytest

import msds
from msds.checkpoint import Checkpoint
from msds.config import read_config
from msds.errors import OptionError
from msds.models.specs import model_specs
from msds.models.specs.parts import cut_tree, local_specs, moe_layers, rank_parts
from msds.models.specs.placement import ExpertPlacement, balance_experts
from msds.weights import load_weights, stored_skips
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan
from msds_graphs.trees import tree_items

LOADED = [
    ("v3_base", "dp2.tp2.ep2"),
    ("v3_fp8", "tp4.ep2"),
    ("v3_fp8", "dp2.tp2"),
    ("v2_lite", "tp4.ep4"),
    ("llama_bias", "tp2"),
    ("qwen2_tied", "dp2.tp2"),
]


def opened(folder):
    config = read_config(folder)
    block = (16, 16) if "fp8" in str(config) or "quantization" in (folder / "config.json").read_text() else None
    return config, Checkpoint.open(folder, weight_block_size=block)


@pytest.mark.parametrize(("name", "plan"), LOADED)
def test_slices_are_those_of_the_whole(tiny, name, plan):
    config, checkpoint = opened(tiny(name))
    spec, skips = model_specs(config).spec(config), stored_skips(config, config)
    whole = load_weights(checkpoint, spec, config, skips, progress=False)
    size = checkpoint.files.bytes_read
    for rank in range(ShardPlan.parse(plan).ranks):
        parts = rank_parts(spec, config, Ranks(ShardPlan.parse(plan), rank))
        before = checkpoint.files.bytes_read
        loaded = load_weights(checkpoint, spec, config, skips, parts, progress=False)
        assert checkpoint.files.bytes_read - before < 0.75 * size
        want = dict(tree_items(cut_tree(whole, parts)))
        shapes = {path: spec.shape for path, spec in tree_items(local_specs(spec, parts))}
        for path, array in tree_items(loaded):
            assert array.shape == shapes[path], path
            np.testing.assert_array_equal(array, want[path], err_msg=path)


def test_experts_go_where_their_placement_says(tiny):
    config, checkpoint = opened(tiny("v3_base"))
    spec, skips = model_specs(config).spec(config), stored_skips(config, config)
    whole = load_weights(checkpoint, spec, config, skips, progress=False)
    placements = [balance_experts(np.arange(16) ** 2, 2, 9) for _ in moe_layers(config)]
    for rank in range(2):
        parts = rank_parts(spec, config, Ranks(ShardPlan.parse("tp2.ep2"), rank), placements)
        loaded = load_weights(checkpoint, spec, config, skips, parts, progress=False)
        for name, number in moe_layers(config):
            rows = list(placements[0].slots[rank])
            held = loaded[name][number]["mlp"]["experts"]["down_proj"]
            np.testing.assert_array_equal(held, whole[name][number]["mlp"]["experts"]["down_proj"][rows])
    assert [len(row) for row in placements[0].slots] == [9, 9]


@pytest.mark.parametrize(
    ("name", "plan", "placements", "message"),
    [
        ("v3_base", "pp2", (), "pp is planned but not executed"),
        ("llama_base", "tp4", (), "key/value heads 2 cannot be cut by tp = 4"),
        ("v3_base", "tp1", (ExpertPlacement.contiguous(16, 1),), "need ranks to place them on"),
        ("v3_base", "tp2.ep2", (ExpertPlacement.contiguous(16, 2),), "1 placements.*3 MoE layers"),
        ("v3_base", "tp2.ep2", (ExpertPlacement.contiguous(8, 2),) * 3, "of 8 experts on 2 ranks: the model has 16"),
        ("llama_base", "tp2", (ExpertPlacement.contiguous(8, 2),), "0 MoE layers"),
    ],
)
def test_what_cannot_be_executed_is_refused_before_loading(tiny, name, plan, placements, message):
    with pytest.raises(OptionError, match=message):
        msds.load(tiny(name), ranks=Ranks(ShardPlan.parse(plan), 0), placements=placements)
