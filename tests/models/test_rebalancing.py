"""Rebalancing experts: never worse, few moves, groups at home, and between nodes only where moving inside one is no
gain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.models.specs.placement import ExpertPlacement, balance_experts, keeps_groups
from msds.models.specs.rebalancing import count_arrivals, count_moves, rebalance_experts
from msds_graphs.errors import GraphError
from tests.models.test_placement import problems

LEAST = st.sampled_from([0.0, 0.05, 0.3])


def homes(placement: ExpertPlacement, nodes: int, groups: int) -> list[set[int]]:
    """The groups of experts that each node holds any of."""
    each, size = placement.ranks // nodes, placement.num_experts // groups
    parts = [placement.slots[node * each : (node + 1) * each] for node in range(nodes)]
    return [{expert // size for row in part for expert in row} for part in parts]


def at_home(placement: ExpertPlacement, nodes: int, groups: int) -> bool:
    """Whether no group is on two nodes."""
    return sum(map(len, homes(placement, nodes, groups))) == groups


def earlier(draw, problem):
    """An old placement of a problem: as balanced for other counts, with its topology or without."""
    counts, ranks, slots, nodes, groups = problem
    before = draw(st.lists(st.integers(0, 100), min_size=len(counts), max_size=len(counts)))
    knows = draw(st.booleans())
    return balance_experts(before, ranks, slots, nodes=nodes if knows else 1, groups=groups if knows else 1)


@given(st.data(), problems(), LEAST)
def test_what_holds_of_every_rebalancing(data, problem, least):
    counts, _, slots, nodes, groups = problem
    old = earlier(data.draw, problem)
    new = rebalance_experts(old, counts, nodes=nodes, groups=groups, least_gain=least)  # refuses itself what is none
    assert (new.ranks, new.slots_per_rank, new.num_experts) == (old.ranks, slots, len(counts))
    before, after = old.load(counts), new.load(counts)
    assert new == old or after.max() < (1 - least) * before.max()
    if keeps_groups(len(counts), slots, nodes, groups) and new != old:
        assert at_home(new, nodes, groups)
    arriving = [set(row) - set(held) for held, row in zip(old.slots, new.slots, strict=True)]
    assert count_moves(old, new) == sum(map(len, arriving))  # who stays keeps the slot
    assert count_arrivals(old, new, nodes) <= count_moves(old, new)
    assert count_arrivals(old, new, 1) == 0
    settled = rebalance_experts(new, counts, nodes=nodes, groups=groups, least_gain=least)
    assert settled.load(counts).max() <= after.max()


@given(st.data(), problems(), LEAST)
def test_a_node_that_need_not_move_does_not(data, problem, least):
    counts, ranks, slots, nodes, groups = problem
    if not keeps_groups(len(counts), slots, nodes, groups):
        return
    old = balance_experts(counts[::-1], ranks, slots, nodes=nodes, groups=groups)
    new = rebalance_experts(old, counts, nodes=nodes, groups=groups, least_gain=least)
    each, most = ranks // nodes, new.load(counts).max()
    for node, (had, has) in enumerate(zip(homes(old, nodes, groups), homes(new, nodes, groups), strict=True)):
        span = slice(node * each, (node + 1) * each)
        if had == has and old.load(counts)[span].max() <= most:
            assert old.slots[span] == new.slots[span]


@given(problems(), LEAST)
def test_weights_cross_nodes_only_where_no_node_can_help_itself(problem, least):
    """Each node rebalanced on its own, as a layer of its experts alone, would not be gain enough."""
    counts, ranks, slots, nodes, groups = problem
    if not keeps_groups(len(counts), slots, nodes, groups):
        return
    old = balance_experts(counts[::-1], ranks, slots, nodes=nodes, groups=groups)
    new = rebalance_experts(old, counts, nodes=nodes, groups=groups, least_gain=least)
    each, loads = ranks // nodes, []
    for node in range(nodes):
        rows = old.slots[node * each : (node + 1) * each]
        names = sorted({expert for row in rows for expert in row})
        own = ExpertPlacement(len(names), tuple(tuple(names.index(expert) for expert in row) for row in rows))
        part = [counts[name] for name in names]
        loads.append(rebalance_experts(own, part).load(part).max())
    if count_arrivals(old, new, nodes) or new == old:
        assert max(loads) >= (1 - least) * old.load(counts).max() * (1 - 1e-9)
    else:
        assert new.load(counts).max() == pytest.approx(max(loads))


@given(problems(), st.randoms(use_true_random=False))
def test_on_one_node_it_is_balancing_with_few_moves(problem, random):
    counts, ranks, slots, _, _ = problem
    before = [random.randrange(100) for _ in counts]
    old = balance_experts(before, ranks, slots)
    best, new = balance_experts(counts, ranks, slots), rebalance_experts(old, counts)
    assert new == old or sorted(sorted(row) for row in new.slots) == sorted(sorted(row) for row in best.slots)
    assert new.load(counts).max() == pytest.approx(min(best.load(counts).max(), old.load(counts).max()))
    turned = ExpertPlacement(len(counts), best.slots[1:] + best.slots[:1])  # as good on other ranks
    assert rebalance_experts(turned, counts) == turned


# Eight experts in four groups on two nodes of two ranks, and one slot more per rank than experts need.
SIZES = {"ranks": 4, "slots_per_rank": 3}
TOPOLOGY = {"nodes": 2, "groups": 4}


def test_a_node_helps_itself_before_groups_are_exchanged():
    old = balance_experts([1] * 8, **SIZES, **TOPOLOGY)
    (here, there) = homes(old, 2, 4)
    hot = [0.0] * 8
    for group in here:
        hot[2 * group : 2 * group + 2] = [40, 4]
    for group in there:
        hot[2 * group : 2 * group + 2] = [5, 5]
    first = rebalance_experts(old, hot, **TOPOLOGY)
    assert count_moves(old, first) > 0
    assert count_arrivals(old, first, 2) == 0
    assert homes(first, 2, 4) == [here, there]
    second = rebalance_experts(first, hot, **TOPOLOGY)  # nothing is gained inside any more
    assert homes(second, 2, 4) != [here, there]
    assert second.load(hot).max() < first.load(hot).max()
    assert len(homes(second, 2, 4)[0] - here) == 1  # one exchange is enough
    assert rebalance_experts(second, hot, **TOPOLOGY) == second


def test_few_groups_are_exchanged():
    """Nodes of loads 9, 14 and 17: one exchange makes them 13, 14 and 13. Dealing anew would bring four experts."""
    old, counts = ExpertPlacement(9, ((0, 1, 2), (3, 4, 5), (6, 7, 8))), [0, 6, 3, 6, 0, 8, 3, 7, 7]
    new = rebalance_experts(old, counts, nodes=3, groups=9)
    assert new.slots == ((0, 1, 8), (3, 4, 5), (6, 7, 2))
    assert count_arrivals(old, new, 3) == count_moves(old, new) == 2


def test_replicas_stay_on_the_node_of_their_expert():
    counts = [100, 1, 1, 1, 1, 1, 1, 1]
    new = rebalance_experts(balance_experts([1] * 8, **SIZES, **TOPOLOGY), counts, **TOPOLOGY)
    holders = {rank // 2 for rank, _ in new.holders(0)}
    assert len(new.holders(0)) == 2
    assert len(holders) == 1


def test_groups_that_are_scattered_come_home_when_that_pays():
    scattered = ExpertPlacement(8, ((0, 4, 2), (6, 1, 3), (5, 7, 0), (3, 2, 1)))
    assert not at_home(scattered, 2, 4)
    counts = [9, 1, 9, 1, 30, 1, 9, 1]
    new = rebalance_experts(scattered, counts, **TOPOLOGY)
    assert at_home(new, 2, 4)
    assert rebalance_experts(scattered, [0] * 8, **TOPOLOGY) == scattered


def test_without_groups_too_weights_stay_on_their_node_first():
    old = ExpertPlacement(8, ((0, 1), (2, 3), (4, 5), (6, 7)))
    new = rebalance_experts(old, [8, 8, 1, 1, 4, 4, 4, 4], nodes=2)
    assert count_arrivals(old, new, 2) == 0
    assert new.slots[2:] == old.slots[2:]
    assert new.load([8, 8, 1, 1, 4, 4, 4, 4]).max() == 9


@pytest.mark.parametrize("topology", [{"nodes": 3}, {"groups": 3}])
def test_a_topology_that_cannot_be_is_named(topology):
    with pytest.raises(GraphError, match="must divide"):
        rebalance_experts(ExpertPlacement.contiguous(8, 4), np.ones(8).tolist(), **topology)
