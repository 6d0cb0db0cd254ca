"""What a GGUF file says about its model, and the Hugging Face `config.json` that says the same.

Keys are those of the GGUF specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from msds.checkpoint.dtypes import Array
from msds.errors import CheckpointError

T = TypeVar("T", int, float, str, bool, list[Any])

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""GGUF architectures that can be imported; the name is also the `model_type`."""


_KNOWN_KEYS = frozenset(
    (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "tensor_data_layout",
        "vocab_size",
    )
)
"""Keys of an architecture that are read here or say nothing that the tensors do not."""


@dataclass(frozen=True)
class Metadata:
    """The key-value part of a GGUF file, read with the type that each use expects."""

    source: str
    fields: Mapping[str, Any]

    def optional(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, or None; an int is accepted where a float is meant."""
        value = self.fields.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(
                f"{self.source}: {key} must be {kind.__name__}, got {type(value).__name__} {str(value)[:60]!r}"
            )
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`, which has to be there."""
        value = self.optional(key, kind)
        if value is None:
            raise CheckpointError(f"{self.source}: the GGUF header lacks {key}")
        return value

    def positive(self, key: str) -> int:
        """A count that has to be there and above zero."""
        value = self.require(key, int)
        if value <= 0:
            raise CheckpointError(f"{self.source}: {key} must be positive, got {value}")
        return value

    @property
    def architecture(self) -> str:
        """`general.architecture`, refused unless it is one that can be imported."""
        name = self.require("general.architecture", str)
        if name not in ARCHITECTURES:
            known = " and ".join(ARCHITECTURES)
            raise CheckpointError(f"{self.source}: architecture {name!r} cannot be imported; {known} can")
        return name


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF keeps 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def hf_config(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_freqs: Array | None, dtype: str
) -> dict[str, Any]:
    """`config.json` for the converted model.

    `shapes`: of each tensor by GGUF name. `rope_freqs`: the divisors that Llama 3 files store per frequency
    [head_dim / 2]. `dtype`: what the weights are written as.
    """
    arch = metadata.architecture
    if metadata.optional(f"{arch}.expert_count", int):
        raise CheckpointError(f"{metadata.source}: {arch} with experts cannot be imported; dense models can")
    heads = metadata.positive(f"{arch}.attention.head_count")
    kv_heads = metadata.optional(f"{arch}.attention.head_count_kv", int) or heads
    hidden = metadata.positive(f"{arch}.embedding_length")
    head_dim = metadata.optional(f"{arch}.attention.key_length", int) or hidden // heads
    rotated = metadata.optional(f"{arch}.rope.dimension_count", int) or head_dim
    value_dim = metadata.optional(f"{arch}.attention.value_length", int) or head_dim
    if value_dim != head_dim:
        raise CheckpointError(f"{metadata.source}: values of {value_dim} with keys of {head_dim} cannot be imported")
    if rotated != head_dim:
        raise CheckpointError(
            f"{metadata.source}: rotation of {rotated} of {head_dim} head dimensions cannot be imported"
        )
    rope_theta = shortest(metadata.optional(f"{arch}.rope.freq_base", float) or 10000.0)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": metadata.positive(f"{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.positive(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shortest(metadata.require(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(metadata, head_dim, rope_theta, rope_freqs),
        "max_position_embeddings": metadata.positive(f"{arch}.context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": dtype,
        **token_ids(metadata),
    }
    if arch == "qwen2":
        config["use_sliding_window"] = False
    else:
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    return {key: value for key, value in config.items() if value is not None}


def token_ids(metadata: Metadata) -> dict[str, int]:
    """The ids that begin, end and pad a text, under their names in `config.json`."""
    names = {
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    found = {name: metadata.optional(key, int) for name, key in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """`generation_config.json`: the same ids, with the end of a turn as a second end where GGUF names one."""
    config: dict[str, Any] = dict(token_ids(metadata))
    turn_end = metadata.optional("tokenizer.ggml.eot_token_id", int)
    if turn_end is not None and turn_end != config.get("eos_token_id"):
        config["eos_token_id"] = [config["eos_token_id"], turn_end] if "eos_token_id" in config else turn_end
    return config


def _rope_scaling(
    metadata: Metadata, head_dim: int, rope_theta: float, rope_freqs: Array | None
) -> dict[str, Any] | None:
    arch = metadata.architecture
    if rope_freqs is not None:
        return _llama3_scaling(metadata.source, head_dim, rope_theta, rope_freqs)
    kind = metadata.optional(f"{arch}.rope.scaling.type", str)
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{metadata.source}: rope scaling {kind!r} cannot be imported; linear, yarn can")
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": shortest(metadata.require(f"{arch}.rope.scaling.factor", float)),
    }
    if kind == "yarn":
        original = metadata.positive(f"{arch}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(source: str, head_dim: int, rope_theta: float, rope_freqs: Array) -> dict[str, Any]:
    """The Llama 3 rule behind stored frequency divisors.

    GGUF keeps the result of the rule, not its parameters. The factor is the largest divisor; the other three
    are those of every published Llama 3 model, and are believed only if they reproduce the stored divisors.
    """
    factor = shortest(float(rope_freqs.max()))
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelength = 2 * np.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    if rope_freqs.shape != divisors.shape or not np.allclose(rope_freqs, divisors, rtol=1e-4):
        raise CheckpointError(
            f"{source}: rope_freqs.weight does not follow the Llama 3 rule with factor {factor}, "
            "so the rotation cannot be expressed in a config"
        )
    return scaling


def check_header(metadata: Metadata) -> None:
    """Raises for a piece of a split model, and for keys whose effect on the model we would lose."""
    if (count := metadata.optional("split.count", int)) and count > 1:
        raise CheckpointError(f"{metadata.source} is one of {count} splits; join them with llama-gguf-split --merge")
    prefix = metadata.architecture + "."
    keys = [key for key in metadata.fields if key.startswith(prefix)]
    if unknown := [key for key in keys if key.removeprefix(prefix) not in _KNOWN_KEYS]:
        raise CheckpointError(
            f"{metadata.source}: {', '.join(unknown)} cannot be expressed in a config; the model would change"
        )


def check_shapes(source: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises with every tensor whose shape is not what the header's sizes ask for."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    expected = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "token_embd": (config["vocab_size"], hidden),
        "output": (config["vocab_size"], hidden),
        "output_norm": (hidden,),
    }
    faults = []
    for name, shape in shapes.items():
        part, _, kind = name.rpartition(".")
        full = expected.get(part.split(".")[-1])  # rope_freqs has none: it is compared with the rule
        if full is not None and shape != (full if kind == "weight" else full[:1]):
            faults.append(f"tensor {name} has shape {list(shape)}, the header asks for {list(full)}")
    if faults:
        raise CheckpointError(f"{source} cannot be imported:\n  " + "\n  ".join(faults))


def check_names(metadata: Metadata, names: Collection[str], translated: Mapping[str, str]) -> None:
    """Raises with every tensor that is missing, or that the architecture does not have."""
    required = ["token_embd.weight", "output_norm.weight"]
    for layer in range(metadata.positive(f"{metadata.architecture}.block_count")):
        for part in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm"):
            required.append(f"blk.{layer}.{part}.weight")
        required += [f"blk.{layer}.ffn_{part}.weight" for part in ("gate", "up", "down")]
    missing = [name for name in required if name not in names]
    unknown = [name for name in names if name not in translated and name != "rope_freqs.weight"]
    faults = [f"tensor {name} is missing" for name in missing]
    faults += [f"tensor {name} is not part of a {metadata.architecture} model" for name in unknown]
    if faults:
        raise CheckpointError(f"{metadata.source} cannot be imported:\n  " + "\n  ".join(faults))
