"""Gathers what a checkpoint folder contains. Works with nothing but a config.json in it."""

from collections import defaultdict
from collections.abc import Iterable
from math import prod
from pathlib import Path

from msds.checkpoint.header import TensorInfo
from msds.config import (
    DeepseekConfig,
    ModelConfig,
    config_warnings,
    count_parameters,
    read_config,
    read_generation_config,
)
from msds.errors import CheckpointError, TokenizerError
from msds.inspect.oddities import config_oddities, layer_number, tensor_oddities, tokenizer_oddities
from msds.inspect.report import CacheSize, Inspection, MtpLayers, StoredTensors, TokenizerSummary
from msds.layouts import open_checkpoint
from msds.text.chat import ChatTemplate
from msds.text.tokenizer import Tokenizer, has_tokenizer, read_json, read_tokenizer_config

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def inspect_model(path: str | Path) -> Inspection:
    """Inspect a checkpoint folder; of the weight files only headers are read.

    ConfigError if config.json cannot be served; damage anywhere else is reported in `odd`.
    """
    folder = Path(path)
    config = read_config(path)
    folder = folder if folder.is_dir() else folder.parent
    generation = read_generation_config(folder)
    odd = [*config_warnings(folder), *config_oddities(config, generation)]
    tensors = _tensors(folder, config, odd)
    mtp = _mtp(config, tensors)
    odd += tensor_oddities(config, tensors)
    tokenizer = _tokenizer(folder, odd)
    if tokenizer is not None:
        odd += tokenizer_oddities(config, generation, tokenizer)
    return Inspection(
        path=str(path),
        config=config,
        parameters=count_parameters(config),
        stored=_stored(tensors.values()),
        mtp=mtp,
        tokenizer=tokenizer,
        generation=generation,
        cache=_cache(config),
        odd=tuple(odd),
    )


def _tensors(folder: Path, config: ModelConfig, odd: list[str]) -> dict[str, TensorInfo]:
    try:
        checkpoint = open_checkpoint(folder, config)
    except CheckpointError as error:
        odd.append(str(error))
        return {}
    odd += checkpoint.faults
    return {name: checkpoint.info(name) for name in checkpoint.names()}


def _stored(tensors: Iterable[TensorInfo]) -> tuple[StoredTensors, ...]:
    by_type: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in tensors:
        by_type[info.dtype].append(info)
    stored = (
        StoredTensors(
            dtype=dtype,
            tensors=len(infos),
            elements=sum(prod(info.shape) for info in infos),
            nbytes=sum(info.nbytes for info in infos),
        )
        for dtype, infos in by_type.items()
    )
    return tuple(sorted(stored, key=lambda item: -item.nbytes))


def _mtp(config: ModelConfig, tensors: Iterable[str]) -> MtpLayers:
    declared = config.num_nextn_predict_layers if isinstance(config, DeepseekConfig) else 0
    layers = {number for name in tensors if (number := layer_number(name)) is not None}
    return MtpLayers(declared=declared, stored=tuple(sorted(n for n in layers if n >= config.num_hidden_layers)))


def _cache(config: ModelConfig) -> CacheSize:
    if isinstance(config, DeepseekConfig):
        elements = config.kv_lora_rank + config.qk_rope_head_dim
        expanded = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    else:
        elements = expanded = 2 * config.num_key_value_heads * config.head_dim
    return CacheSize(
        elements=elements,
        expanded_elements=expanded,
        layers=config.num_hidden_layers,
        dtype=config.torch_dtype,
        element_bytes=_ELEMENT_BYTES[config.torch_dtype],
    )


def _tokenizer(folder: Path, odd: list[str]) -> TokenizerSummary | None:
    if not has_tokenizer(folder):
        return None
    try:
        tokenizer = Tokenizer.open(folder)
        model = read_json(folder / "tokenizer.json")["model"]
    except TokenizerError as error:
        odd.append(f"the tokenizer cannot be used: {error}")
        return None
    return TokenizerSummary(
        kind=str(model.get("type", "unnamed")),
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        has_chat_template=_has_chat_template(folder, tokenizer, odd),
    )


def _has_chat_template(folder: Path, tokenizer: Tokenizer, odd: list[str]) -> bool:
    """Whether there is one that compiles; one that does not is odd."""
    is_there = (folder / "chat_template.jinja").is_file() or "chat_template" in read_tokenizer_config(folder)
    if not is_there:
        return False
    try:
        ChatTemplate.open(folder, tokenizer)
    except TokenizerError as error:
        odd.append(f"the chat template cannot be used: {error}")
        return False
    return True
