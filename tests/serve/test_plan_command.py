"""`msds plan`: exit codes, JSON and errors."""

import json
from pathlib import Path

import pytest

from msds.config import config_json
from msds.planning import PlanReport
from msds.presets import deepseek_v2_lite
from msds_serve.cli import main

EVERY = ["--eplb-step-interval", "100"]
KEYS = {
    "model", "mesh", "plan", "dtype", "quant", "max_model_len", "concurrency", "mtp", "fits", "memory", "total",
    "eplb_step_interval", "num_redundant_experts", "capacity", "estimates", "published", "others", "remedies",
    "notes", "is_estimate",
}  # fmt: skip


def test_json_has_the_documented_keys_and_integers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "deepseek-r1", "--mesh", "a2:16", "--quant", "w8a8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == KEYS
    memory = report["memory"]
    sizes = [*memory["weights"].values(), *(value for name, value in memory.items() if name != "weights")]
    assert all(type(size) is int for size in sizes)
    assert memory["weights_total"] == sum(memory["weights"].values())
    parts = ("weights_total", "cache", "activations", "graphs_and_workspace", "communication")
    assert memory["needed"] == sum(memory[part] for part in parts)
    assert memory["cache"] == memory["block"] * memory["blocks"]
    assert memory["needed"] <= memory["budget"] == memory["capacity"] * 9 // 10
    documented = str(PlanReport.to_json.__doc__)
    for key in (*KEYS, *memory, *report["estimates"], *report["published"][0], *report["others"][0]):
        assert key in documented, key


def test_exit_code_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "deepseek-v3", "--mesh", "a2:16"]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out
    assert "--quant w8a8" in out
    assert max(map(len, out.splitlines())) <= 160


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["r1", "--mesh", "a2:8"], "the presets are deepseek-v3"),
        (["deepseek-r1", "--mesh", "a2:13"], "nearest are a2:8 and a2:16"),
        (["deepseek-r1", "--mesh", "a2:16", "--plan", "tp4"], "mesh a2:16 has 16"),
        (["deepseek-r1", "--mesh", "a2:16", "--plan", "tp4x"], "'tp4x' is not an axis"),
        (["deepseek-r1", "--mesh", "a2:16", "--num-redundant-experts", "16"], "16 without eplb_step_interval"),
        (
            *(["deepseek-r1", "--mesh", "a2:16", "--plan", "tp16.ep16", *EVERY, "--num-redundant-experts", "3"],),
            "evenly to 16 ranks of ep; use 16",
        ),
        (["r1-distill-qwen-7b", "--mesh", "a2:1", "--plan", "tp1", *EVERY], "qwen2 as configured has no routed"),
        (["tiny-r1", "--mesh", "cpu:720720"], "too many ranks: at most 4096"),
        (["tiny-r1", "--mesh", "cpu:1", "--dtype", "bf16"], "use fp32, or a2 or a3"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("msds: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_the_shipped_model_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny-r1", "--mesh", "cpu:2", "--plan", "tp2.ep2", "--max-model-len", "128", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "tiny-r1"
    assert report["memory"]["communication"] < 100 << 20
    assert report["memory"]["graphs_and_workspace"] + report["memory"]["communication"] < 1 << 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["tiny-r1", "--plan", "dp2.ep2", "--concurrency", "3"],
            "concurrency is 3, and the 2 replicas of plan dp2.ep2",
        ),
        (["tiny-r9"], "tiny-r1 ships with msds, the presets are deepseek-v3"),
    ],
)
def test_compiling_takes_the_same_models(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["compile", *arguments, "--mesh", "a2:2", "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_balanced_experts_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "deepseek-r1", "--mesh", "a2:32", "--plan", "tp32.ep32", *EVERY, "--json"]
    assert main([*command, "--num-redundant-experts", "32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["eplb_step_interval"], report["num_redundant_experts"]) == (100, 32)
    assert report["memory"]["weights"]["balancing"] > 0
    assert report["memory"]["weights_total"] == sum(report["memory"]["weights"].values())


def test_a_bare_config_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(deepseek_v2_lite())))
    for model in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", str(model), "--mesh", "a2:1", "--json"]) == 0
        mine = json.loads(capsys.readouterr().out)
        assert main(["plan", "deepseek-v2-lite", "--mesh", "a2:1", "--json"]) == 0
        preset = json.loads(capsys.readouterr().out)
        assert mine["memory"] == preset["memory"]
