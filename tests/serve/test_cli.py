"""The msds command, run in this process on tiny checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from msds_serve.cli import main

Tiny = Callable[..., Path]
SMALL = ["--max-model-len", "64", "--memory-fraction", "0.5"]


def test_generate_prints_one_json_object(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.reference.checkpoints import transformers_greedy

    folder = tiny("llama_base")
    ids = [5, 77, 300, 12]
    arguments = ["--token-ids", ",".join(map(str, ids)), "--max-tokens", "6", "--temperature", "0", "--json"]
    assert main(["generate", str(folder), *arguments, *SMALL, "--shard-cache", str(tmp_path / "caches")]) == 0
    assert len(list((tmp_path / "caches").iterdir())) == 1
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output["token_ids"] == list(transformers_greedy(folder, ids, 6))
    assert output["finish_reason"] == "length"
    assert output["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert output["text"] == ""  # the folder has no tokenizer


def test_generate_streams_text(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny("llama_base", tokenizer=True)
    command = ["generate", str(folder), "--prompt", "hello", "--max-tokens", "5", "--temperature", "0", *SMALL]
    assert main(command) == 0
    streamed = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert streamed == output["text"] + "\n"


def test_seeds_decide_sampled_tokens(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny("llama_base")

    def sampled(seed: int) -> list[int]:
        arguments = ["--token-ids", "9,8,7", "--max-tokens", "8", "--temperature", "1", "--seed", str(seed), "--json"]
        assert main(["generate", str(folder), *arguments, *SMALL]) == 0
        ids: list[int] = json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]
        return ids

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--token-ids", "1,2", "--temperature", "-1"], ["temperature", "-1"]),
        (["--token-ids", "1,999999"], ["999999", "position 1"]),
        (["--token-ids", "1", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["--token-ids", "1", "--max-tokens", "100000"], ["100000", "max_model_len"]),
        (["--token-ids", "1", "--dtype", "bfloat16"], ["bfloat16", "float32"]),
        (["--token-ids", "1", "--num-speculative-tokens", "1"], ["num_speculative_tokens is 1", "no MTP layer"]),
        (["--token-ids", "1", "--num-speculative-tokens", "99"], ["num_speculative_tokens is 99", "from 0"]),
        (["--token-ids", "1", "--memory-fraction", "2"], ["memory_fraction", "2"]),
        (["--prompt", "text"], ["tokenizer"]),
        (["--chat", "text"], ["tokenizer"]),
    ],
)
def test_bad_input_is_one_clear_line(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], arguments: list[str], names: list[str]
) -> None:
    assert main(["generate", str(tiny("llama_base")), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("msds: error: ")
    assert captured.err.count("\n") == 1
    for name in names:
        assert name in captured.err


def test_missing_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", str(tmp_path / "absent"), "--prompt", "x"]) == 2
    assert "absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["generate", "", "--prompt", "x"], ["serve", ""], ["verify", ""], ["inspect", ""], ["convert", "x.gguf", ""]],
    ids=lambda command: command[0],
)
def test_an_empty_path_is_not_the_current_folder(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert "empty" in capsys.readouterr().err


def test_serve_refuses_before_loading(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny("llama_base")), "--port", "99999"]) == 2
    assert "port is 99999" in capsys.readouterr().err


def test_inspect_agrees_with_the_config(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny("v3_base")), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(tiny("v3_base"))]) == 0
    assert "deepseek_v3" in capsys.readouterr().out
    assert report["config"]["model_type"] == "deepseek_v3"


def test_verify_passes_and_reports(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tiny("v3_base")), "--reference", "transformers", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    names = [check["name"] for check in report["checks"]]
    assert len(names) == 7
    for check in report["checks"]:
        assert check["status"] == "pass", check
        assert check["difference"] < 1e-5


def test_verify_names_the_first_differing_layer(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from msds.models import deepseek

    derive = deepseek.derive

    def stale(params, *, config):  # type: ignore[no-untyped-def]
        derived = derive(params, config=config)
        absorbed = derived["layers"][1]["self_attn"]["absorbed"]
        absorbed["w_uk"] = absorbed["w_uk"] + np.float32(0.1)
        return derived

    monkeypatch.setattr(deepseek, "derive", stale)
    assert main(["verify", str(tiny("v3_base")), "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["chunked prefill = unchunked"]["status"] == "pass"
    assert checks["absorbed = naive attention"]["status"] == "fail"
    assert checks["decode = forward"]["first_layer"] == 1
    assert "instead of" in checks["decode = forward"]["worst"]
