"""What a training checkpoint does not say is asked for, and what is wrong with it is named."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from msds import load
from msds.checkpoint import CheckpointWarning
from msds.config import read_config
from msds.errors import CheckpointError, ConfigError
from msds.layouts import (
    Orders,
    convert_to_hf,
    convert_to_mindspore,
    is_training_checkpoint,
    open_training,
    parse_orders,
)
from tests.layouts.training import assert_same, mindformers, read, save_ckpt


@pytest.fixture
def trained(tiny, tmp_path):
    """write(variant, edit) -> a folder with the variant as MindFormers stores it, its tensors edited."""

    def write(variant, edit=None):
        folder = tmp_path / "trained"
        folder.mkdir()
        tensors = mindformers(tiny(variant))
        if edit is not None:
            edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "ms"})
        shutil.copy(tiny(variant) / "config.json", folder)
        return folder

    return write


def test_an_unknown_name_is_refused_with_the_layouts_that_are_known(trained, tmp_path):
    def edit(tensors):
        tensors["model.layers.0.attention.wz.weight"] = torch.zeros(2)

    folder = trained("llama_base", edit)
    for call in (load, lambda path: convert_to_hf(path, tmp_path / "hf")):
        with pytest.raises(CheckpointError, match=r"attention\.wz\.weight.*Known are: mindformers"):
            call(folder)
    assert not (tmp_path / "hf").exists()


def test_names_of_another_family_are_refused(trained):
    def edit(tensors):
        tensors["model.layers.0.attention.q_proj.weight"] = torch.zeros(2, 2)

    with pytest.raises(CheckpointError, match=r"llama model has .*attention\.q_proj"):
        load(trained("llama_base", edit))


def test_a_missing_and_a_wrong_tensor(trained, tmp_path):
    def edit(tensors):
        del tensors["model.layers.1.feed_forward.w3.weight"]
        tensors["model.layers.0.attention.wo.weight"] = torch.zeros(64, 32)

    with pytest.raises(CheckpointError) as caught:
        convert_to_hf(trained("llama_base", edit), tmp_path / "hf")
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "model.layers.0.self_attn.o_proj.weight has shape [64, 32], the config asks for [64, 64]" in str(
        caught.value
    )


def test_half_of_a_split_tensor(trained, tiny, tmp_path):
    from tests.layouts.training import without_mtp

    source = without_mtp(tiny("v3_base"), tmp_path / "start")
    tensors = mindformers(source)
    del tensors["model.layers.1.attention.l2q_pe_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks its other part, .*layers\.1\.attention\.l2q_pe_proj\.weight"):
        convert_to_hf(source, tmp_path / "hf")


def test_two_tensors_for_one_parameter(trained, tmp_path):
    def edit(tensors):
        tensors["decoder.final_layernorm.weight"] = torch.ones(64)

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight would be made of"):
        convert_to_hf(trained("llama_base", edit), tmp_path / "hf")


@pytest.mark.parametrize(
    ("variant", "layout", "keys"),
    [("llama_base", "mcore", ["qkv", "gate_up"]), ("v2_lite", "mindformers-fused", ["rope", "gate_up"])],
)
def test_orders_that_names_do_not_say_are_asked_for(tiny, tmp_path, variant, layout, keys):
    convert_to_mindspore(tiny(variant), tmp_path / "ms", layout)
    (tmp_path / "ms" / "msds_layout.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "ms")
    for key in keys:
        assert f"--order {key}=" in str(caught.value)
    orders = Orders(**{key: Orders().with_defaults().said()[key] for key in keys})
    convert_to_hf(tmp_path / "ms", tmp_path / "hf", orders)
    assert_same(read(tiny(variant)), read(tmp_path / "hf"))


def test_an_order_against_what_the_folder_says(tiny, tmp_path):
    convert_to_mindspore(tiny("llama_base"), tmp_path / "ms", "mcore")
    with pytest.raises(CheckpointError, match="qkv is given as contiguous"):
        convert_to_hf(tmp_path / "ms", tmp_path / "hf", Orders(qkv="contiguous"))


@pytest.mark.parametrize("text", ["qkv", "qkv=sideways", "colour=red"])
def test_bad_orders(text):
    with pytest.raises(CheckpointError, match=text.split("=")[0]):
        parse_orders([text])


def test_gate_and_up_exchanged_is_found_by_comparing(tiny, tmp_path):
    convert_to_mindspore(tiny("llama_base"), tmp_path / "ms", "mcore", Orders(gate_up="contiguous"))
    tensors = read(tmp_path / "ms")
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    tensors[name] = torch.cat(tensors[name].chunk(2)[::-1])
    save_file(tensors, tmp_path / "ms" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"first in layer 1: .*gate_proj.*up_proj"):
        convert_to_hf(tmp_path / "ms", tmp_path / "hf", compare=tiny("llama_base"))
    assert not (tmp_path / "hf").exists()


def test_no_config(tiny, tmp_path):
    save_ckpt(mindformers(tiny("llama_base")), tmp_path / "only.ckpt")
    with pytest.raises(CheckpointError, match=r"config\.json.*--config"):
        convert_to_hf(tmp_path / "only.ckpt", tmp_path / "hf")
    with pytest.raises(ConfigError):
        load(tmp_path)


def test_the_config_of_another_model(tiny, tmp_path):
    save_ckpt(mindformers(tiny("llama_base")), tmp_path / "only.ckpt")
    config = json.loads((tiny("llama_base") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"no parameter for.*model\.layers\.1"):
        convert_to_hf(tmp_path / "only.ckpt", tmp_path / "hf")
    with pytest.warns(CheckpointWarning, match=r"model\.layers\.1"):
        load(tmp_path)


@pytest.mark.parametrize("variant", ["v3_base", "v3_fp8", "qwen2_tied", "llama_bias"])
def test_hugging_face_folders_are_not_taken_for_training_ones(tiny, variant):
    assert not is_training_checkpoint(tiny(variant))


# tied x stored, as Hugging Face folders: a head is never assumed
@pytest.mark.parametrize(
    ("variant", "edit", "outcome"),
    [
        ("qwen2_tied", None, "ok"),
        ("qwen2_tied_stored_head", None, "ok"),
        ("qwen2_tied_stored_head", "differs", "warns"),
        ("qwen2_base", None, "ok"),
        ("qwen2_base", "absent", "fails"),
    ],
)
def test_tied_or_missing_head(trained, variant, edit, outcome):
    def change(tensors):
        if edit == "differs":
            tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
        elif edit == "absent":
            del tensors["lm_head.weight"]

    folder = trained(variant, change)
    if outcome == "fails":
        with pytest.raises(CheckpointError, match="tie_word_embeddings false"):
            load(folder)
    elif outcome == "warns":
        with pytest.warns(CheckpointWarning, match=r"lm_head\.weight differs"):
            load(folder)
    else:
        load(folder)


def test_square_experts_need_their_order(tiny, tmp_path):
    config = json.loads((tiny("v3_base") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 64}))
    name = "model.layers.1.feed_forward.routed_experts.ffn.w1.weight"
    stack = torch.arange(16 * 64 * 64, dtype=torch.float32).reshape(16, 64, 64)
    save_file({name: stack}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"ffn\.w1\.weight can be read in two ways.*--order experts=out_in"):
        open_training(tmp_path, read_config(tmp_path))
    view = open_training(tmp_path, read_config(tmp_path), Orders(experts="in_out"))
    assert np.array_equal(view.read("model.layers.1.mlp.experts.3.gate_proj.weight"), stack[3].T.numpy())
