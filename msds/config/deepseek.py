"""Config of the DeepSeek-V2 and DeepSeek-V3 families: MLA attention, mixture of experts, MTP layers."""

from dataclasses import dataclass

from msds.config.rope import RopeScaling


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig:
    """Shape and mathematics of one DeepSeek model, with Hugging Face's field names. Sizes count elements."""

    model_type: str
    """"deepseek_v3" (V3, V3.1, R1) or "deepseek_v2" (V2, V2-Lite)."""
    vocab_size: int
    """Rows of the embedding and of the head; may exceed the tokenizer's vocabulary."""
    hidden_size: int
    """Width of the residual stream (D)."""
    intermediate_size: int
    """Inner width of the MLP of dense layers."""
    moe_intermediate_size: int
    """Inner width of a routed expert; the shared expert has n_shared_experts times this. 0 if no experts."""
    num_hidden_layers: int
    """Layers of the main model, dense and MoE, without MTP layers."""
    num_nextn_predict_layers: int
    """Multi-token-prediction layers stored after the main ones."""
    num_attention_heads: int
    """Heads (H)."""
    n_shared_experts: int
    """Experts that see every token, fused into one MLP; 0 for none (null in the file)."""
    n_routed_experts: int
    """Experts to choose from (E); 0 for a dense model (null in the file)."""
    routed_scaling_factor: float
    """Multiplies the mixing weights of the routed experts, after any normalisation."""
    kv_lora_rank: int
    """Width of the latent that keys and values expand from (L); MLA caches it and the rope part."""
    q_lora_rank: int | None
    """Width of the query's latent; None for a full-rank q_proj."""
    qk_rope_head_dim: int
    """Rotated part of a head's query and key (R), even; its key part is shared by all heads."""
    qk_nope_head_dim: int
    """Unrotated part of a head's query and key."""
    v_head_dim: int
    """Width of a head's value."""
    n_group: int
    """Groups the routed experts are divided into, in order; 1 for no groups."""
    topk_group: int
    """Groups a token may choose from."""
    num_experts_per_tok: int
    """Routed experts per token (K); 0 without experts."""
    first_k_dense_replace: int
    """The first so many layers are dense; 0 for none, num_hidden_layers or more for all."""
    moe_layer_freq: int
    """Of the layers after those, each whose index is a multiple of this is MoE, the others are dense."""
    norm_topk_prob: bool
    """Whether the chosen experts' scores are normalised to sum 1 before scaling."""
    scoring_func: str
    """"sigmoid" or "softmax": router logits to scores, in float32."""
    topk_method: str
    """"noaux_tc" (correction bias ranks; a group scores the sum of its two best), "group_limited_greedy"
    (a group scores its best) or "greedy" (no groups: n_group and topk_group are ignored)."""
    max_position_embeddings: int
    """Context length that the model is declared for, in tokens; see `max_context`."""
    rms_norm_eps: float
    """Epsilon of the layer and final norms; the two norms inside MLA use 1e-6 whatever this says."""
    hidden_act: str = "silu"
    """Activation of the gated MLPs."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies, None for none."""
    attention_bias: bool = False
    """Whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias (q_proj and the b projections never do)."""
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

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key: the unrotated and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        """MoE layers of the main model, without MTP layers."""
        return sum(self.is_moe_layer(layer) for layer in range(self.num_hidden_layers))

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer` has experts. MTP layers, counted from num_hidden_layers, have them whenever
        the model has any, whatever the rule for dense layers says (as transformers builds them)."""
        if layer >= self.num_hidden_layers:
            return self.n_routed_experts > 0
        behind_dense = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return self.n_routed_experts > 0 and behind_dense
