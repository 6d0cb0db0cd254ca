"""The findings about one checkpoint folder, as data, as JSON and as text."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from msds.config import (
    DeepseekConfig,
    GenerationConfig,
    LlamaConfig,
    ModelConfig,
    ParameterCount,
    config_json,
    max_context,
)


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """All tensors of one number type in the files."""

    dtype: str
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class MtpLayers:
    """Multi-token-prediction layers: how many the config declares, and which ones the files hold."""

    declared: int
    stored: tuple[int, ...]
    """Their numbers in the files, counted on from the main layers."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSummary:
    """What tokenizer.json and tokenizer_config.json say."""

    kind: str
    """Algorithm of tokenizer.json: "BPE", "Unigram", ..."""
    vocab_size: int
    """Highest id + 1."""
    bos_token_id: int | None
    eos_token_id: int | None
    has_chat_template: bool


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Elements that one token keeps in one layer's cache."""

    elements: int
    """MLA: latent and rotary key, shared by all heads. Dense families: keys and values."""
    expanded_elements: int
    """What full keys and values of all heads would take; equal to `elements` in the dense families."""
    layers: int
    """Layers of the main model; each MTP layer in use adds one."""
    dtype: str
    """Number type that `element_bytes` counts, which is the config's torch_dtype."""
    element_bytes: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a checkpoint folder contains. `odd` lists, a sentence each, what a reader should know or mend."""

    path: str
    config: ModelConfig
    parameters: ParameterCount
    stored: tuple[StoredTensors, ...]
    """By number type, largest first; empty if the folder has no weights."""
    mtp: MtpLayers
    tokenizer: TokenizerSummary | None
    generation: GenerationConfig
    cache: CacheSize
    odd: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The findings as JSON types."""
        config, cache = self.config, self.cache
        return {
            "path": self.path,
            "config": config_json(config),
            "max_context": max_context(config),
            "parameters": asdict(self.parameters),
            "stored": [asdict(item) for item in self.stored],
            "layers": _layers(config),
            "experts": _experts(config),
            "mtp": {"declared": self.mtp.declared, "stored": list(self.mtp.stored)},
            "tokenizer": None if self.tokenizer is None else asdict(self.tokenizer),
            "generation": {
                **asdict(self.generation),
                "eos_token_ids": list(self.generation.eos_token_ids),
                "not_applied": list(self.generation.not_applied),
            },
            "cache": {**asdict(cache), "bytes_per_token_and_layer": cache.elements * cache.element_bytes},
            "odd": list(self.odd),
        }

    def render(self) -> str:
        """The findings as lines of text for a terminal, without a final line break."""
        rows = list(self._rows())
        width = max(len(title) for title, _ in rows)
        lines = [f"{title:<{width}}  {text}" for title, text in rows]
        if self.odd:
            lines += ["", "odd:", *(f"  - {item}" for item in self.odd)]
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, str]]:
        config, count = self.config, self.parameters
        yield "folder", self.path
        yield "model", f"{config.model_type}, context {max_context(config):,} tokens{_rope(config)}"
        yield "parameters", f"{_short(count.total)} total, {_short(count.active)} active per token"
        if count.mtp:
            yield "", f"{_short(count.mtp)} more in MTP layers"
        for item in self.stored:
            size = f"{_short(item.elements)} elements, {_bytes(item.nbytes)}"
            yield "stored", f"{item.dtype}: {item.tensors:,} tensors, {size}"
        yield "layers", _sentence(_layers(config))
        if (experts := _experts(config)) is not None:
            yield "experts", _sentence(experts)
        if self.mtp.declared or self.mtp.stored:
            held = f"; layers in the files: {', '.join(map(str, self.mtp.stored)) or 'none'}"
            yield "mtp", f"{self.mtp.declared} declared" + (held if self.stored else "")
        yield "attention", _attention(config)
        yield "cache", self._cache_text()
        yield "tokenizer", self._tokenizer_text()
        yield "generation", _generation(self.generation)

    def _cache_text(self) -> str:
        cache = self.cache
        layer = cache.elements * cache.element_bytes
        text = f"{layer:,} bytes per token and layer in {cache.dtype}, {layer * cache.layers:,} per token"
        if cache.expanded_elements != cache.elements:
            ratio = cache.expanded_elements / cache.elements
            text += f" (keys and values of all heads: {ratio:.1f} times as much)"
        return text

    def _tokenizer_text(self) -> str:
        found = self.tokenizer
        if found is None:
            return "none: the model takes token ids"
        template = "with a chat template" if found.has_chat_template else "no chat template"
        size = f"{found.vocab_size:,} ids of the model's {self.config.vocab_size:,}"
        return f"{found.kind}, {size}, bos {found.bos_token_id}, eos {found.eos_token_id}, {template}"


def _layers(config: ModelConfig) -> dict[str, object]:
    moe = config.num_moe_layers if isinstance(config, DeepseekConfig) else 0
    return {"total": config.num_hidden_layers, "dense": config.num_hidden_layers - moe, "moe": moe}


def _experts(config: ModelConfig) -> dict[str, object] | None:
    if not isinstance(config, DeepseekConfig) or config.n_routed_experts == 0:
        return None
    return {
        "routed": config.n_routed_experts,
        "active": config.num_experts_per_tok,
        "shared": config.n_shared_experts,
        "groups": 1 if config.topk_method == "greedy" else config.n_group,
        "method": config.topk_method,
        "scores": config.scoring_func,
    }


def _attention(config: ModelConfig) -> str:
    if isinstance(config, LlamaConfig):
        kv_heads = config.num_key_value_heads
        return f"{config.num_attention_heads} heads of {config.head_dim}, {kv_heads} of keys and values"
    queries = "full-rank" if config.q_lora_rank is None else f"rank {config.q_lora_rank}"
    heads = f"{config.num_attention_heads} heads of {config.qk_nope_head_dim} + {config.qk_rope_head_dim} rotary"
    return f"MLA, {heads}, values of {config.v_head_dim}, latent {config.kv_lora_rank}, queries {queries}"


def _rope(config: ModelConfig) -> str:
    scaling = config.rope_scaling
    if scaling is None:
        return ""
    return f", {scaling.rope_type} x {scaling.factor:g} from {scaling.original_max_position_embeddings:,}"


def _generation(generation: GenerationConfig) -> str:
    names = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    stated = [f"{name} {getattr(generation, name)}" for name in names if getattr(generation, name) is not None]
    ends = ", ".join(map(str, generation.eos_token_ids)) or "none"
    return ", ".join([f"ends at ids: {ends}", *stated])


def _sentence(facts: dict[str, object]) -> str:
    return ", ".join(
        f"{value} {name}" if isinstance(value, int) else f"{name} {value}" for name, value in facts.items()
    )


def _short(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return str(number)


def _bytes(number: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} bytes"
