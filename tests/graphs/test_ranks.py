"""Ranks: groups that their members agree on, and one rank for which nothing is there."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.errors import GraphError
from msds_graphs.plan import Plan
from msds_graphs.ranks import ALONE, COLLECTIVE_AXES, Ranks
from msds_graphs.sharding import ShardPlan

PLANS = st.builds(
    lambda dp, tp, pp, ep: ShardPlan(dp=dp, tp=tp, pp=pp, ep=math.gcd(ep, dp * tp)),
    *(st.sampled_from([1, 2, 3, 4]) for _ in range(3)),
    st.sampled_from([1, 2, 4, 8]),
) | st.just(ShardPlan(dp=8, ep=8, pp=2))


@given(PLANS, st.sampled_from(COLLECTIVE_AXES), st.sampled_from(["cpu", "a3"]))
def test_members_of_a_group_agree_on_it(plan: ShardPlan, axis: str, machine: str) -> None:
    names: dict[str, tuple[int, ...]] = {}
    for rank in range(plan.ranks):
        ranks = Ranks(plan, rank, machine)
        place = ranks.place(axis)
        assert place.members[place.position] == rank
        assert (ranks.size(axis), ranks.index(axis), ranks.group(axis)) == (
            len(place.members),
            place.position,
            place.group,
        )
        assert names.setdefault(place.group, place.members) == place.members
    assert sorted(rank for members in names.values() for rank in members) == list(range(plan.ranks))


@given(PLANS)
def test_one_name_means_one_set_of_ranks_on_all_axes(plan: ShardPlan) -> None:
    names: dict[str, tuple[int, ...]] = {}
    for rank in range(plan.ranks):
        for axis in COLLECTIVE_AXES:
            place = Ranks(plan, rank, "a3").place(axis)
            assert names.setdefault(place.group, place.members) == place.members


def test_a_plan_of_ops_carries_its_rank() -> None:
    assert Plan().ranks == ALONE == Ranks()
    plan = Plan({"moe_experts": "reference"}, Ranks(ShardPlan(tp=2), 1))
    assert plan != Plan({"moe_experts": "reference"}, Ranks(ShardPlan(tp=2), 0))
    assert hash(plan) == hash(Plan({"moe_experts": "reference"}, Ranks(ShardPlan(tp=2), 1)))
    assert [ALONE.size(axis) for axis in COLLECTIVE_AXES] == [1] * 6


def test_ranks_and_axes_that_do_not_exist_are_named() -> None:
    with pytest.raises(GraphError, match="rank 4 is outside plan tp4 of 4 ranks"):
        Ranks(ShardPlan(tp=4), 4)
    with pytest.raises(
        GraphError, match="axis 'pp' has no collectives: the axes are tp, dp, ep, ep_rest, stage, exchange"
    ):
        ALONE.place("pp")
    with pytest.raises(GraphError, match="machine 'a4' is unknown: use cpu, a2, a3"):
        Ranks(machine="a4")


def test_tokens_are_exchanged_in_a_group_of_their_own() -> None:
    """Where Ascend's operators can be used; they may share their group with no other collective."""
    plan = ShardPlan(dp=16, ep=16, pp=2)
    place = Ranks(plan, 20, "a2").place("exchange")
    assert (place.members, place.position) == (tuple(range(16, 32)), 4)
    others = {Ranks(plan, 20, "a2").group(axis) for axis in COLLECTIVE_AXES if axis != "exchange"}
    assert place.group not in others
    for ranks in (Ranks(plan, 20), Ranks(ShardPlan(dp=8, tp=2, ep=16), 4, "a2")):
        assert ranks.size("exchange") == 1
    assert Ranks(plan, 0, "a2").native
    assert not Ranks(plan, 0).native
