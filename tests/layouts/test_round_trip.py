"""Hugging Face to a training layout and back, bit for bit; and the layout itself against one written by other code."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from msds.errors import CheckpointError
from msds.layouts import Orders, convert_to_hf, convert_to_mindspore
from msds.pretrained import DEFAULT_MODEL
from tests.layouts.training import assert_same, mindformers, read, without_mtp

VARIANTS = ["v3_two_mtp", "v2_lite", "qwen2_tied", "qwen2_tied_stored_head", "llama_bias"]
HALVES = {"qkv": "contiguous", "gate_up": "contiguous", "rope": "halves", "experts": "in_out"}


def shared_norm(folder, target):
    """A copy whose MTP layers have the main model's final norm, as MindFormers 1.x trains them."""
    shutil.copytree(folder, target)
    tensors = read(folder)
    for name in tensors:
        if name.endswith("shared_head.norm.weight"):
            tensors[name] = tensors["model.norm.weight"].clone()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("variant", "layout", "orders"),
    [
        pytest.param(*case, id="-".join([*case[:2], "others" if case[2] else "defaults"]))
        for case in itertools.product(VARIANTS, ["mindformers", "mindformers-fused", "mcore"], [{}, HALVES])
        if case[:2] != ("v2_lite", "mindformers")
    ],
)
def test_there_and_back(tiny, tmp_path, variant, layout, orders):
    folder = tiny(variant, dtype="bfloat16", tokenizer=True)
    if variant.startswith("v3") and layout != "mcore":
        folder = shared_norm(folder, tmp_path / "start")
    convert_to_mindspore(folder, tmp_path / "ms", layout, Orders(**orders), compare=folder)
    convert_to_hf(tmp_path / "ms", tmp_path / "hf")
    assert_same(read(folder), read(tmp_path / "hf"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (folder / name).read_bytes()
    names = json.loads((tmp_path / "ms" / "param_name_map.json").read_text())
    assert names.keys() == read(tmp_path / "ms").keys()


@pytest.mark.parametrize("stored", [(), ("embed_tokens.weight",), ("embed_tokens.weight", "shared_head.head.weight")])
def test_copies_in_mtp_layers_come_back_only_where_they_were(tiny, tmp_path, stored):
    folder = tiny("v3_two_mtp", dtype="bfloat16")
    start = tmp_path / "start"
    shutil.copytree(folder, start)
    tensors = read(folder)
    first = 4  # the first MTP layer stands behind the main ones
    assert f"model.layers.{first}.eh_proj.weight" in tensors
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    for name in (f"model.layers.{first}.{copy}" for copy in copies if copy not in stored):
        del tensors[name]
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    convert_to_mindspore(start, tmp_path / "ms", "mcore", compare=start)
    convert_to_hf(tmp_path / "ms", tmp_path / "hf", compare=start)
    assert_same(tensors, read(tmp_path / "hf"))


def test_the_shipped_model(tmp_path):
    convert_to_mindspore(DEFAULT_MODEL, tmp_path / "ms", "mcore")
    convert_to_hf(tmp_path / "ms", tmp_path / "hf", compare=DEFAULT_MODEL)
    assert_same(read(DEFAULT_MODEL), read(tmp_path / "hf"))
    assert any(name.endswith("shared_head.head.weight") for name in read(DEFAULT_MODEL))


def test_absent_tensors_are_called_absent(tiny, tmp_path):
    """Against a folder that lacks copies: not a difference that an order could explain."""
    folder = tiny("v3_base", dtype="bfloat16")
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    tensors = read(folder)
    copy = next(name for name in tensors if name.endswith("shared_head.head.weight"))
    del tensors[copy]
    save_file(tensors, bare / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"^tensor {copy} would be there, but .*bare lacks"):
        convert_to_mindspore(folder, tmp_path / "ms", "mcore", compare=bare)
    with pytest.raises(CheckpointError, match=f"^tensor {copy} of .* would be absent$"):
        convert_to_mindspore(bare, tmp_path / "ms", "mcore", compare=folder)


@pytest.mark.parametrize("variant", ["v3_base", "llama_base", "qwen2_base"])
def test_mindformers_layout_is_that_of_other_code(tiny, tmp_path, variant):
    folder = without_mtp(tiny(variant), tmp_path / "start") if variant == "v3_base" else tiny(variant)
    convert_to_mindspore(folder, tmp_path / "ms")
    assert_same(mindformers(folder), read(tmp_path / "ms"))


def test_fused_orders_by_row(tiny, tmp_path):
    """Llama with 4 heads of 16 over 2 key/value heads: the defaults, spelled out."""
    tensors = read(tiny("llama_base"))
    q, k, v, gate, up = (
        tensors[f"model.layers.1.{name}_proj.weight"]
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    )
    convert_to_mindspore(tiny("llama_base"), tmp_path / "ms", "mcore")
    out = read(tmp_path / "ms")
    grouped = torch.cat([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]])
    assert torch.equal(out["decoder.layers.1.self_attention.linear_qkv.weight"], grouped)
    mixed = out["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(mixed[6], gate[3])
    assert torch.equal(mixed[7], up[3])
    convert_to_mindspore(tiny("llama_base"), tmp_path / "c", "mcore", Orders(qkv="contiguous", gate_up="contiguous"))
    out = read(tmp_path / "c")
    assert torch.equal(out["decoder.layers.1.self_attention.linear_qkv.weight"], torch.cat([q, k, v]))
    assert torch.equal(out["decoder.layers.1.mlp.linear_fc1.weight"], torch.cat([gate, up]))


def test_stacked_experts_of_mcore(tiny, tmp_path):
    """experts.weight1 is [E * hidden, 2 * width], gate columns before up; weight2 [E * width, hidden]."""
    tensors = read(tiny("v3_base"))
    convert_to_mindspore(tiny("v3_base"), tmp_path / "ms", "mcore")
    out = read(tmp_path / "ms")
    first, second = (out[f"decoder.layers.2.mlp.experts.weight{place}"] for place in (1, 2))
    assert first.shape == (16 * 64, 2 * 32)
    prefix = "model.layers.2.mlp.experts.5"
    assert torch.equal(first[5 * 64 : 6 * 64, :32], tensors[f"{prefix}.gate_proj.weight"].T)
    assert torch.equal(first[5 * 64 : 6 * 64, 32:], tensors[f"{prefix}.up_proj.weight"].T)
    assert torch.equal(second[5 * 32 : 6 * 32], tensors[f"{prefix}.down_proj.weight"].T)
    assert "mtp.layers.0.transformer_layer.mlp.experts.weight1" in out


@pytest.mark.parametrize("flat", [False, True])
def test_transposed_experts_are_known_by_their_shape(tiny, tmp_path, flat):
    folder = without_mtp(tiny("v3_base"), tmp_path / "start")
    convert_to_mindspore(folder, tmp_path / "ms", orders=Orders(experts="in_out"))
    tensors = read(tmp_path / "ms")
    stacks = [name for name in tensors if ".ffn.w" in name]
    assert stacks
    if flat:
        tensors |= {name: tensors[name].flatten(0, 1) for name in stacks}
    save_file(tensors, tmp_path / "ms" / "model.safetensors")
    (tmp_path / "ms" / "msds_layout.json").unlink()  # gone, and nothing has to be said
    convert_to_hf(tmp_path / "ms", tmp_path / "hf", compare=folder)


def test_mtp_norm_that_the_layout_cannot_hold(tiny, tmp_path):
    with pytest.raises(CheckpointError, match=r"shared_head\.norm\.weight.*--layout mcore"):
        convert_to_mindspore(tiny("v3_base"), tmp_path / "ms")
    assert not (tmp_path / "ms").exists()


def test_query_without_lora_has_no_place_in_the_split_layout(tiny, tmp_path):
    with pytest.raises(CheckpointError, match=r"no place for tensor .*q_proj\.weight; mindformers-fused and mcore"):
        convert_to_mindspore(tiny("v2_lite"), tmp_path / "ms")


def test_float8_has_no_place(tiny, tmp_path):
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn.*bfloat16 weights"):
        convert_to_mindspore(tiny("v3_fp8"), tmp_path / "ms", "mcore")
