"""Bad input, end to end: each fault of a folder, an option, a prompt or a parameter ends in one clear MsdsError.

Clear means: it is raised before anything runs, and its message names the thing, its value, and often the remedy.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import msds
from msds import SamplingParams
from msds.errors import (
    CheckpointError,
    ConfigError,
    MsdsError,
    OptionError,
    PromptError,
    SamplingError,
    TokenizerError,
)

Spoil = Callable[[Path], None]
OPTIONS: dict[str, Any] = {"max_model_len": 64, "progress": False}


def config(**changes: Any) -> Spoil:
    """config.json with other fields; None for the value "absent" removes one."""

    def spoil(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v != "absent"}))

    return spoil


def text(file: str, content: str) -> Spoil:
    return lambda folder: (folder / file).write_text(content) and None


def without(file: str) -> Spoil:
    return lambda folder: (folder / file).unlink()


def tensors(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        arrays = {name: array.copy() for name, array in load_file(folder / "model.safetensors").items()}
        change(arrays)
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def raw(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def tokenizer_config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        fields = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in fields.items() if value != "absent"}))

    return spoil


def put(name: str, index: Any, value: float) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name][index] = value

    return change


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
YARN = {"type": "yarn", "factor": 4.0}

FOLDERS: dict[str, tuple[str, Spoil, type[MsdsError], str]] = {
    # config
    "no config": ("llama_base", without("config.json"), ConfigError, r"config\.json"),
    "config is no JSON": ("llama_base", text("config.json", "{'a': 1}"), ConfigError, r"config\.json.*JSON"),
    "config is a list": ("llama_base", text("config.json", "[]"), ConfigError, r"config\.json"),
    "unknown family": ("llama_base", config(model_type="gpt2"), ConfigError, r"model_type.*gpt2.*llama"),
    "unknown activation": ("llama_base", config(hidden_act="gelu"), ConfigError, r"hidden_act.*gelu.*silu"),
    "text for a number": ("llama_base", config(vocab_size="512"), ConfigError, r'vocab_size.*"512"'),
    "a field is absent": ("llama_base", config(hidden_size="absent"), ConfigError, "hidden_size"),
    "heads without a key head": ("llama_base", config(num_key_value_heads=3), ConfigError, "num_key_value_heads.*3"),
    "unknown rope scaling": (
        "llama_base",
        config(rope_scaling={"type": "spiral", "factor": 2.0}),
        ConfigError,
        "spiral.*yarn",
    ),
    "yarn without its length": (
        "llama_base",
        config(rope_scaling=YARN),
        ConfigError,
        "original_max_position_embeddings",
    ),
    "odd rope dim": ("v3_base", config(qk_rope_head_dim=7), ConfigError, r"qk_rope_head_dim.*7"),
    "more groups kept than exist": ("v3_base", config(topk_group=5), ConfigError, r"topk_group.*5.*4"),
    "unknown scoring": ("v3_base", config(scoring_func="tanh"), ConfigError, r"scoring_func.*tanh.*sigmoid"),
    "unknown routing": ("v3_base", config(topk_method="random"), ConfigError, r"topk_method.*random"),
    "unknown quantisation": (
        "v3_base",
        config(quantization_config={"quant_method": "awq"}),
        ConfigError,
        r"quant_method.*awq",
    ),
    "generation config is no JSON": (
        "llama_base",
        text("generation_config.json", "{"),
        ConfigError,
        r"generation_config\.json",
    ),
    "negative temperature in generation config": (
        "llama_base",
        text("generation_config.json", '{"temperature": -1.0}'),
        ConfigError,
        r"temperature.*-1",
    ),
    # checkpoint
    "no weights": ("llama_base", without("model.safetensors"), CheckpointError, "safetensors"),
    "truncated": ("llama_base", raw(lambda data: data[:-1]), CheckpointError, r"model\.safetensors.*bytes"),
    "empty file": ("llama_base", raw(lambda data: b""), CheckpointError, r"model\.safetensors"),
    "LFS pointer": ("llama_base", raw(lambda data: POINTER.encode()), CheckpointError, "git-lfs pointer"),
    "header of 2^62 bytes": (
        "llama_base",
        raw(lambda data: (1 << 62).to_bytes(8, "little") + data[8:]),
        CheckpointError,
        r"model\.safetensors.*4611686018427387904",
    ),
    "an absent shard": (
        "llama_base",
        text("model.safetensors.index.json", '{"weight_map": {"model.norm.weight": "model-7.safetensors"}}'),
        CheckpointError,
        r"model-7\.safetensors",
    ),
    "a tensor is absent": ("v3_base", tensors(lambda arrays: arrays.pop(DOWN)), CheckpointError, DOWN),
    "another shape": (
        "llama_base",
        config(intermediate_size=130),
        CheckpointError,
        r"mlp\.gate_proj\.weight.*\[128, 64\].*\[130, 64\]",
    ),
    "fewer layers stored": ("llama_base", config(num_hidden_layers=3), CheckpointError, r"layers\.2\."),
    "untied without a head": (
        "llama_tied",
        config(tie_word_embeddings=False),
        CheckpointError,
        r"lm_head\.weight",
    ),
    "NaN in a weight": (
        "v3_base",
        tensors(put(DOWN, (5, 6), np.nan)),
        CheckpointError,
        rf"{DOWN}.*\[.*5, 6\]",
    ),
    "infinite routing bias": ("v3_base", tensors(put(BIAS, 2, np.inf)), CheckpointError, rf"{BIAS}.*\[2\]"),
    "whole numbers for weights": (
        "llama_base",
        tensors(lambda arrays: arrays.update({"model.norm.weight": np.ones(64, np.int32)})),
        CheckpointError,
        r"model\.norm\.weight.*(I32|int32)",
    ),
    # tokenizer
    "tokenizer is no JSON": ("llama_base", text("tokenizer.json", "{"), TokenizerError, r"tokenizer\.json"),
    "tokenizer is something else": (
        "llama_base",
        text("tokenizer.json", '{"model": {"type": "Morse"}}'),
        TokenizerError,
        r"tokenizer\.json",
    ),
    "tokenizer config is no JSON": (
        "llama_base",
        text("tokenizer_config.json", "]"),
        TokenizerError,
        r"tokenizer_config\.json",
    ),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_folder(tiny: Callable[..., Path], tmp_path: Path, fault: str) -> None:
    name, spoil, kind, message = FOLDERS[fault]
    folder = Path(shutil.copytree(tiny(name, tokenizer=True), tmp_path / "model"))
    spoil(folder)
    with pytest.raises(kind) as caught:
        msds.LLM(folder, **OPTIONS)
    beginning = " ".join(str(caught.value).splitlines()[:3])  # the cause comes before what follows from it
    assert re.search(message, beginning)


@pytest.mark.parametrize("place", ["nowhere", "file"])
def test_path(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MsdsError, match=place):
        msds.LLM(tmp_path / place, **OPTIONS)


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Path]) -> msds.LLM:
    return msds.LLM(tiny("llama_base", tokenizer=True), **OPTIONS)


USER = {"role": "user", "content": "Hi"}

CALLS: dict[str, tuple[Callable[[Any], Any], type[MsdsError], str]] = {
    # options
    "unknown option": (lambda m: msds.LLM(m.model.folder, blocksize=4), OptionError, "'blocksize'.*block_size"),
    "longer than the context": (
        lambda m: msds.LLM(m.model.folder, max_model_len=4096),
        OptionError,
        "max_model_len is 4096.*2048",
    ),
    "unknown dtype": (lambda m: msds.LLM(m.model.folder, dtype="int4"), OptionError, "dtype is 'int4'"),
    "too little memory": (
        lambda m: msds.LLM(m.model.folder, memory_fraction=1e-7),
        OptionError,
        "memory_fraction.*lower max_model_len",
    ),
    "plan of an unknown op": (
        lambda m: msds.load(m.model.folder, plan=msds.Plan({"attention": "portable"})),
        OptionError,
        "'attention'.*cache_write",
    ),
    "plan of an absent implementation": (
        lambda m: msds.load(m.model.folder, plan=msds.Plan({"cache_write": "ascendc"})),
        OptionError,
        "cache_write.*'ascendc'.*portable",
    ),
    "a number of ranks": (lambda m: msds.load(m.model.folder, ranks=2), OptionError, "ranks is 2: give one rank"),
    "ranks by a plan's name": (
        lambda m: msds.load(m.model.folder, ranks="tp2"),
        OptionError,
        r"msds.Ranks\(msds.ShardPlan.parse\(\"tp2\"\), rank=0\)",
    ),
    "a list of ranks": (lambda m: msds.load(m.model.folder, ranks=[0, 1]), OptionError, r"ranks is \[0, 1\]: give one"),
    "an LLM of no rank": (lambda m: msds.LLM(m.model.folder, ranks=0), OptionError, "ranks is 0: give one rank"),
    "MTP of a model without": (lambda m: msds.load(m.model.folder, mtp=True), CheckpointError, "MTP"),
    # prompts
    "no prompt": (lambda m: m.generate([]), PromptError, "no prompts"),
    "no tokens": (lambda m: m.generate([[]]), PromptError, "no "),
    "a number for a prompt": (lambda m: m.generate([["a"], 5]), PromptError, "5"),
    "an id beyond the vocabulary": (lambda m: m.generate([[5, 512]]), PromptError, r"512 at position 1.*\[0, 512\)"),
    "a fraction for an id": (lambda m: m.generate([[1.5]]), PromptError, "1.5"),
    "a prompt beyond the context": (lambda m: m.generate([[5] * 70]), PromptError, "70 tokens.*64"),
    "an answer beyond the context": (
        lambda m: m.generate([[5] * 60], SamplingParams(max_tokens=10)),
        PromptError,
        "60 tokens.*10.*64.*lower max_tokens to 4",
    ),
    "half a character": (lambda m: m.generate("a\ud800"), MsdsError, r"U\+D800 at character 1"),
    "no messages": (lambda m: m.chat([]), PromptError, "no messages"),
    "message without a role": (lambda m: m.chat([{"content": "Hi"}]), PromptError, "role"),
    "content that is no text": (lambda m: m.chat([{"role": "user", "content": 7}]), PromptError, "content.*not int"),
    "logits of no tokens": (lambda m: m.model.logits([]), PromptError, "no token ids"),
    "positions that go back": (lambda m: m.model.logits([5, 6], [3, 2]), PromptError, "ascending"),
    "a position beyond the context": (lambda m: m.model.logits([5], [2048]), PromptError, "2048"),
    # sampling
    "negative temperature": (lambda m: SamplingParams(temperature=-0.1), SamplingError, "temperature is -0.1"),
    "temperature that is no number": (
        lambda m: SamplingParams(temperature=float("nan")),
        SamplingError,
        "temperature is nan",
    ),
    "top_p beyond one": (lambda m: SamplingParams(top_p=1.5), SamplingError, "top_p is 1.5"),
    "no answers": (lambda m: SamplingParams(n=0), SamplingError, "n is 0"),
    "no tokens wanted": (lambda m: SamplingParams(max_tokens=0), SamplingError, "max_tokens is 0"),
    "more at least than at most": (
        lambda m: SamplingParams(max_tokens=2, min_tokens=3),
        SamplingError,
        "min_tokens is 3.*2",
    ),
    "more answers than can be kept": (
        lambda m: m.generate([[5]], SamplingParams(n=10**9)),
        SamplingError,
        "n is 1000000000: at most 1024",
    ),
    "an answer that can neither go on nor end": (
        lambda m: m.generate([[5]], SamplingParams(min_tokens=2, stop_token_ids=list(range(512)))),
        SamplingError,
        "min_tokens is 2, but every token",
    ),
    "no path": (lambda m: msds.LLM(""), ConfigError, "path is empty"),
    "no path to load": (lambda m: msds.load(""), ConfigError, "path is empty"),
    "empty stop string": (lambda m: SamplingParams(stop=""), SamplingError, "stop is ''"),
    "bias for an absent token": (
        lambda m: m.generate("a", SamplingParams(logit_bias={600: 1.0})),
        SamplingError,
        "600.*511",
    ),
    "parameters for another number of prompts": (
        lambda m: m.generate(["a", "b"], [SamplingParams()]),
        SamplingError,
        "1 sampling parameters for 2 prompts",
    ),
}


@pytest.mark.parametrize("fault", CALLS)
def test_call(llm: msds.LLM, fault: str) -> None:
    call, kind, message = CALLS[fault]
    with pytest.raises(kind, match=f"(?s){message}"):
        call(llm)
    assert not llm.engine.has_work  # nothing is left waiting
    assert llm.engine.stats.referenced_blocks == 0


def test_template_faults(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Chat needs a template that can be rendered; generation does not."""
    for template, message in (("absent", "chat"), ("{% if %}", "template"), ("{{ raise_exception('no') }}", "no")):
        folder = Path(shutil.copytree(tiny("llama_base", tokenizer=True), tmp_path / str(len(template))))
        tokenizer_config(chat_template=template)(folder)
        llm = msds.LLM(folder, **OPTIONS)
        with pytest.raises(MsdsError, match=f"(?s){message}"):
            llm.chat([USER])


def test_there_are_enough() -> None:
    assert len(FOLDERS) + len(CALLS) >= 25
