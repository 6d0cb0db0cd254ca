"""What nodes must have in common: a difference of anything that shapes graphs or numbers is a difference of a fact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msds.checkpoint import write_manifest
from msds.launch.facts import differences, model_facts
from msds_serve.cli import main


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("v3_base", tokenizer=True)


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "elsewhere"))


def compared(folder: Path, other: Path, here: dict[str, Any], there: dict[str, Any]) -> str | None:
    return differences(model_facts(folder, "tp2", here), model_facts(other, "tp2", there), 0, 3)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({}, {}),
        ({"max_num_seqs": 8, "max_model_len": 4096}, {}),
        ({"threads": 1, "memory_fraction": 0.5, "max_waiting": 3}, {"threads": 2}),
        ({"check_sha256": False, "shard_cache": "there"}, {}),
        ({"dtype": "float32"}, {"dtype": "auto"}),
    ],
)
def test_what_may_differ(folder: Path, other: Path, here: dict[str, Any], there: dict[str, Any]) -> None:
    (other / "README.md").write_text("another name, another place")
    assert compared(folder, other, here, there) is None


@pytest.mark.parametrize(
    ("option", "value", "usual"),
    [
        ("max_model_len", 64, 4096),
        ("max_num_seqs", 4, 8),
        ("block_size", 8, 16),
        ("prefill_chunk", 64, 512),
        ("num_speculative_tokens", 1, 0),
        ("deterministic", True, False),
        ("eplb_step_interval", 5, 0),
    ],
)
def test_options_that_must_not_differ(folder: Path, option: str, value: Any, usual: Any) -> None:
    said = compared(folder, folder, {}, {option: value})
    name = option.replace("_", "-")
    assert said is not None
    assert said.startswith(
        f"nodes 0 and 3 differ: --{name} is {usual} on node 0 and {value} on node 3: give every node"
    )


def test_plans_must_not_differ(folder: Path) -> None:
    said = differences(model_facts(folder, "tp2", {}), model_facts(folder, "dp2", {}), 0, 1)
    assert said is not None
    assert "--plan is tp2 on node 0 and dp2 on node 1" in said


def test_configs_must_not_differ(folder: Path, other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.125}))
    said = compared(folder, other, {}, {})
    assert said is not None
    assert f"rms_norm_eps of config.json is {config['rms_norm_eps']} on node 0 and 0.125 on node 3" in said


def test_weights_that_are_zero_from_the_middle_on_are_noticed(folder: Path, other: Path) -> None:
    largest = max(other.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    said = compared(folder, other, {}, {})
    assert said is not None
    assert f"{largest.name} is {len(data):,} bytes with samples" in said


def test_tokenizers_and_manifests_must_not_differ(folder: Path, other: Path) -> None:
    write_manifest(other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    said = compared(folder, other, {}, {})
    assert said is not None
    assert "tokenizer.json is " in said
    assert "SHA256SUMS is absent on node 0 and" in said


def test_only_some_differences_are_listed() -> None:
    names = [f"fact {number}" for number in range(10)]
    said = differences(dict.fromkeys(names, "a"), dict.fromkeys(names, "b"), 0, 1)
    assert said is not None
    assert "fact 2 is a on node 0 and b on node 1; and 7 more" in said
    assert "fact 3" not in said


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        ("--seed 0 --batch-size 64 --lengths 128 --learning-rate 0.001 --warmup-steps 1 --save-every 200", None),
        ("--accumulation 1 --decay-steps 0 --temperature 1 --mtp-weight 0.30", None),
        ("--seed 1", "--seed is 0 on node 0 and 1 on node 1"),
        ("--warmup-steps 2", "--warmup-steps is 1 on node 0 and 2 on node 1"),
        ("--lengths 64,128", "--lengths is (128,) on node 0 and (64, 128) on node 1"),
        ("--temperature 2", "--temperature is 1.0 on node 0 and 2.0 on node 1"),
    ],
)
def test_training_settings_given_or_default(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, difference: str | None
) -> None:
    found: list[dict[str, str]] = []
    monkeypatch.setattr("msds.launch.launch", lambda *_, facts, **__: found.append(facts))
    monkeypatch.setenv("MSDS_CLUSTER_SECRET", "s" * 32)
    (tmp_path / "data.jsonl").touch()
    cluster = ["--data-parallel", "2", "--nodes", "2", "--node-rank", "0", "--master", "localhost:1000"]
    command = ["train", str(folder), str(tmp_path / "data.jsonl"), "--run", str(tmp_path / "run"), "--steps", "10"]
    for options in ("", given):
        assert main([*command, "--teacher", str(folder), *cluster, *options.split()]) == 0
    said = differences(*found, 0, 1)
    assert said is None if difference is None else said is not None and difference in said
