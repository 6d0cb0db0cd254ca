"""Inspection of checkpoint folders: what they contain, and what is odd about them."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from msds.config import config_json, count_parameters, read_config
from msds.errors import ConfigError
from msds.inspect import inspect_model
from msds.presets import deepseek_v2_lite, deepseek_v3
from tests.config.samples import LLAMA, QWEN2, V3, edited, write
from tests.reference.variants import VARIANTS

Tiny = Callable[..., Path]


@pytest.fixture
def base(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a complete DeepSeek-V3 checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny("v3_base", tokenizer=True), tmp_path / "v3_base"))


def change_config(folder: Path, **changes: object) -> None:
    write(folder, edited(json.loads((folder / "config.json").read_text()), **changes))


def rewrite_tensors(folder: Path, keep: Callable[[str], bool]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if keep(name)}, folder / "model.safetensors")


def test_a_complete_checkpoint_is_described(base: Path) -> None:
    found = inspect_model(base)
    assert found.config == read_config(base)
    assert found.parameters == count_parameters(found.config)
    (stored,) = found.stored
    assert (stored.dtype, stored.nbytes) == ("float32", 4 * stored.elements)
    copies = 2 * found.parameters.embedding  # the MTP layer's embedding and head
    assert stored.elements == found.parameters.total + found.parameters.mtp + copies
    assert (found.mtp.declared, found.mtp.stored) == (1, (3,))
    assert (found.cache.elements, found.cache.expanded_elements, found.cache.layers) == (24, 160, 3)
    assert found.generation.eos_token_ids == (1,)
    assert found.tokenizer is not None
    assert (found.tokenizer.kind, found.tokenizer.has_chat_template) == ("BPE", True)
    assert (found.tokenizer.bos_token_id, found.tokenizer.eos_token_id) == (0, 1)
    assert found.odd == (f"ids {found.tokenizer.vocab_size} to 511 of the model have no text in the tokenizer",)


def test_text_and_json_carry_the_findings(base: Path) -> None:
    found = inspect_model(base)
    text = found.render()
    for part in (
        "deepseek_v3, context 163,840 tokens, yarn x 40 from 4,096",
        "3 total, 1 dense, 2 moe",
        "16 routed, 3 active, 1 shared, 4 groups",
        "1 declared; layers in the files: 3",
        "96 bytes per token and layer in float32",
        "BPE",
        "odd:\n  - ids",
    ):
        assert part in text
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["layers"] == {"total": 3, "dense": 1, "moe": 2}
    assert data["experts"]["routed"] == 16
    assert data["parameters"]["total"] == found.parameters.total
    assert data["stored"][0]["dtype"] == "float32"
    assert data["cache"]["bytes_per_token_and_layer"] == 96
    assert data["odd"] == list(found.odd)


@pytest.mark.parametrize("name", ["v2_lite", "v3_no_q_lora", "v3_two_mtp", "qwen2_base", "qwen2_tied", "llama_bias"])
def test_nothing_is_odd_about_plain_checkpoints_without_tokenizer(tiny: Tiny, name: str) -> None:
    found = inspect_model(tiny(name))
    assert found.odd == ()
    assert found.tokenizer is None


def test_fp8_blocks_that_do_not_divide_are_named_and_counted_as_parameters_once(tiny: Tiny) -> None:
    found = inspect_model(tiny("v3_fp8"))
    assert {item.dtype for item in found.stored} == {"float8_e4m3fn", "bfloat16", "float32"}
    (odd,) = found.odd
    assert re.search(r"kv_a_proj_with_mqa\.weight \[72, 64\].*16 x 16 block", odd)


def test_a_folder_with_only_a_config_is_described(tmp_path: Path) -> None:
    found = inspect_model(write(tmp_path, config_json(deepseek_v3())))
    assert found.stored == ()
    assert found.cache.elements * found.cache.element_bytes == 1152
    assert found.cache.expanded_elements == 128 * (192 + 128)
    assert found.odd == (f"{tmp_path} has no safetensors files",)
    text = found.render()
    assert "671.03B total, 36.63B active per token" in text
    assert "11.61B more in MTP layers" in text
    assert inspect_model(tmp_path / "config.json").parameters == found.parameters
    assert "15.71B total" in inspect_model(write(tmp_path, config_json(deepseek_v2_lite()))).render()


def test_dense_families_have_no_experts_and_a_cache_of_keys_and_values(tmp_path: Path) -> None:
    found = inspect_model(write(tmp_path, LLAMA))
    assert (found.cache.elements, found.cache.expanded_elements) == (2 * 2 * 16, 2 * 2 * 16)
    assert found.to_json()["experts"] is None
    assert "4 heads of 16, 2 of keys and values" in found.render()
    assert "expert" not in found.render()


def test_an_unsupported_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hidden_act"):
        inspect_model(write(tmp_path, edited(V3, hidden_act="gelu")))


# --- what is odd -------------------------------------------------------------------------------------------


def odd_about(folder: Path) -> str:
    return "\n".join(inspect_model(folder).odd)


def test_an_absent_mtp_layer_is_named(base: Path) -> None:
    rewrite_tensors(base, lambda name: not name.startswith("model.layers.3."))
    odd = odd_about(base)
    assert "no tensors of MTP layer 3, which num_nextn_predict_layers = 1 declares" in odd
    assert "parameters" not in odd


def test_an_mtp_layer_that_the_config_does_not_declare_is_named(base: Path) -> None:
    change_config(base, num_nextn_predict_layers=0)
    assert "tensors of layer 3, beyond the config's 3 layers and 0 MTP layers" in odd_about(base)


def test_an_absent_layer_is_named(base: Path) -> None:
    rewrite_tensors(base, lambda name: not name.startswith("model.layers.1."))
    assert "no tensors of layer 1, which num_hidden_layers = 3 asks for" in odd_about(base)


def test_an_absent_tensor_shows_in_the_number_of_parameters(base: Path) -> None:
    rewrite_tensors(base, lambda name: name != "model.layers.2.mlp.experts.5.up_proj.weight")
    total = count_parameters(read_config(base))
    expected = total.total + total.mtp
    assert f"the files hold {expected - 64 * 32:,} parameters, the config describes {expected:,}" in odd_about(base)


def test_heads_that_contradict_the_tie_are_named(tiny: Tiny, base: Path) -> None:
    (odd,) = inspect_model(tiny("qwen2_tied_stored_head")).odd
    assert "lm_head.weight is stored although tie_word_embeddings is true" in odd
    rewrite_tensors(base, lambda name: name != "lm_head.weight")
    assert "lm_head.weight is not stored although tie_word_embeddings is false" in odd_about(base)


def test_a_vocabulary_of_another_size_is_named(base: Path) -> None:
    change_config(base, vocab_size=256)
    odd = odd_about(base)
    assert "model.embed_tokens.weight has shape [512, 64], the config asks for [256, 64]" in odd
    assert "beyond the model's vocab_size of 256" in odd


def test_ids_that_configs_and_tokenizer_disagree_on_are_named(base: Path) -> None:
    change_config(base, bos_token_id=5, eos_token_id=6)
    (base / "generation_config.json").unlink()
    odd = odd_about(base)
    assert "the bos id is 5 in config.json, 0 in the tokenizer" in odd
    assert "the tokenizer's eos id 1 is not among those of the configs (6)" in odd


def test_a_config_without_an_end_and_with_settings_not_applied_is_named(tmp_path: Path) -> None:
    write(tmp_path, edited(QWEN2, eos_token_id=None, strange_field=1))
    write(tmp_path, {"no_repeat_ngram_size": 3, "num_beams": False}, "generation_config.json")
    odd = odd_about(tmp_path)
    assert "texts end at their token limit" in odd
    assert "generation_config.json has no_repeat_ngram_size" in odd
    assert "num_beams" not in odd
    assert "strange_field: unknown field" in odd


def test_dynamic_scaling_is_explained_where_it_cuts_the_context(tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 1024}
    write(tmp_path, edited(LLAMA, rope_scaling=scaling))
    assert "texts beyond 1024 tokens are refused" in odd_about(tmp_path)


def test_stored_types_that_the_config_does_not_name_are_named(base: Path) -> None:
    change_config(base, torch_dtype="bfloat16")
    assert "torch_dtype is bfloat16, but the files hold float32" in odd_about(base)
    block = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    change_config(base, torch_dtype="float32", quantization_config=block)
    assert "FP8 blocks of [16, 16], but no tensor is stored as FP8" in odd_about(base)


def test_fp8_without_its_config_or_scales_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("v3_fp8"), tmp_path / "fp8"))
    quantisation = json.loads((folder / "config.json").read_text())["quantization_config"]
    change_config(folder, quantization_config=None)
    assert "stored as FP8, but config.json has no quantization_config" in odd_about(folder)
    change_config(folder, quantization_config={**quantisation, "weight_block_size": [8, 16]})
    assert "with scales that are not one per 8 x 16 block" in odd_about(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n", "git-lfs pointer"),
        (b"\x00" * 4, "too few"),
        (b"\xff" * 64, "damaged"),
    ],
)
def test_damaged_weight_files_are_named_and_the_rest_is_described(base: Path, content: bytes, message: str) -> None:
    (base / "model.safetensors").write_bytes(content)
    found = inspect_model(base)
    assert any(re.search(rf"model\.safetensors.*{message}", odd) for odd in found.odd)
    assert found.stored == ()
    assert found.tokenizer is not None


def test_a_damaged_tokenizer_or_template_is_named(base: Path) -> None:
    write(base, "{% if %}", "chat_template.jinja")
    found = inspect_model(base)
    assert found.tokenizer is not None
    assert not found.tokenizer.has_chat_template
    assert "the chat template cannot be used" in "\n".join(found.odd)
    write(base, "{", "tokenizer.json")
    found = inspect_model(base)
    assert found.tokenizer is None
    assert "the tokenizer cannot be used" in "\n".join(found.odd)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_a_count_and_a_text(name: str, tmp_path: Path) -> None:
    found = inspect_model(write(tmp_path, VARIANTS[name].config))
    assert 0 < found.parameters.active <= found.parameters.total
    assert found.render()
    json.dumps(found.to_json(), allow_nan=False)


def test_inspection_needs_no_accelerator_framework(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    code = (
        "import sys; from msds.inspect import inspect_model; "
        f"print(inspect_model({str(tmp_path)!r}).render()); "
        "sys.exit(any(name in sys.modules for name in ('mindspore', 'torch', 'transformers')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "llama" in run.stdout
