"""GGUF import: the folder equals what transformers makes of the same file, and what cannot be imported is refused."""

import json
import sys
import zipfile

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from msds.checkpoint import Checkpoint, convert_gguf
from msds.checkpoint.gguf import unpermute_rows
from msds.checkpoint.gguf_metadata import shortest
from msds.errors import CheckpointError
from tests.checkpoint.tiny_gguf import HEADS, SPECIAL, TEMPLATE, TOKENS, TYPES, tensors, write_gguf


def read_json(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def state(folder):
    checkpoint = Checkpoint.open(folder)
    assert not checkpoint.faults
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The GGUF of a llama model and its conversion."""
    folder = tmp_path_factory.mktemp("llama")
    source = write_gguf(folder / "tiny.gguf")
    return source, convert_gguf(source, folder / "converted")


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_folder_equals_what_transformers_imports(tmp_path, arch):
    source = write_gguf(tmp_path / "tiny.gguf", arch, weights=tensors(arch, tied=arch == "llama"))
    folder = convert_gguf(source, tmp_path / "converted")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    # its reader without from_pretrained, which wants accelerate
    imported = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)
    got = state(folder)
    assert got.keys() == imported["tensors"].keys()
    for name, tensor in imported["tensors"].items():
        np.testing.assert_array_equal(got[name], tensor.numpy(), err_msg=name)
    config = read_json(folder, "config.json")
    shared = config.keys() & imported["config"].keys()
    assert len(shared) > 10
    assert {key: config[key] for key in shared} == {
        key: shortest(value) if isinstance(value, float) else value
        for key, value in imported["config"].items()
        if key in shared
    }


def test_only_llama_rows_are_permuted(tmp_path):
    weights = tensors("qwen2")
    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", "qwen2", weights=weights), tmp_path / "converted")
    got = state(folder)
    np.testing.assert_array_equal(got["model.layers.1.self_attn.q_proj.weight"], weights["blk.1.attn_q.weight"])
    np.testing.assert_array_equal(got["model.layers.1.self_attn.k_proj.bias"], weights["blk.1.attn_k.bias"])


def test_unpermuting_brings_pairs_back_to_halves():
    # one head of 8 rows: GGUF has (0, 4), (1, 5), (2, 6), (3, 7) as neighbours
    stored = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    assert unpermute_rows(stored, 1).tolist() == list(range(8))
    two_heads = np.concatenate([stored, stored + 8])[:, None]
    assert unpermute_rows(two_heads, 2)[:, 0].tolist() == list(range(16))


def test_the_config_says_what_the_header_says(llama):
    config = read_json(llama[1], "config.json")
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert read_json(llama[1], "generation_config.json") == {"bos_token_id": 1, "eos_token_id": 2}


def test_the_tokenizer_splits_as_its_rule_says_and_keeps_special_tokens_whole(llama):
    folder = llama[1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("<|im_start|>h the 42<tool><|im_end|>")
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "h", "Ġthe", "Ġ", "4", "2", "<tool>", "<|im_end|>"]
    assert tokenizer.decode(ids) == "<|im_start|>h the 42<tool><|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "h the 42<tool>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hé"}], tokenize=False)
    assert text == "<|im_start|>user\nhé<|im_end|>\n"
    config = read_json(folder, "tokenizer_config.json")
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == (*SPECIAL[1:], False)
    assert config["chat_template"] == TEMPLATE
    assert config["model_max_length"] == 256


def test_padding_tokens_at_the_end_are_not_part_of_the_tokenizer(tmp_path):
    count = len(TOKENS) + 3
    source = write_gguf(
        tmp_path / "tiny.gguf",
        "qwen2",
        weights=tensors("qwen2", vocabulary=count),
        vocabulary=([*TOKENS, "[PAD1]", "[PAD2]", "[PAD3]"], [*TYPES, 5, 5, 5]),
    )
    folder = convert_gguf(source, tmp_path / "converted")
    assert read_json(folder, "config.json")["vocab_size"] == count
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(TOKENS)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9"), "Qwen composes characters first"


def test_llama3_texts_begin_with_bos_and_numbers_go_by_three(tmp_path):
    def extra(writer):
        writer.add_add_bos_token(True)

    source = write_gguf(tmp_path / "tiny.gguf", pre="llama-bpe", extra=extra)
    tokenizer = transformers.AutoTokenizer.from_pretrained(convert_gguf(source, tmp_path / "converted"))
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 1
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12345")
    assert [word for word, _ in words] == ["a", "Ġ", "123", "45"]
    assert tokenizer.tokenize("42xyz") == ["42", "xyz"], "a word that is a token is taken whole, without merges"


def divisors(factor):
    """What llama.cpp stores for Llama 3 with head_dim 16 and theta 100000, after its converter's loop."""
    result = []
    for frequency in 1 / 100000.0 ** (np.arange(0, 16, 2) / 16):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192 / 1:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


def test_llama3_rope_scaling_is_recovered_from_its_frequencies(tmp_path):
    weights = tensors("llama") | {"rope_freqs.weight": divisors(8.0)}
    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", weights=weights), tmp_path / "converted")
    assert read_json(folder, "config.json")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in Checkpoint.open(folder).names()


def test_yarn_is_read_and_a_second_end_token_kept(tmp_path):
    def extra(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_eot_token_id(0)

    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", "qwen2", extra=extra), tmp_path / "converted")
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read_json(folder, "config.json")["rope_scaling"] == expected
    assert read_json(folder, "generation_config.json")["eos_token_id"] == [2, 0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_weights_become_their_exact_values(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", quantised=kind), tmp_path / "converted")
    values = dequantize(quantize(tensors("llama")["blk.0.ffn_up.weight"], kind), kind)
    np.testing.assert_array_equal(state(folder)["model.layers.0.mlp.up_proj.weight"], values)
    query = unpermute_rows(dequantize(quantize(tensors("llama")["blk.0.attn_q.weight"], kind), kind), HEADS)
    np.testing.assert_array_equal(state(folder)["model.layers.0.self_attn.q_proj.weight"], query)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_once_more(tmp_path, llama, dtype):
    source, exact = llama
    folder = convert_gguf(source, tmp_path / "converted", dtype)
    assert read_json(folder, "config.json")["torch_dtype"] == dtype
    name = "model.layers.0.mlp.down_proj.weight"
    expected = torch.from_numpy(state(exact)[name]).to(getattr(torch, dtype)).float().numpy()
    assert Checkpoint.open(folder).info(name).dtype == dtype
    np.testing.assert_array_equal(state(folder)[name].astype(np.float32), expected)


def as_file(source, folder):
    return source


def as_folder(source, folder):
    return source.parent


def as_wheel(source, folder):
    path = folder / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, "some_model/../weights/tiny.gguf")
        archive.writestr("some_model/__init__.py", "")
    return path


def as_pieces(source, folder):
    content, pieces = source.read_bytes(), []
    for number, start in enumerate(range(0, len(content), 100_000)):
        pieces.append(folder / f"part{number}.bin")
        pieces[-1].write_bytes(content[start : start + 100_000])
    assert len(pieces) > 1
    return pieces


@pytest.mark.parametrize("form", [as_file, as_folder, as_wheel, as_pieces])
def test_every_form_of_the_source_gives_the_same_folder(tmp_path, llama, form):
    source, expected = llama
    folder = convert_gguf(form(source, tmp_path), tmp_path / "out" / "converted")
    files = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == files
    assert all((folder / name).read_bytes() == (expected / name).read_bytes() for name in files)
    assert list((tmp_path / "out").iterdir()) == [folder], "nothing is left beside it"


def without(name):
    return {"weights": {key: value for key, value in tensors("llama").items() if key != name}}


def changed(name, values):
    return {"weights": tensors("llama") | {name: values}}


REFUSED = [
    ({"arch": "mamba"}, r"architecture 'mamba' cannot be imported; llama and qwen2 can"),
    ({"pre": "gpt-4o"}, r"tokenizer\.ggml\.pre = 'gpt-4o' is not known; known are smollm, qwen2"),
    ({"model": "llama"}, r"tokenizer model 'llama' cannot be imported"),
    ({"extra": lambda writer: writer.add_expert_count(8)}, "llama with experts cannot be imported"),
    ({"extra": lambda writer: writer.add_rope_dimension_count(8)}, "rotation of 8 of 16 head dimensions"),
    ({"vocabulary": (TOKENS, TYPES[:-1])}, r"\d+ tokens but \d+ token types"),
    ({"extra": lambda writer: writer.add_sliding_window(8)}, r"llama\.attention\.sliding_window cannot be expressed"),
    ({"extra": lambda writer: writer.add_uint16("split.count", 3)}, "is one of 3 splits"),
    ({"extra": lambda writer: writer.add_value_length(8)}, "values of 8 with keys of 16"),
    ({"vocabulary": ([*TOKENS, "extra"], [*TYPES, 1])}, r"(\d+) tokens but only \d+ embeddings"),
    (changed("blk.0.attn_k.weight", np.ones((24, 64), np.float32)), r"attn_k\.weight has shape \[24, 64\]"),
    (without("blk.1.ffn_up.weight"), r"tensor blk\.1\.ffn_up\.weight is missing"),
    (changed("blk.0.ssm_in.weight", np.ones((2, 2), np.float32)), r"blk\.0\.ssm_in\.weight is not part of a llama"),
    (changed("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32)), "does not follow the Llama 3 rule"),
    (changed("output_norm.weight", np.full(64, np.nan, np.float32)), r"output_norm\.weight holds values .* not finite"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_cannot_be_imported_is_refused_and_leaves_nothing(tmp_path, options, message):
    source = write_gguf(tmp_path / "tiny.gguf", **options)
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(source, tmp_path / "out" / "converted")
    assert list((tmp_path / "out").iterdir()) == []


def test_values_beyond_float16_are_refused(tmp_path):
    weights = tensors("llama") | {"output_norm.weight": np.full(64, 1e6, np.float32)}
    with pytest.raises(CheckpointError, match=r"output_norm\.weight has values beyond float16"):
        convert_gguf(write_gguf(tmp_path / "tiny.gguf", weights=weights), tmp_path / "converted", "float16")


@pytest.mark.parametrize("keep", [0, 3, 200, -1, -5000])
def test_a_truncated_or_foreign_file_is_refused(tmp_path, llama, keep):
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama[0].read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"cut\.gguf is not a readable GGUF file"):
        convert_gguf(path, tmp_path / "converted")
    assert [entry.name for entry in tmp_path.iterdir()] == ["cut.gguf"]


def test_sources_that_do_not_exist_or_are_ambiguous_are_refused(tmp_path, llama):
    for source, message in [
        (tmp_path / "absent.gguf", "does not exist"),
        (tmp_path, "exactly one .gguf file, found none"),
        ([tmp_path / "a", llama[0]], "do not exist: .*a"),
        ([], "empty list"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            convert_gguf(source, tmp_path / "converted")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a.gguf", "")
        archive.writestr("b.gguf", "")
    with pytest.raises(CheckpointError, match=r"found a\.gguf, b\.gguf"):
        convert_gguf(tmp_path / "two.zip", tmp_path / "converted")


def test_a_target_that_holds_something_is_left_alone(tmp_path, llama):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        convert_gguf(llama[0], target)
    assert (target / "notes.txt").read_text() == "mine"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert (convert_gguf(llama[0], empty) / "config.json").exists()


def test_an_unknown_dtype_is_refused(tmp_path, llama):
    with pytest.raises(CheckpointError, match="'int8' cannot be written; choose one of float32"):
        convert_gguf(llama[0], tmp_path / "converted", "int8")


def test_without_the_gguf_package_the_error_says_what_to_install(tmp_path, llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'msds-engine\[gguf\]'"):
        convert_gguf(llama[0], tmp_path / "converted")
