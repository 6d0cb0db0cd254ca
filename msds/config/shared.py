"""The fields and rules that all families share."""

from collections.abc import Iterator, Sequence
from math import isqrt
from typing import Any, Protocol

from msds.config.fields import Fault, Fields, fault, shown
from msds.config.quantised import read_weight_block_size

HIDDEN_ACTS = ("silu",)
DTYPES = ("float32", "bfloat16", "float16")
ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

# Fields of training, tooling or the form of the output, never of what the model computes. pretraining_tp cut
# matrix products into slices of the same sum; transformers no longer reads it.
_HARMLESS = {
    "_attn_implementation",
    "_commit_hash",
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torchscript",
    "transformers_version",
    "use_cache",
}

# Fields of related models that would change what is computed, with the only value that does not.
_ONLY: tuple[tuple[str, object], ...] = (
    ("partial_rotary_factor", 1.0),
    ("is_encoder_decoder", False),
    ("add_cross_attention", False),
    ("attn_logit_softcapping", None),
    ("final_logit_softcapping", None),
    ("use_qk_norm", False),
    ("qk_layernorm", False),
    ("index_topk", None),
)


class _Shared(Protocol):
    """What both config classes have and the shared rules look at."""

    @property
    def hidden_act(self) -> str: ...
    @property
    def torch_dtype(self) -> str: ...


def shared_faults(config: _Shared) -> Iterator[Fault]:
    """Rules of all families, for configs that were not read from a file."""
    if config.hidden_act not in HIDDEN_ACTS:
        yield fault("hidden_act", config.hidden_act, f"supported: {', '.join(HIDDEN_ACTS)}")
    if config.torch_dtype not in DTYPES:
        yield fault("torch_dtype", config.torch_dtype, f"supported: {', '.join(DTYPES)}")


MOST_LAYERS = 10_000
"""Layers are spelled out one by one, so a nonsensical count must be refused before anything is built of it."""


def size_faults(config: object, names: Sequence[str]) -> Iterator[Fault]:
    """Sizes below 1, and more layers than any model has."""
    for name in names:
        if getattr(config, name) < 1:
            yield fault(name, getattr(config, name), "must be at least 1")
        elif name == "num_hidden_layers" and getattr(config, name) > MOST_LAYERS:
            yield fault(name, getattr(config, name), f"must be at most {MOST_LAYERS}")


def odd_reason(odd: int) -> str:
    """Why an odd number of rotated dimensions is refused."""
    nearest = f"values are {odd - 1} and {odd + 1}" if odd > 1 else "value is 2"
    return f"must be even, since rotation works on pairs; the nearest legal {nearest}"


def nearest_divisor(number: int, near: int, smallest_part: int = 1) -> int | None:
    """The divisor of `number` nearest to `near` that leaves parts of at least `smallest_part`, if any."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    legal = [n for n in (*small, *(number // n for n in small)) if number // n >= smallest_part]
    return min(legal, key=lambda n: abs(n - near), default=None)


def read_shared(fields: Fields, model_types: Sequence[str]) -> dict[str, Any]:
    """The shared arguments of both config classes."""
    values: dict[str, Any] = {"model_type": fields.choice("model_type", choices=model_types)}
    for name in SIZES:
        values[name] = fields.integer(name)
    values["rms_norm_eps"] = fields.number("rms_norm_eps", above=0.0)
    values["hidden_act"] = fields.choice("hidden_act", choices=HIDDEN_ACTS, default="silu")
    values["tie_word_embeddings"] = fields.flag("tie_word_embeddings", default=False)
    values["initializer_range"] = fields.number("initializer_range", minimum=0.0, default=0.02)
    values["torch_dtype"] = _read_dtype(fields)
    bos = fields.token_ids("bos_token_id")
    if len(bos) > 1:
        fields.fail("bos_token_id", list(bos), "one id is wanted")
    values["bos_token_id"] = bos[0] if bos else None
    values["eos_token_ids"] = fields.token_ids("eos_token_id")
    _warn_of_ids(fields, values)
    named, own = fields.raw("architectures"), ARCHITECTURES[values["model_type"]]
    if named is not None and named != [own]:
        fields.warn("architectures", f"{shown(named)} is read as {own}, which model_type says")
    values["weight_block_size"] = read_weight_block_size(fields)
    for name, legal in _ONLY:
        fields.only(name, legal, "not supported")
    fields.skip(_HARMLESS)
    return values


def _read_dtype(fields: Fields) -> str:
    """`torch_dtype` (hub) or `dtype` (transformers 5); absent means float32, as transformers takes it."""
    spellings = [name for name in ("torch_dtype", "dtype") if isinstance(fields.data.get(name), str)]
    plain = {name: str(fields.data[name]).removeprefix("torch.") for name in spellings}
    reader = Fields({**fields.data, **plain}, within=fields)
    fields.skip(("torch_dtype", "dtype"))
    return reader.choice("torch_dtype", "dtype", choices=DTYPES, default="float32")


def _warn_of_ids(fields: Fields, values: dict[str, Any]) -> None:
    """Ids outside the vocabulary are legal, they just never occur."""
    ids = [("bos_token_id", values["bos_token_id"])]
    ids += [("eos_token_id", item) for item in values["eos_token_ids"]]
    for name, item in ids:
        if item is not None and item >= values["vocab_size"] and not fields.has_faults("vocab_size"):
            fields.warn(name, f"{item} lies outside vocab_size = {values['vocab_size']}")
