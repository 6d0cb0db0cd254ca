"""What would make a plan fit: every remedy, taken at its word, does."""

from __future__ import annotations

from typing import Any

import pytest

from msds.planning import make_demand
from msds.planning.search import best_plan, rank_plans
from msds_graphs.sharding import ShardPlan
from tests.planning.test_plans import planned, remedy


def test_what_fits_is_offered_with_plans_that_are_executed() -> None:
    """32 texts of 163,840 tokens on four A2 nodes: stages alone would hold them with int8 weights."""
    options = {"max_model_len": 163840, "concurrency": 32}
    report = planned("deepseek-v3", "a2:32", **options)
    fewer, shorter, mesh, both = report.remedies[:4]
    for found in (fewer, shorter, mesh, both):
        assert found.works
        assert ShardPlan.parse(found.plan).pp == 1
    texts, length = (
        int(fewer.change.removeprefix("--concurrency ")),
        int(shorter.change.removeprefix("--max-model-len ")),
    )
    assert planned("deepseek-v3", "a2:32", **options | {"concurrency": texts}).plan.pp == 1
    assert best_plan(make_demand("deepseek-v3", "a2:32", **options | {"concurrency": texts + 1})).plan.pp > 1
    assert not any(
        item.status == "fits" and item.plan.pp == 1
        for item in rank_plans(make_demand("deepseek-v3", "a2:32", **options | {"max_model_len": length + 16}))
    )
    assert planned("deepseek-v3", "a2:32", **options | {"max_model_len": length}).fits
    for found in report.remedies[4:]:
        assert found.fits
        assert not found.executed
        assert ShardPlan.parse(found.plan).pp > 1
    assert report.render().count("): planned only, not executed") == 2
    assert [item["executed"] for item in report.to_json()["remedies"]] == [True] * 4 + [False] * 2


def test_int8_weights_and_a_larger_mesh_together() -> None:
    """V3 in bf16 needs four nodes; int8 weights alone are too much for one, and enough for two."""
    report = planned("deepseek-v3", "a2:8")
    assert not remedy(report, "--quant w8a8").fits
    assert remedy(report, "--mesh a2:32").works
    both = remedy(report, "--quant w8a8 --mesh a2:16")
    assert both.works
    assert both.needed == planned("deepseek-v3", "a2:16", quant="w8a8").memory.needed
    assert not any(
        "--mesh" in item.change and "--quant" in item.change for item in planned("deepseek-v3", "a2:16").remedies
    )


@pytest.mark.parametrize(
    ("model", "mesh", "options", "changes"),
    [
        ("deepseek-v3", "a2:32", {}, {"--concurrency"}),
        ("deepseek-v3", "a2:8", {"max_model_len": 163840}, {"--quant", "--mesh", "--concurrency"}),
        ("r1-distill-llama-70b", "a2:2", {"quant": "w8a8"}, {"--concurrency"}),
        ("tiny-r1", "cpu:2", {}, {"--concurrency"}),
    ],
)
def test_any_number_of_texts_is_met_with_what_works(
    monkeypatch: pytest.MonkeyPatch, model: str, mesh: str, options: Any, changes: set[str]
) -> None:
    """The first remedy, taken at its word, fits with a plan that is executed; on a CPU the whole process does."""
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: 20 << 30)
    report = planned(model, mesh, concurrency=100000, **options)
    assert not report.fits
    words = report.remedies[0].change.split()
    asked = dict(zip(words[::2], words[1::2], strict=True))
    assert asked.keys() == changes
    taken = options | {"concurrency": int(asked["--concurrency"])}
    if "--quant" in asked:
        taken["quant"] = asked["--quant"]
    found = planned(model, asked.get("--mesh", mesh), **taken)
    assert found.fits
    assert found.plan.pp == 1
    assert not any("activations and graphs may take" in note for note in found.notes)


def test_texts_that_nothing_holds_are_made_fewer_and_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text of 163,840 tokens of V3 does not fit two nodes with int8 weights, if no larger mesh is suggested."""
    monkeypatch.setattr("msds.planning.remedies.MOST_SUGGESTED_RANKS", 16)
    monkeypatch.setattr("msds.planning.demand.NPU_MEMORY_FRACTION", 0.8)
    first = planned("deepseek-v3", "a2:8", max_model_len=163840, concurrency=9).remedies[0]
    assert first.works
    prefix = "--quant w8a8 --mesh a2:16 --concurrency 1 --max-model-len "
    assert first.change.startswith(prefix)
    shorter = planned(
        "deepseek-v3", "a2:16", quant="w8a8", concurrency=1, max_model_len=int(first.change.removeprefix(prefix))
    )
    assert shorter.fits


def test_a_plan_of_stages_that_fits_comes_with_what_can_be_executed() -> None:
    report = planned("deepseek-v3", "a2:16", quant="w8a8", concurrency=224)
    assert report.plan.pp > 1
    assert report.fits
    assert "fits, but is planned only, not executed" in report.render()
    assert all(item.works for item in report.remedies)
    assert {item.change.split()[0] for item in report.remedies} == {"--concurrency", "--max-model-len", "--mesh"}
    assert not planned("deepseek-v3", "a2:16", "tp8.ep8.pp2", quant="w8a8").remedies  # asked for, and it fits


@pytest.mark.parametrize("options", [{}, {"quant": "w8a8"}, {"quant": "w8a8", "concurrency": 224}])
def test_the_best_plan_is_the_first_of_all(options: Any) -> None:
    demand = make_demand("deepseek-v3", "a2:16", **options)
    assert best_plan(demand) == rank_plans(demand)[0]


@pytest.mark.parametrize(
    ("model", "mesh", "plan", "options"),
    [
        ("r1-distill-llama-70b", "a2:2", "tp2", {"concurrency": 4}),
        ("deepseek-v3", "a2:16", "tp8.ep8.pp2", {"concurrency": 16}),
        ("r1-distill-qwen-7b", "a2:1", "tp1", {"concurrency": 1000}),
    ],
)
def test_remedies_of_a_plan_that_was_asked_for_are_typed_as_they_stand(
    model: str, mesh: str, plan: str, options: Any
) -> None:
    report = planned(model, mesh, plan, **options)
    assert not report.fits
    for item in report.remedies:
        words = item.change.split()
        asked = {name.lstrip("-").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        taken = options | {name: int(value) if value.isdigit() else value for name, value in asked.items()}
        found = planned(model, taken.pop("mesh", mesh), taken.pop("plan", plan), **taken)
        assert str(found.plan) == item.plan
        assert found.fits is item.fits
        assert found.memory.needed == item.needed
