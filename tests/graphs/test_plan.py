"""Plans: which implementation an op uses."""

from __future__ import annotations

import pytest

from msds_graphs.errors import GraphError
from msds_graphs.plan import Plan


def test_ops_are_portable_unless_named() -> None:
    plan = Plan({"moe_experts": "cpu", "attention": "reference"})
    assert plan.implementation("moe_experts") == "cpu"
    assert plan.implementation("rms_norm") == "portable"
    assert plan == Plan((("attention", "reference"), ("moe_experts", "cpu")))
    assert hash(plan) == hash(Plan({"attention": "reference", "moe_experts": "cpu"}))
    assert Plan() != plan


def test_unknown_implementations_and_duplicates_are_refused() -> None:
    with pytest.raises(GraphError, match="'cuda' of op 'moe_experts' is unknown: use reference, portable"):
        Plan({"moe_experts": "cuda"})
    with pytest.raises(GraphError, match="two implementations"):
        Plan((("a", "cpu"), ("a", "portable")))
