"""The benchmark takes a decode step apart by name: the names must be those of the model files."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from tests.benchmarks import stand_ins
from tests.benchmarks.parts import DEEPSEEK_PARTS, LLAMA_PARTS, left_out, parts_of
from tests.benchmarks.report import part_costs

PATCHES = sorted({patch for part in (*DEEPSEEK_PARTS, *LLAMA_PARTS) for patch in part.patches})


@pytest.mark.parametrize(("module", "name", "stand_in"), PATCHES)
def test_stand_in_takes_what_the_op_takes(module: str, name: str, stand_in: str) -> None:
    original, replacement = getattr(import_module(module), name), getattr(stand_ins, stand_in)
    if inspect.isfunction(original):  # primitives of MindSpore have no signature
        assert len(inspect.signature(replacement).parameters) == len(inspect.signature(original).parameters)


def test_ops_are_back_afterwards() -> None:
    deepseek = import_module("msds.models.deepseek")
    original = deepseek.moe_experts
    with left_out(parts_of(deepseek)):
        assert deepseek.moe_experts is stand_ins.moe_experts
    assert deepseek.moe_experts is original


def test_costs_add_up_to_the_whole_step() -> None:
    variants = [("whole step", [0.010]), ("without a", [0.007]), ("without b", [0.008]), ("without all", [0.001])]
    costs = {cost.name: cost.milliseconds for cost in part_costs(variants)}
    assert costs["a"] == pytest.approx(3)
    assert costs["b"] == pytest.approx(2)
    assert costs["not attributed"] == pytest.approx(4)
    assert sum(ms for name, ms in costs.items() if name != "whole step") == pytest.approx(costs["whole step"])
