"""Ladders, the choice of a bucket, waste, and the refusal of unplanned shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.buckets import Bucket, choose_bucket, ladder, padding_waste, unique_buckets, worst_waste
from msds_graphs.errors import GraphError, UnplannedShapeError

SIZES = st.fixed_dictionaries({"S": st.integers(1, 9), "Q": st.integers(1, 40)})
BUCKETS = st.lists(SIZES.map(Bucket), min_size=1, max_size=6, unique=True)


def test_a_ladder_is_the_powers_of_two_between_limits() -> None:
    assert [dict(bucket) for bucket in ladder({"S": (1, 4), "B": 7})] == [
        {"S": 1, "B": 7},
        {"S": 2, "B": 7},
        {"S": 4, "B": 7},
    ]
    assert [bucket["Q"] for bucket in ladder({"Q": (3, 20)})] == [3, 4, 8, 16, 20]
    assert len(ladder({"S": (1, 8), "Q": (16, 512), "B": (8, 64)})) <= 12


@given(
    st.dictionaries(
        st.sampled_from("SQB"),
        st.tuples(st.integers(1, 300), st.integers(0, 300)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
    ),
    st.integers(8, 30),
)
def test_a_ladder_is_short_and_holds_every_shape_within_its_limits(limits: dict[str, Any], most: int) -> None:
    buckets = ladder(limits, most=most)
    assert len(buckets) <= most
    ends = {name: {bucket[name] for bucket in buckets} for name in limits}
    for name, (low, high) in limits.items():
        assert {low, high} <= ends[name] <= set(range(low, high + 1))
    assert choose_bucket(buckets, {name: high for name, (_, high) in limits.items()})


def test_ladder_limits_are_checked() -> None:
    with pytest.raises(GraphError, match=r"limits .* of dim 'S'"):
        ladder({"S": (4, 2)})
    with pytest.raises(GraphError, match=r"limits .* of dim 'S'"):
        ladder({"S": 0})
    with pytest.raises(GraphError, match="at least 8 buckets, more than most=4"):
        ladder({"S": (1, 8), "Q": (1, 8), "B": (1, 8)}, most=4)


@given(BUCKETS, SIZES)
def test_the_least_volume_that_fits_is_chosen(buckets: list[Bucket], dims: dict[str, int]) -> None:
    fitting = [bucket for bucket in buckets if all(size <= bucket[name] for name, size in dims.items())]
    if not fitting:
        with pytest.raises(UnplannedShapeError) as refused:
            choose_bucket(buckets, dims)
        assert refused.value.dims == dims
        assert 1 <= len(refused.value.nearest) <= 3
        assert all(Bucket(bucket) in buckets for bucket in refused.value.nearest)
        return
    chosen = choose_bucket(buckets, dims)
    assert chosen.volume == min(bucket.volume for bucket in fitting)
    assert chosen in fitting
    assert 0 <= padding_waste(chosen, dims) < 1


@given(st.lists(SIZES.map(Bucket), min_size=1, max_size=3, unique=True))
def test_worst_waste_is_the_worst_over_all_shapes(buckets: list[Bucket]) -> None:
    worst = dict.fromkeys(buckets, 0.0)
    for sequences in range(1, 10):
        for queries in range(1, 41):
            dims = {"S": sequences, "Q": queries}
            if any(bucket.holds(dims) for bucket in buckets):
                chosen = choose_bucket(buckets, dims)
                worst[chosen] = max(worst[chosen], padding_waste(chosen, dims))
    for bucket in buckets:
        assert math.isclose(worst_waste(buckets, bucket), worst[bucket])


def test_an_unplanned_shape_is_told_its_neighbours() -> None:
    buckets = ladder({"S": (1, 4), "Q": (8, 16)})
    with pytest.raises(UnplannedShapeError, match=r"S=5 Q=9 is in no bucket \(S=5 exceeds the largest 4\)") as refused:
        choose_bucket(buckets, {"S": 5, "Q": 9})
    assert refused.value.nearest[0] == {"S": 4, "Q": 8}
    with pytest.raises(UnplannedShapeError, match="each size is planned, but not together"):
        choose_bucket([Bucket({"S": 1, "Q": 8}), Bucket({"S": 4, "Q": 1})], {"S": 2, "Q": 2})


def test_a_bucket_is_an_immutable_mapping() -> None:
    bucket = Bucket({"S": 2, "Q": 8})
    assert bucket == {"Q": 8, "S": 2}
    assert hash(bucket) == hash(Bucket({"Q": 8, "S": 2}))
    assert (repr(bucket), repr(Bucket({})), bucket.volume) == ("S=2 Q=8", "static", 16)
    with pytest.raises(TypeError):
        bucket["S"] = 3  # type: ignore[index]


def test_buckets_must_name_the_symbols_of_the_batch() -> None:
    assert unique_buckets([{"S": 1}, {"S": 1}, {"S": 2}], ["S"]) == (Bucket({"S": 1}), Bucket({"S": 2}))
    with pytest.raises(GraphError, match=r"names \['Q', 'S'\], the batch has symbolic dims \['S'\]"):
        unique_buckets([{"S": 1, "Q": 2}], ["S"])
    with pytest.raises(GraphError, match="no buckets"):
        unique_buckets([], ["S"])
    for size in (0, -1, 1.0, True):
        with pytest.raises(GraphError, match="bucket dim 'S'"):
            Bucket({"S": size})  # type: ignore[dict-item]
