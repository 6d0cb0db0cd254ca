"""Config of the DeepSeek-V2 and DeepSeek-V3 families: MLA attention, mixture of experts, MTP layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msds.config.fields import Fault, Fields, fault, raise_faults
from msds.config.rope import RopeScaling, read_rope
from msds.config.shared import SIZES, nearest_divisor, odd_reason, read_shared, shared_faults, size_faults

MODEL_TYPES = ("deepseek_v3", "deepseek_v2")
TOPK_METHODS = ("noaux_tc", "group_limited_greedy", "greedy")
SCORING_FUNCS = ("sigmoid", "softmax")
_HEAD_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


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
    """Multiplies the mixing weights of the routed experts: in deepseek_v3 always, after any normalisation; in
    deepseek_v2 only where they are not normalised (as the published code of each has it)."""
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
    """Whether the chosen experts' scores are normalised to sum 1, if there are several."""
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

    def __post_init__(self) -> None:
        raise_faults("DeepseekConfig", list(deepseek_faults(self)))

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


def deepseek_faults(config: DeepseekConfig) -> Iterator[Fault]:
    """What no single field shows: sizes that do not fit each other."""
    sizes = list(size_faults(config, (*SIZES, *_HEAD_SIZES, "n_group", "topk_group", "moe_layer_freq")))
    if sizes:
        yield from sizes
        return
    yield from shared_faults(config)
    yield from _choice_faults(config)
    if config.qk_rope_head_dim % 2:
        yield fault("qk_rope_head_dim", config.qk_rope_head_dim, odd_reason(config.qk_rope_head_dim))
    if config.n_routed_experts == 0:
        return
    if config.moe_intermediate_size < 1:
        yield fault("moe_intermediate_size", config.moe_intermediate_size, "experts need a width above 0")
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    if not 1 <= chosen <= experts:
        reason = f"must lie between 1 and n_routed_experts = {experts}"
        yield fault("num_experts_per_tok", chosen, reason, "n_routed_experts")
    elif config.topk_method != "greedy":
        yield from _group_faults(config)


def _choice_faults(config: DeepseekConfig) -> Iterator[Fault]:
    """For configs that were not read from a file."""
    choices = {"model_type": MODEL_TYPES, "topk_method": TOPK_METHODS, "scoring_func": SCORING_FUNCS}
    for name, legal in choices.items():
        if getattr(config, name) not in legal:
            yield fault(name, getattr(config, name), f"supported: {', '.join(legal)}")


def _group_faults(config: DeepseekConfig) -> Iterator[Fault]:
    """The three conditions under which a token finds its experts inside its groups."""
    experts, groups, chosen = config.n_routed_experts, config.n_group, config.num_experts_per_tok
    # noaux_tc adds up the two best of each group; one group needs no score.
    smallest = 2 if config.topk_method == "noaux_tc" and groups > 1 else 1
    nearest = nearest_divisor(experts, groups, smallest)
    if nearest != groups:
        hint = "choose topk_method greedy" if nearest is None else f"the nearest legal value is {nearest}"
        reason = f"must divide n_routed_experts = {experts} into groups of at least {smallest}; {hint}"
        yield fault("n_group", groups, reason, "n_routed_experts", "topk_method")
    elif config.topk_group > groups:
        reason = f"exceeds n_group = {groups}, the nearest legal value"
        yield fault("topk_group", config.topk_group, reason, "n_group")
    elif chosen > config.topk_group * (experts // groups):
        reachable = config.topk_group * (experts // groups)
        reason = f"topk_group = {config.topk_group} of n_group = {groups} groups hold {reachable} experts at most"
        others = ("topk_group", "n_group", "n_routed_experts")
        yield fault("num_experts_per_tok", chosen, f"{reason}, the nearest legal value", *others)


def read_deepseek(fields: Fields) -> dict[str, Any]:
    """The arguments of DeepseekConfig from a config.json; faults and warnings are recorded in `fields`."""
    values = read_shared(fields, MODEL_TYPES)
    theta, scaling = read_rope(fields, values["max_position_embeddings"], is_mla=True)
    values |= {"rope_theta": theta, "rope_scaling": scaling}
    for name in _HEAD_SIZES:
        values[name] = fields.integer(name)
    values["q_lora_rank"] = fields.optional_integer("q_lora_rank")
    values["attention_bias"] = fields.flag("attention_bias", default=False)
    values["num_nextn_predict_layers"] = fields.integer(
        "num_nextn_predict_layers", "num_mtp_layers", minimum=0, default=0
    )
    is_v3 = values["model_type"] == "deepseek_v3"
    if is_v3 and not fields.is_present("num_nextn_predict_layers", "num_mtp_layers"):
        fields.warn("num_nextn_predict_layers", "missing, taken as 0")  # transformers would take 1
    values |= _read_experts(fields, is_v3=is_v3)
    kv_heads = fields.integer("num_key_value_heads", default=values["num_attention_heads"])
    if kv_heads != values["num_attention_heads"] and not fields.has_faults("num_attention_heads"):
        reason = f"MLA has one key and value per head: num_attention_heads = {values['num_attention_heads']}"
        fields.fail("num_key_value_heads", kv_heads, reason)
    fields.only("rope_interleave", True, "DeepSeek checkpoints store rotary pairs interleaved")
    fields.only("mlp_bias", False, "the MLPs of this family have no bias")
    fields.skip(("head_dim", "qk_head_dim"))  # derived: transformers writes what it computed
    fields.skip(("ep_size", "aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef"))
    return values


def _read_experts(fields: Fields, *, is_v3: bool) -> dict[str, Any]:
    """The mixture of experts. Defaults only where they are the family's definition: V3's gate is sigmoid with
    noaux_tc and normalises, V2's is softmax, greedy and does not."""
    experts = fields.integer("n_routed_experts", "num_local_experts", "num_experts", minimum=0, null=0)
    method = fields.choice("topk_method", choices=TOPK_METHODS, default="noaux_tc" if is_v3 else "greedy")
    scoring = fields.choice("scoring_func", choices=SCORING_FUNCS, default="sigmoid" if is_v3 else "softmax")
    group_default = 1 if method == "greedy" or experts == 0 else None
    default, least = (0, 0) if experts == 0 else (None, 1)
    return {
        "n_routed_experts": experts,
        "topk_method": method,
        "scoring_func": scoring,
        "n_group": fields.integer("n_group", default=group_default),
        "topk_group": fields.integer("topk_group", default=group_default),
        "n_shared_experts": fields.integer("n_shared_experts", minimum=0, null=0, default=default),
        "moe_intermediate_size": fields.integer("moe_intermediate_size", minimum=least, default=default),
        "num_experts_per_tok": fields.integer("num_experts_per_tok", minimum=least, default=default),
        "first_k_dense_replace": fields.integer("first_k_dense_replace", minimum=0, default=default),
        "moe_layer_freq": fields.integer("moe_layer_freq", default=1),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=is_v3),
        "routed_scaling_factor": fields.number(
            "routed_scaling_factor", above=0.0, default=1.0 if experts == 0 or not is_v3 else None
        ),
    }
