"""What is odd about a checkpoint: legal or not, each a sentence with names and numbers."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod

from msds.checkpoint.header import TensorInfo
from msds.checkpoint.quantisation import SCALE_SUFFIX, scale_grid
from msds.config import DeepseekConfig, GenerationConfig, ModelConfig, count_parameters, max_context
from msds.inspect.report import TokenizerSummary

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MTP_COPY = re.compile(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")
_NO_PARAMETER = re.compile(rf".*({SCALE_SUFFIX}|\.rotary_emb\.inv_freq)")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

Tensors = Mapping[str, TensorInfo]


def layer_number(name: str) -> int | None:
    """The layer that a stored tensor belongs to, None for the ends of the model."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def config_oddities(config: ModelConfig, generation: GenerationConfig) -> Iterator[str]:
    """What the configs alone show."""
    context = max_context(config)
    if context < config.max_position_embeddings:
        yield (
            f"dynamic rope scaling: texts beyond {context} tokens are refused, because they would change "
            "the keys that are already cached"
        )
    if not generation.eos_token_ids:
        yield "no eos_token_id in config.json or generation_config.json: texts end at their token limit"
    for name in generation.not_applied:
        yield f"generation_config.json has {name}, which is not applied"


def tokenizer_oddities(config: ModelConfig, generation: GenerationConfig, tokenizer: TokenizerSummary) -> Iterator[str]:
    """Where tokenizer and model disagree."""
    size, vocab_size = tokenizer.vocab_size, config.vocab_size
    if size > vocab_size:
        yield f"the tokenizer has ids up to {size - 1}, beyond the model's vocab_size of {vocab_size}"
    elif size < vocab_size:
        yield f"ids {size} to {vocab_size - 1} of the model have no text in the tokenizer"
    if None not in (config.bos_token_id, tokenizer.bos_token_id) and config.bos_token_id != tokenizer.bos_token_id:
        yield f"the bos id is {config.bos_token_id} in config.json, {tokenizer.bos_token_id} in the tokenizer"
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in generation.eos_token_ids:
        known = ", ".join(map(str, generation.eos_token_ids)) or "none"
        yield f"the tokenizer's eos id {tokenizer.eos_token_id} is not among those of the configs ({known})"


def tensor_oddities(config: ModelConfig, tensors: Tensors) -> Iterator[str]:
    """Where headers and config disagree; nothing if there are no tensors."""
    if tensors:
        yield from _layer_oddities(config, tensors)
        yield from _end_oddities(config, tensors)
        yield from _block_oddities(config, tensors)
        yield from _dtype_oddities(config, tensors)
        yield from _count_oddities(config, tensors)


def _layer_oddities(config: ModelConfig, tensors: Tensors) -> Iterator[str]:
    stored = {number for name in tensors if (number := layer_number(name)) is not None}
    main = config.num_hidden_layers
    declared = config.num_nextn_predict_layers if isinstance(config, DeepseekConfig) else 0
    if missing := sorted(set(range(main)) - stored):
        yield f"no tensors of {_numbers(missing)}, which num_hidden_layers = {main} asks for"
    if missing := sorted(set(range(main, main + declared)) - stored):
        yield (
            f"no tensors of MTP {_numbers(missing)}, which num_nextn_predict_layers = {declared} declares: "
            "the model runs, but cannot speculate"
        )
    if extra := sorted(number for number in stored if number >= main + declared):
        yield f"tensors of {_numbers(extra)}, beyond the config's {main} layers and {declared} MTP layers"


def _end_oddities(config: ModelConfig, tensors: Tensors) -> Iterator[str]:
    if config.tie_word_embeddings and _HEAD in tensors:
        yield f"{_HEAD} is stored although tie_word_embeddings is true: the embedding is used"
    if not config.tie_word_embeddings and _HEAD not in tensors:
        yield f"{_HEAD} is not stored although tie_word_embeddings is false: the model cannot be loaded"
    expected = (config.vocab_size, config.hidden_size)
    for name in (_EMBEDDING, _HEAD):
        if name in tensors and tensors[name].shape != expected:
            yield f"{name} has shape {list(tensors[name].shape)}, the config asks for {list(expected)}"


def _block_oddities(config: ModelConfig, tensors: Tensors) -> Iterator[str]:
    block = config.weight_block_size
    quantised = [info for info in tensors.values() if info.dtype == "float8_e4m3fn"]
    if not quantised:
        if block is not None:
            yield f"quantization_config asks for FP8 blocks of {list(block)}, but no tensor is stored as FP8"
        return
    if block is None:
        yield f"{_some(quantised)} stored as FP8, but config.json has no quantization_config"
        return
    rows, columns = block
    yield from _about(quantised, lambda i: i.name + SCALE_SUFFIX not in tensors, "without its block scales")
    matrices = [info for info in quantised if len(info.shape) == 2]
    yield from _about(
        matrices,
        lambda i: i.shape[0] % rows != 0 or i.shape[1] % columns != 0,
        f"not a multiple of the {rows} x {columns} block; its last blocks are partial",
    )
    yield from _about(
        matrices,
        lambda i: (
            (scale := tensors.get(i.name + SCALE_SUFFIX)) is not None and scale.shape != scale_grid(i.shape, block)
        ),
        f"with scales that are not one per {rows} x {columns} block",
    )


def _dtype_oddities(config: ModelConfig, tensors: Tensors) -> Iterator[str]:
    dtypes = {info.dtype for info in tensors.values()}
    if config.torch_dtype not in dtypes:
        yield f"torch_dtype is {config.torch_dtype}, but the files hold {', '.join(sorted(dtypes))}"


def _count_oddities(config: ModelConfig, tensors: Tensors) -> Iterator[str]:
    """The one test that sees a missing or extra tensor of any kind, and any wrong shape."""
    stored = sum(prod(info.shape) for name, info in tensors.items() if _is_parameter(name, config))
    count = count_parameters(config)
    expected = count.total
    if isinstance(config, DeepseekConfig) and config.num_nextn_predict_layers:
        mtp = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
        held = {layer_number(name) for name in tensors} & set(mtp)
        expected += len(held) * (count.mtp // len(mtp))  # an MTP layer that is missing was named above
    if stored != expected:
        yield f"the files hold {stored:,} parameters, the config describes {expected:,}"


def _is_parameter(name: str, config: ModelConfig) -> bool:
    """Scales, frequencies, and copies of the embedding are stored but are no parameters."""
    if _NO_PARAMETER.fullmatch(name) or (name == _HEAD and config.tie_word_embeddings):
        return False
    return not (_MTP_COPY.fullmatch(name) and (layer_number(name) or 0) >= config.num_hidden_layers)


def _about(infos: Iterable[TensorInfo], is_odd: Callable[[TensorInfo], bool], what: str) -> Iterator[str]:
    odd = [info for info in infos if is_odd(info)]
    if odd:
        yield f"{_some(odd)} {what}"


def _some(infos: list[TensorInfo]) -> str:
    first = f"{infos[0].name} {list(infos[0].shape)}"
    return first if len(infos) == 1 else f"{len(infos)} FP8 tensors (the first: {first})"


def _numbers(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"layer {listed}" if len(numbers) == 1 else f"layers {listed}"
