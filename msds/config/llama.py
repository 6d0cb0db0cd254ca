"""Config of the dense families: Llama and Qwen2 (the R1-Distill models and everything of these types)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msds.config.fields import MAX_INTEGER, Fault, Fields, fault, raise_faults, shown
from msds.config.rope import RopeScaling, read_rope
from msds.config.shared import SIZES, nearest_divisor, odd_reason, read_shared, shared_faults, size_faults

MODEL_TYPES = ("llama", "qwen2")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape and mathematics of one dense model, with Hugging Face's field names. Sizes count elements."""

    model_type: str
    """"llama" or "qwen2"."""
    vocab_size: int
    """Rows of the embedding and of the head; may exceed the tokenizer's vocabulary."""
    hidden_size: int
    """Width of the residual stream (D)."""
    intermediate_size: int
    """Inner width of the gated MLP."""
    num_hidden_layers: int
    """Layers."""
    num_attention_heads: int
    """Query heads (H)."""
    num_key_value_heads: int
    """Key and value heads; divides num_attention_heads."""
    head_dim: int
    """Width of one head, even; hidden_size / num_attention_heads unless the file says otherwise."""
    max_position_embeddings: int
    """Context length that the model is declared for, in tokens; see `max_context`."""
    rms_norm_eps: float
    """Epsilon of all norms."""
    hidden_act: str = "silu"
    """Activation of the gated MLP."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies, None for none."""
    attention_bias: bool = False
    """Whether the q, k and v projections have a bias: always in qwen2, as the file says in llama."""
    attention_out_bias: bool = False
    """Whether o_proj has a bias: never in qwen2, with attention_bias in llama."""
    mlp_bias: bool = False
    """Whether the MLP's projections have a bias: never in qwen2."""
    initializer_range: float = 0.02
    """Standard deviation of freshly initialised weights."""
    torch_dtype: str = "bfloat16"
    """"float32", "bfloat16" or "float16": what the checkpoint says its unquantised tensors are stored in."""
    bos_token_id: int | None = None
    """Id of the beginning-of-text token."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a text, as config.json lists them."""
    weight_block_size: tuple[int, int] | None = None
    """(rows, columns) that share one scale in an FP8 checkpoint; None if it is not quantised."""

    def __post_init__(self) -> None:
        raise_faults("LlamaConfig", list(llama_faults(self)))


def llama_faults(config: LlamaConfig) -> Iterator[Fault]:
    """What no single field shows: sizes that do not fit each other."""
    sizes = list(size_faults(config, (*SIZES, "num_key_value_heads", "head_dim")))
    if sizes:
        yield from sizes
        return
    yield from shared_faults(config)
    if config.model_type not in MODEL_TYPES:
        yield fault("model_type", config.model_type, f"supported: {', '.join(MODEL_TYPES)}")
    is_qwen2 = config.model_type == "qwen2"
    biases = (config.attention_bias, config.attention_out_bias, config.mlp_bias)
    if is_qwen2 and biases != (True, False, False):
        text = "attention_bias, attention_out_bias, mlp_bias = true, false, false is what qwen2 always has"
        yield Fault(("attention_bias", "attention_out_bias", "mlp_bias"), f"{text}; got {shown(biases)}")
    elif not is_qwen2 and config.attention_bias != config.attention_out_bias:
        reason = f"llama has biases on q, k, v and o alike: attention_bias = {shown(config.attention_bias)}"
        yield fault("attention_out_bias", config.attention_out_bias, reason, "attention_bias")
    if config.head_dim % 2:
        yield fault("head_dim", config.head_dim, odd_reason(config.head_dim), "hidden_size", "num_attention_heads")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        legal = nearest_divisor(heads, kv_heads)
        reason = f"must divide num_attention_heads = {heads}; the nearest legal value is {legal}"
        yield fault("num_key_value_heads", kv_heads, reason, "num_attention_heads")


def read_llama(fields: Fields) -> dict[str, Any]:
    """The arguments of LlamaConfig from a config.json; faults and warnings are recorded in `fields`."""
    values = read_shared(fields, MODEL_TYPES)
    theta, scaling = read_rope(fields, values["max_position_embeddings"], is_mla=False)
    values |= {"rope_theta": theta, "rope_scaling": scaling}
    heads = values["num_attention_heads"]
    values["head_dim"] = _read_head_dim(fields, values["hidden_size"], heads)
    is_qwen2 = values["model_type"] == "qwen2"
    # A Llama without the field has as many as query heads; Qwen2's class default (32) would be a guess.
    may_be_absent = not is_qwen2 or "num_key_value_heads" in fields.data
    values["num_key_value_heads"] = fields.integer("num_key_value_heads", default=heads if may_be_absent else None)
    if is_qwen2:
        fields.only("attention_bias", True, "qwen2 always has biases on q, k and v")
        fields.only("mlp_bias", False, "the MLP of qwen2 has no bias")
        values |= {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
    else:
        bias = fields.flag("attention_bias", default=False)
        values |= {"attention_bias": bias, "attention_out_bias": bias}
        values["mlp_bias"] = fields.flag("mlp_bias", default=False)
    _refuse_sliding_windows(fields, values["num_hidden_layers"], values["max_position_embeddings"], is_qwen2)
    return values


def _read_head_dim(fields: Fields, hidden_size: int, heads: int) -> int:
    if fields.raw("head_dim") is not None:
        return fields.integer("head_dim")
    if hidden_size % heads and not fields.has_faults("hidden_size", "num_attention_heads"):
        fields.fail("hidden_size", hidden_size, f"not a multiple of num_attention_heads = {heads}, and no head_dim")
    if hidden_size < heads or hidden_size % heads or fields.has_faults("hidden_size", "num_attention_heads"):
        return 2  # only a placeholder: a fault is on record
    return hidden_size // heads


def _refuse_sliding_windows(fields: Fields, layers: int, max_position_embeddings: int, is_qwen2: bool) -> None:
    """Every layer attends to everything. A window is refused where it would act: switched on, shorter than
    the longest text, and with layers above max_window_layers (the lower ones never have it)."""
    layer_types = fields.raw("layer_types")
    kinds = layer_types if isinstance(layer_types, list) else [] if layer_types is None else [layer_types]
    other = next((kind for kind in kinds if kind != "full_attention"), None)
    if other is not None:
        reason = f"{shown(other)} is not supported; the nearest legal choice is full_attention in every layer"
        fields.fail("layer_types", layer_types, reason)
    if not is_qwen2:
        return
    is_on = fields.flag("use_sliding_window", default=False)
    window = fields.integer("sliding_window", default=max_position_embeddings if not is_on else 4096, null=MAX_INTEGER)
    first = fields.integer("max_window_layers", minimum=0, default=28)
    if is_on and other is None and first < layers and window < max_position_embeddings:
        reason = (
            f"layers {first} to {layers - 1} would see only the last {window} tokens, which is refused; "
            f"set it to false and max_position_embeddings to {window}, up to where it makes no difference"
        )
        fields.fail("use_sliding_window", True, reason)
