"""Config of the dense families: Llama and Qwen2 (the R1-Distill models and everything of these types)."""

from dataclasses import dataclass

from msds.config.rope import RopeScaling


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
