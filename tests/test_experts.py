"""Moving a layer's experts, on one rank that turns its slots round: all of it, or nothing. Two ranks: tests/launch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

from msds import experts as module
from msds.config import read_config
from msds.errors import OptionError, PlacementError
from msds.experts import PROJECTIONS, move_experts
from msds.model import Model
from msds.models.specs.placement import ExpertPlacement, balance_experts
from msds_graphs.binding import bind, fresh_prefix
from msds_graphs.ranks import ALONE, Ranks
from msds_graphs.sharding import ShardPlan

OLD, NEW = ExpertPlacement(4, ((0, 1, 2, 3),)), ExpertPlacement(4, ((2, 1, 3, 0),))
MOVES = 3 * len(PROJECTIONS)


@pytest.fixture
def experts() -> dict[str, Any]:
    """A bound node of four experts."""
    rng = np.random.default_rng(0)
    weights = {name: rng.random((4, 2, 3), np.float32) for name in PROJECTIONS}
    return dict(bind(weights | OLD.tables(), fresh_prefix("experts")))


def contents(experts: dict[str, Any]) -> dict[str, bytes]:
    return {name: leaf.asnumpy().tobytes() for name, leaf in experts.items()}


def test_weights_and_tables_go_together(experts: dict[str, Any]) -> None:
    before = {name: experts[name].asnumpy().copy() for name in PROJECTIONS}
    move_experts(experts, OLD, NEW, ALONE)
    for name in PROJECTIONS:
        np.testing.assert_array_equal(experts[name].asnumpy(), before[name][list(NEW.slots[0])])
    for name, table in NEW.tables().items():
        np.testing.assert_array_equal(experts[name].asnumpy(), table)


def failing(at: int, when: Callable[[Any], bool] = lambda value: True) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function raise on call number `at` of those whose first argument is meant."""
    calls = iter(range(1 << 20))

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def broken(value: Any, *arguments: Any) -> Any:
            if when(value) and next(calls) == at:
                raise MemoryError
            return function(value, *arguments)

        return broken

    return wrap


def unreadable(at: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """A collective whose result number `at` cannot be fetched; those that ask for agreement work."""
    calls = iter(range(1 << 20))

    def reduce(value: Tensor, axis: str, ranks: Ranks) -> Any:
        found = real(value, axis, ranks)
        return SimpleNamespace(asnumpy=lambda: found.no) if axis == "ep" and next(calls) == at else found

    return reduce


@pytest.mark.parametrize(
    ("what", "at"),
    [
        *(("to_numpy", at) for at in range(len(PROJECTIONS))),
        *(("Tensor", at) for at in range(len(PROJECTIONS) + MOVES)),
        *(("all_reduce", at) for at in range(MOVES)),
    ],
)
def test_a_fault_before_the_swap_leaves_the_layer_as_it_was(
    experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, what: str, at: int
) -> None:
    before = contents(experts)
    real = getattr(module, what)
    if what == "all_reduce":
        broken = unreadable(at, real)
    else:
        broken = failing(at, lambda value: value.ndim > 1)(real)
    monkeypatch.setattr(module, what, broken)
    with pytest.raises(PlacementError, match=r"MemoryError|no attribute 'no'"):
        move_experts(experts, OLD, NEW, ALONE)
    monkeypatch.undo()
    assert contents(experts) == before
    move_experts(experts, OLD, NEW, ALONE)  # nothing is left of it
    assert contents(experts) != before


def test_a_fault_of_another_rank_stops_this_one(experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(experts)
    real = module.all_reduce
    monkeypatch.setattr(
        module, "all_reduce", lambda x, axis, ranks: Tensor([True]) if axis == "stage" else real(x, axis, ranks)
    )
    with pytest.raises(PlacementError, match="another rank could not"):
        move_experts(experts, OLD, NEW, ALONE)
    assert contents(experts) == before


def test_a_rank_with_a_fault_takes_part_in_every_sum(experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    axes, real = [], unreadable(0, module.all_reduce)

    def counted(value: Tensor, axis: str, ranks: Ranks) -> Any:
        axes.append(axis)
        return real(value, axis, ranks)

    monkeypatch.setattr(module, "all_reduce", counted)
    with pytest.raises(PlacementError):
        move_experts(experts, OLD, NEW, ALONE)
    assert axes == ["stage", *["ep"] * MOVES, "stage"]


def test_placements_are_true_of_every_layer_after_a_fault(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three layers that move cannot; the one that need not is left alone."""
    config = read_config(tiny("v3_base"))
    first, other = ExpertPlacement.contiguous(16, 2), balance_experts(np.arange(16).tolist(), 2, 8)
    mlp: Any = {"mlp": {"experts": {}}}
    model: Any = SimpleNamespace(
        config=config,
        plan=SimpleNamespace(ranks=Ranks(ShardPlan.parse("tp2.ep2"))),
        params={"layers": (mlp,) * 3, "mtp": (mlp,)},
        placements=(first,) * 3,
    )
    moved = []

    def move(experts: Any, old: ExpertPlacement, new: ExpertPlacement, ranks: Ranks) -> None:
        moved.append((old, new))
        if len(moved) == 2:
            raise PlacementError("no memory")

    monkeypatch.setattr(module, "move_experts", move)
    with pytest.raises(PlacementError, match=r"experts of layers\.2 stay where they are: no memory"):
        Model.place_experts(model, (other,) * 3)
    assert model.placements == (other, first, first)
    Model.place_experts(model, (other, first, other))
    assert model.placements == (other, first, other)
    assert moved == [(first, other)] * 3
    with pytest.raises(OptionError, match="number of slots is fixed"):
        Model.place_experts(model, (balance_experts([1] * 16, 2, 9),) * 3)
