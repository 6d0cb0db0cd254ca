"""Ranks that would wait for each other are found, whatever the difference."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.dryrun.agreement import disagreements
from msds_graphs.dryrun.ir import Collective

AXES = ("tp", "dp", "ep")
CALLS = st.builds(
    Collective,
    kind=st.sampled_from(("all_reduce", "all_gather")),
    group=st.sampled_from(AXES),
    dtype=st.sampled_from(("bfloat16", "int32")),
    shape=st.tuples(st.integers(1, 3), st.just(8)),
    result=st.tuples(st.integers(1, 3), st.just(8)),
)


def of_rank(rank: int, calls: list[Collective]) -> tuple[Collective, ...]:
    """The same calls in the groups of a rank."""
    return tuple(replace(call, group=f"{call.group}{rank}") for call in calls)


def found(by_rank: dict[int, list[Collective]]) -> list[str]:
    calls = {rank: of_rank(rank, calls) for rank, calls in by_rank.items()}
    return list(disagreements(calls, {rank: {f"{axis}{rank}": axis for axis in AXES} for rank in by_rank}))


@given(st.lists(CALLS), st.integers(1, 4))
def test_equal_ranks_agree(calls, ranks):
    assert found(dict.fromkeys(range(ranks), calls)) == []


@given(st.lists(CALLS, min_size=1), st.data())
def test_any_difference_names_ranks_and_the_first_call(calls, data):
    place = data.draw(st.integers(0, len(calls) - 1))
    other = list(calls)
    if data.draw(st.booleans()):
        changed = data.draw(CALLS.filter(lambda call: call != calls[place]))
        other[place] = changed
    else:
        other = calls[:place]
    (text,) = found({0: calls, 3: calls, 5: other})
    assert text.startswith(f"ranks 0 and 5 would wait for each other: collective {place + 1} is ")
    assert calls[place].kind in text


def test_nothing_to_compare():
    assert found({}) == []
    assert found({7: []}) == []
