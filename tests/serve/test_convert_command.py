"""msds convert between a Hugging Face folder and a MindSpore training checkpoint, and serving the latter as it is."""

import json
import shutil

import pytest
import torch

from msds_serve.cli import main
from tests.layouts.training import assert_same, mindformers, read, save_ckpt, write_ranks


def fails(capsys, *command):
    assert main(["convert", *map(str, command)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_there_and_back(tiny, tmp_path, capsys):
    folder = tiny("qwen2_base", tokenizer=True)
    there = ["convert", str(folder), str(tmp_path / "ms"), "--to", "mindspore", "--layout", "mcore"]
    assert main([*there, "--order", "qkv=contiguous", "--compare", str(folder)]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "ms"), str(tmp_path / "hf")]) == 0
    assert_same(read(folder), read(tmp_path / "hf"))


def test_a_checkpoint_of_ranks_with_the_config_elsewhere(tiny, tmp_path, capsys):
    folder = tiny("llama_base", tokenizer=True)
    write_ranks(mindformers(folder), tmp_path / "run")
    (tmp_path / "run" / "strategy.ckpt").rename(tmp_path / "strategy.ckpt")
    command = ["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--config", str(folder), "--suffix", "1_10"]
    assert main(command) == 2
    assert "--strategy" in capsys.readouterr().err
    assert main([*command, "--strategy", str(tmp_path / "strategy.ckpt"), "--compare", str(folder)]) == 0
    assert (tmp_path / "hf" / "tokenizer.json").exists()


def test_what_is_left_out_is_said(tiny, tmp_path, capsys):
    tensors = mindformers(tiny("llama_base"))
    moments = {f"adam_m.{name}": torch.zeros(1) for name in list(tensors)[:5]}
    save_ckpt(tensors | moments, tmp_path / "run.ckpt", append_dict={"global_step": 7})
    config = str(tiny("llama_base") / "config.json")
    assert main(["convert", str(tmp_path / "run.ckpt"), str(tmp_path / "hf"), "--config", config]) == 0
    out = capsys.readouterr().out
    assert "left out, a moment of the optimiser: adam_m." in out
    assert "and 2 more" in out
    assert "left out, the state of a run: global_step" in out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["a Hugging Face folder", "--to mindspore"]),
        (["--to", "mindspore", "--dtype", "float16"], ["--dtype", "a GGUF file"]),
        (["--to", "mindspore", "--strategy", "x"], ["--strategy", "training checkpoint"]),
        (["--to", "mindspore", "--layout", "own"], ["'own'", "mindformers"]),
        (["--to", "mindspore", "--order", "qkv=odd"], ["'odd'", "grouped, contiguous"]),
    ],
)
def test_options_that_do_not_fit(tiny, tmp_path, capsys, arguments, names):
    error = fails(capsys, tiny("llama_base"), tmp_path / "out", *arguments)
    for name in names:
        assert name in error
    assert not (tmp_path / "out").exists()


def test_a_training_checkpoint_is_not_converted_to_mindspore(tiny, tmp_path, capsys):
    write_ranks(mindformers(tiny("llama_base")), tmp_path / "run")
    assert "huggingface first" in fails(capsys, tmp_path / "run", tmp_path / "out", "--to", "mindspore")


def test_a_target_that_is_in_use(tiny, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    error = fails(capsys, tiny("llama_base"), tmp_path / "out", "--to", "mindspore")
    assert "not an empty folder" in error


def test_generate_from_a_training_checkpoint(tiny, tmp_path, capsys):
    folder = tiny("llama_base")
    write_ranks(mindformers(folder), tmp_path / "run", form="ckpt")
    shutil.copy(folder / "config.json", tmp_path / "run")
    options = ["--token-ids", "5,77,300", "--max-tokens", "6", "--temperature", "0", "--json"]
    texts = []
    for model in (tmp_path / "run", folder):
        assert main(["generate", str(model), *options, "--max-model-len", "64", "--memory-fraction", "0.5"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"])
    assert texts[0] == texts[1]
