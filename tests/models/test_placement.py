"""Placements of experts: every expert somewhere, none twice on a rank, load evened out, tables that say where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.config import read_config
from msds.models.specs.parts import check_placements, expert_topology, moe_layers, spread_experts
from msds.models.specs.placement import ExpertPlacement, balance_experts
from msds_graphs.errors import GraphError
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan


@st.composite
def problems(draw):
    """counts, ranks, slots per rank, nodes, groups: anything that can be."""
    nodes, per_node = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    groups = nodes * draw(st.sampled_from([1, 2]))
    ranks = nodes * per_node
    experts = groups * draw(st.integers(1, 6))
    least = -(-experts // ranks)
    slots = draw(st.integers(least, min(experts, least + 3)))
    counts = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return counts, ranks, slots, nodes, groups


@given(problems())
def test_a_balanced_placement_is_one(problem):
    counts, ranks, slots, nodes, groups = problem
    placement = balance_experts(counts, ranks, slots, nodes=nodes, groups=groups)  # refuses itself what is no placement
    assert (placement.ranks, placement.slots_per_rank, placement.num_experts) == (ranks, slots, len(counts))
    tables = placement.tables()
    assert tables["slot_table"].shape == (len(counts), placement.max_replicas)
    assert placement.load(counts).sum() == pytest.approx(sum(counts))
    flat = [expert for row in placement.slots for expert in row]
    for expert, (row, count) in enumerate(zip(tables["slot_table"], tables["num_replicas"], strict=True)):
        assert len(set(row[:count])) == count == flat.count(expert)
        assert [flat[slot] for slot in row] == [expert] * len(row)


def test_the_hottest_are_replicated_and_ranks_evened_out():
    counts = [100, 1, 1, 1, 50, 1, 1, 1]
    placement = balance_experts(counts, 4, 3)
    load = placement.load(counts)
    assert len(placement.holders(0)) > len(placement.holders(1)) == 1
    runs = ExpertPlacement.contiguous(8, 4).load(counts)
    assert load.max() == 51  # 0 on all four ranks, 4 on two: 100 / 4 + 50 / 2 + 1
    assert runs.max() == 101


def test_groups_stay_on_their_node():
    placement = balance_experts([9, 1, 1, 9, 1, 1, 5, 5], 4, 3, nodes=2, groups=4)
    homes = [{expert // 2 for row in placement.slots[2 * node : 2 * node + 2] for expert in row} for node in range(2)]
    assert homes[0] | homes[1] == {0, 1, 2, 3}
    assert not homes[0] & homes[1]


@pytest.mark.parametrize("redundant", [0, 2, 16])
def test_the_first_placement_is_a_slot_for_each_and_replicas(tiny, redundant):
    config = read_config(tiny("v3_base"))
    placements = spread_experts(config, ShardPlan.parse("tp2.ep2"), redundant)
    assert len(placements) == len(moe_layers(config)) == 3
    assert {placement.slots_per_rank for placement in placements} == {8 + redundant // 2}
    check_placements(config, Ranks(ShardPlan.parse("tp2.ep2")), placements)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (((0, 1), (2,)), "every rank needs as many"),
        (((0, 1), (2, 4)), "rank 1 holds expert 4: the layer has 4"),
        (((0, 0), (1, 2)), "holds an expert twice"),
        (((0, 1), (1, 2)), r"experts \[3\] have no slot"),
    ],
)
def test_what_is_no_placement_is_named(slots, message):
    with pytest.raises(GraphError, match=message):
        ExpertPlacement(4, slots)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], 2, 1), r"3 experts cannot have 2 \* 1 slots"),
        (([1, 2], 1, 3), r"2 experts cannot have 1 \* 3 slots"),
        (([1, float("nan")], 2, 1), "finite numbers"),
    ],
)
def test_sizes_that_cannot_be_are_named(arguments, message):
    with pytest.raises(GraphError, match=message):
        balance_experts(*arguments)


@pytest.mark.parametrize(
    ("plan", "nodes", "wanted"),
    [
        ("tp16.ep16", 1, (1, 4)),
        ("tp16.ep16", 2, (2, 4)),
        ("dp2.tp8.ep16", 4, (4, 4)),
        ("dp2.tp8.ep8", 4, (4, 4)),  # two ranks hold an expert together, on one machine
        ("dp2.tp8.ep2", 2, (2, 4)),
        ("dp2.tp8.ep2", 4, (1, 4)),  # eight ranks hold an expert together, on two machines
    ],
)
def test_what_is_near_follows_from_plan_and_machines(tiny, plan, nodes, wanted):
    config = replace(read_config(tiny("v3_base")), n_group=4, topk_group=2)
    assert expert_topology(config, ShardPlan.parse(plan), nodes) == wanted
    everywhere = replace(config, topk_group=4)
    assert expert_topology(everywhere, ShardPlan.parse(plan), nodes) == (wanted[0], 1)
    assert expert_topology(replace(config, topk_method="greedy"), ShardPlan.parse(plan), nodes) == (wanted[0], 1)


def test_the_first_placement_knows_the_machines(tiny):
    config = replace(read_config(tiny("v3_base")), n_group=4, topk_group=2)
    (first, *_) = spread_experts(config, ShardPlan.parse("tp4.ep4"), 4, nodes=2)
    assert first == balance_experts([1.0] * 16, 4, 5, nodes=2, groups=4)
    assert first != balance_experts([1.0] * 16, 4, 5)
