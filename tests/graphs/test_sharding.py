"""Sharding plans: notation, arithmetic, and slices that tile every array."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.errors import GraphError
from msds_graphs.mesh import Mesh
from msds_graphs.sharding import Rules, ShardPlan, rank_shards, shard, stage_layers
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import tree_items

PLANS = st.builds(
    lambda dp, tp, pp, ep: ShardPlan(dp=dp, tp=tp, pp=pp, ep=ep if (dp * tp) % ep == 0 else math.gcd(ep, dp * tp)),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4, 8]),
)
RULES = Rules(
    axes={"vocab": "tp", "heads": "tp", "experts": "ep", "expert_mlp": "ep_rest", "embed": None},
    places={"embed_tokens": "ends", "layers": "spread", "norm": "last"},
    units={"heads": 24},
    padded=frozenset({"vocab"}),
    hints={"heads": "number of heads"},
)
TREE: dict[str, Any] = {
    "embed_tokens": ArraySpec((13, 5), "float32", ("vocab", "embed")),
    "layers": tuple(
        {
            "q": ArraySpec((48, 5), "float32", ("heads", "embed")),
            "experts": ArraySpec((96, 5, 96), "int8", ("experts", "embed", "expert_mlp")),
            "scale": ArraySpec((96, 96), "bfloat16", ("experts", "expert_mlp")),
        }
        for _ in range(5)
    ),
    "norm": ArraySpec((5,), "float32", ("embed",)),
}
CUT = {"embed_tokens": ("tp",), "q": ("tp",), "experts": ("ep", "ep_rest"), "scale": ("ep", "ep_rest"), "norm": ()}


@given(PLANS)
def test_notation_reads_back(plan: ShardPlan) -> None:
    assert ShardPlan.parse(str(plan)) == plan
    assert ShardPlan.parse(json.dumps(plan.to_json())) == plan


def test_axes_that_are_left_out_are_one() -> None:
    assert ShardPlan.parse("dp2.tp4.ep8") == ShardPlan(dp=2, tp=4, ep=8, pp=1)
    assert ShardPlan.parse('{"tp": 4}') == ShardPlan(tp=4)
    assert str(ShardPlan()) == "tp1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp2,tp4", "'dp2,tp4' is not an axis with a number; write for example dp2.tp4.ep8"),
        ("", "is not an axis"),
        ("tp", "'tp' is not an axis with a number"),
        ("dp2.cp4", "axis 'cp': the axes are dp, tp, ep and pp"),
        ("tp2.tp4", "gives tp twice"),
        ('{"tp": 2, "tp": 4}', "gives tp twice"),
        ('{"tp": "2"}', "tp is '2': it must be a whole number"),
        ('{"tp": true}', "tp is True"),
        ('{"tp": 2', "is not JSON"),
        ("tp0", "tp is 0: it must be a whole number of at least 1"),
        ("dp2.tp4.ep3", r"ep 3 does not divide dp \* tp = 2 \* 4 = 8.*legal are 1, 2, 4, 8"),
        ("tp4.ep8", r"ep 8 does not divide dp \* tp = 1 \* 4 = 4.*legal are 1, 2, 4$"),
        ("ep2", r"ep 2 does not divide dp \* tp = 1 \* 1.*write tp2.ep2 or dp2.ep2"),
    ],
)
def test_bad_plans_are_named(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        ShardPlan.parse(text)


def test_a_plan_must_fill_the_mesh() -> None:
    ShardPlan.parse("dp2.tp8.ep16").check_mesh(Mesh.parse("a2:16"))
    ShardPlan.parse("dp2.tp4.pp2").check_mesh(Mesh.parse("a2:16"))
    with pytest.raises(GraphError, match=r"pp \* dp \* tp = 1 \* 2 \* 4 = 8 ranks, mesh a2:16 has 16"):
        ShardPlan.parse("dp2.tp4.ep8").check_mesh(Mesh.parse("a2:16"))


@given(PLANS)
def test_every_rank_has_an_address_in_both_views(plan: ShardPlan) -> None:
    places = [plan.coordinates(rank) for rank in range(plan.ranks)]
    for view in (("pp", "dp", "tp"), ("pp", "ep", "ep_rest")):
        assert len({tuple(place[axis] for axis in view) for place in places}) == plan.ranks
    for axis, size in {**plan.sizes(), "pp": plan.pp}.items():
        for rank in range(plan.ranks):
            group = plan.group(axis, rank)
            assert rank in group
            assert [plan.coordinates(other)[axis] for other in group] == list(range(size))


@given(PLANS)
def test_slices_of_a_stage_tile_every_array(plan: ShardPlan) -> None:
    """Each element is held by exactly as many ranks of its stage as the axes that cut the array leave over."""
    sizes = plan.sizes()
    held: dict[str, list[int]] = {path: [] for path, _ in tree_items(TREE)}
    counts = {path: {} for path in held}  # type: dict[str, dict[int, Any]]
    for rank in range(plan.ranks):
        stage = plan.coordinates(rank)["pp"]
        for path, part in rank_shards(TREE, RULES, plan, rank).items():
            spec = dict(tree_items(TREE))[path]
            count = counts[path].setdefault(stage, np.zeros(spec.shape, np.int64))
            count[part.index] += 1
            held[path].append(rank)
            assert part.shape == shard(path, spec, RULES, plan, 0).shape  # every rank of every stage holds as much
            assert part.nbytes == math.prod(part.shape) * {"float32": 4, "int8": 1, "bfloat16": 2}[spec.dtype]
    for path, by_stage in counts.items():
        name = path.rsplit(".", 1)[-1]
        copies = plan.stage_ranks // math.prod(sizes[axis] for axis in CUT[name])
        for count in by_stage.values():
            assert (count == copies).all(), path
        if not CUT[name]:
            assert copies == plan.stage_ranks  # whole on every rank
        stages = {"embed_tokens": {0, plan.pp - 1}, "norm": {plan.pp - 1}}.get(name)
        assert len(by_stage) == 1 if stages is None else set(by_stage) == stages


@given(st.integers(1, 40), st.integers(1, 12))
def test_stages_are_runs_of_layers(layers: int, stages: int) -> None:
    plan = ShardPlan(pp=stages)
    if stages > layers:
        with pytest.raises(GraphError, match=f"pp is {stages}: {layers} layers"):
            stage_layers(layers, plan, 0)
        return
    runs = [stage_layers(layers, plan, stage) for stage in range(stages)]
    assert [layer for run in runs for layer in run] == list(range(layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_padding_is_stated() -> None:
    """13 rows for four ranks: four each, the last holds one and three rows of zeros."""
    spec, plan = TREE["embed_tokens"], ShardPlan(tp=4)
    last = shard("embed_tokens", spec, RULES, plan, 3)
    assert last.index == (slice(12, 13), slice(0, 5))
    assert last.padding == (3, 0)
    assert last.shape == (4, 5)
    short = shard("x", ArraySpec((5, 5), "int8", ("vocab", "embed")), RULES, plan, 3)  # two rows each, none left
    assert (short.index[0], short.padding[0]) == (slice(5, 5), 2)


def test_what_cannot_be_cut_is_refused_with_the_nearest_sizes() -> None:
    """48 rows are 24 heads of two: 16 ranks could cut the rows, but not the heads."""
    with pytest.raises(GraphError, match="number of heads 24 of q cannot be cut by tp = 16: legal are 12 and 24"):
        shard("q", ArraySpec((48, 5), "int8", ("heads", "embed")), RULES, ShardPlan(tp=16), 0)
    with pytest.raises(GraphError, match="axis 'experts' 96 of e cannot be cut by ep = 5: legal are 4 and 6"):
        shard("e", ArraySpec((96,), "int8", ("experts",)), RULES, ShardPlan(tp=5, ep=5), 0)


def test_collisions_name_both_axes() -> None:
    with pytest.raises(GraphError, match="axes 'vocab' and 'heads' of w both go to mesh axis 'tp'"):
        shard("w", ArraySpec((8, 24), "int8", ("vocab", "heads")), RULES, ShardPlan(), 0)
    with pytest.raises(GraphError, match="axes 'experts' and 'heads' of w go to mesh axes 'ep' and 'tp', which number"):
        shard("w", ArraySpec((8, 24), "int8", ("experts", "heads")), RULES, ShardPlan(), 0)


def test_names_without_a_rule_are_refused() -> None:
    with pytest.raises(GraphError, match="axis 'colour' of w has no rule: the rules know vocab"):
        shard("w", ArraySpec((8,), "int8", ("colour",)), RULES, ShardPlan(), 0)
    with pytest.raises(GraphError, match="extra has no place: the rules place embed_tokens"):
        rank_shards({"extra": ArraySpec((8,), "int8")}, RULES, ShardPlan(), 0)
    with pytest.raises(GraphError, match="rank 4 is outside plan tp4 of 4 ranks"):
        rank_shards(TREE, RULES, ShardPlan(tp=4), 4)
