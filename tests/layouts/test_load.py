"""A training checkpoint loads where it lies: its logits are those of the model that was trained."""

import shutil

import numpy as np
import pytest
import torch

from msds import load
from msds.config import read_config
from msds.inspect import inspect_model
from msds.layouts import convert_to_hf, open_checkpoint
from tests.layouts.training import assert_same, mindformers, read, save_ckpt, without_mtp, write_ranks

IDS = [5, 77, 300, 12, 9, 411, 3, 250]


@pytest.fixture
def original(tiny, tmp_path):
    def folder(variant):
        return without_mtp(tiny(variant), tmp_path / "original") if variant == "v3_base" else tiny(variant)

    return folder


@pytest.mark.parametrize(
    ("variant", "form"), [("v3_base", "safetensors"), ("qwen2_base", "ckpt"), ("llama_base", "safetensors")]
)
def test_two_ranks_give_the_logits_of_the_training_forward(original, tmp_path, variant, form):
    folder, trained = original(variant), tmp_path / "trained"
    write_ranks(mindformers(folder), trained, form=form)
    shutil.copy(folder / "config.json", trained)
    logits, expected = load(trained).logits(IDS), load(folder).logits(IDS)
    assert np.abs(logits - expected).max() <= 1e-5
    assert np.abs(expected).max() > 0.1
    convert_to_hf(trained, tmp_path / "hf")
    assert_same(read(folder), read(tmp_path / "hf"))


def test_what_training_keeps_beside_weights_is_listed(tiny, tmp_path):
    tensors = mindformers(tiny("llama_base"))
    moments = {f"{kind}.{name}": torch.zeros_like(tensors[name]) for name in tensors for kind in ("adam_m", "adam_v")}
    save_ckpt(tensors | moments, tmp_path / "llama-3_100.ckpt", append_dict={"epoch_num": 3, "step_num": 100})
    shutil.copy(tiny("llama_base") / "config.json", tmp_path)
    checkpoint = open_checkpoint(tmp_path, read_config(tmp_path))
    assert set(checkpoint.skipped) == {*moments, "epoch_num", "step_num"}
    assert checkpoint.skipped["adam_m.lm_head.weight"] == "a moment of the optimiser"
    assert np.array_equal(load(tmp_path).logits(IDS), load(tiny("llama_base")).logits(IDS))


def test_bfloat16_parts_load_as_the_hugging_face_folder_does(tiny, tmp_path):
    from msds.layouts import convert_to_mindspore

    folder = tiny("v3_base", dtype="bfloat16")
    convert_to_mindspore(folder, tmp_path / "ms", "mcore")
    config = read_config(folder)
    trained, plain = open_checkpoint(tmp_path / "ms", config), open_checkpoint(folder, config)
    for name in trained.names():
        np.testing.assert_array_equal(trained.read(name), plain.read(name), err_msg=name)
        part = (slice(0, 3),)
        np.testing.assert_array_equal(trained.read(name, part, raw=True), plain.read(name, part, raw=True))
    assert np.array_equal(load(tmp_path / "ms").logits(IDS), load(folder).logits(IDS))


def test_inspect_looks_at_a_training_folder(tiny, tmp_path):
    write_ranks(mindformers(tiny("llama_base")), tmp_path)
    shutil.copy(tiny("llama_base") / "config.json", tmp_path)
    stored, expected = (inspect_model(path).to_json()["stored"] for path in (tmp_path, tiny("llama_base")))
    assert stored == expected
