"""Which mesh axis cuts which logical axis of a model's trees: the one table that all sharding follows."""

from collections.abc import Iterator

from msds.config import DeepseekConfig, ModelConfig
from msds_graphs.errors import GraphError
from msds_graphs.sharding import Rules, ShardPlan

AXES: dict[str, str | None] = {
    "vocab": "tp",  # embedding and head by rows; the table is padded to equal parts
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",  # dense and shared MLPs: gate and up by rows, down by columns
    "experts": "ep",
    "expert_mlp": "ep_rest",
    "router": None,  # every rank scores every expert
    "embed": None,
    "q_lora": None,  # latents are whole on every rank, so that one norm sees all of them
    "kv_lora": None,  # and with them the cache of MLA
    "slots": None,  # a replica's cache is its own
}
HINTS = {
    "heads": "number of heads",
    "kv_heads": "number of key/value heads",
    "experts": "number of experts",
    "expert_mlp": "expert width",
    "mlp": "MLP width",
}


def sharding_rules(config: ModelConfig) -> Rules:
    """The rules for the trees of `config`: its spec, the derived one, its cache."""
    units = {"heads": config.num_attention_heads}
    is_twice = config.tie_word_embeddings
    if isinstance(config, DeepseekConfig):
        is_twice = is_twice or config.num_nextn_predict_layers > 0  # MTP embeds tokens where the last layer is
    else:
        units["kv_heads"] = config.num_key_value_heads
    places = {
        "embed_tokens": "ends" if is_twice else "first",
        "layers": "spread",
        "norm": "last",
        "lm_head": "last",
        "mtp": "last",
    }
    return Rules(axes=AXES, places=places, units=units, padded=frozenset({"vocab"}), hints=HINTS)


def is_executed(plan: ShardPlan) -> bool:
    """Whether the model functions run the plan: pipeline stages can be planned only."""
    return plan.pp == 1


def check_plan(config: ModelConfig, plan: ShardPlan) -> None:
    """GraphError with all reasons why a plan cannot cut this model; sizes first, so no array is looked at."""
    faults = list(_faults(config, plan))
    if faults:
        raise GraphError("; ".join(faults))


def _faults(config: ModelConfig, plan: ShardPlan) -> Iterator[str]:
    counts = [("number of heads", config.num_attention_heads, "tp", plan.tp)]
    rest = plan.stage_ranks // plan.ep
    experts = config.n_routed_experts if isinstance(config, DeepseekConfig) else 0
    if not isinstance(config, DeepseekConfig):
        counts.append(("number of key/value heads", config.num_key_value_heads, "tp", plan.tp))
    has_dense = True
    if isinstance(config, DeepseekConfig) and experts:
        has_dense = config.num_moe_layers < config.num_hidden_layers
        counts += [
            ("number of experts", experts, "ep", plan.ep),
            ("expert width", config.moe_intermediate_size, "dp * tp / ep", rest),
        ]
        if config.n_shared_experts:
            width = config.n_shared_experts * config.moe_intermediate_size
            counts.append(("width of the shared experts", width, "tp", plan.tp))
    if has_dense:
        counts.append(("MLP width", config.intermediate_size, "tp", plan.tp))
    for what, count, axis, parts in counts:
        if count % parts:
            yield f"{what} {count} cannot be cut by {axis} = {parts}: the nearest legal {_nearest(count, parts)}"
    if not experts and plan.ep > 1:
        yield f"ep is {plan.ep}, but the model has no experts: the legal ep is 1"
    if isinstance(config, DeepseekConfig) and experts and config.topk_method != "greedy":
        groups = config.n_group
        if groups % plan.ep and plan.ep % groups:
            yield (
                f"ep = {plan.ep} cuts the {groups} groups of experts unevenly: the nearest legal are "
                f"{_nearest_fit(groups, plan.ep)}"
            )
    if plan.pp > config.num_hidden_layers:
        yield f"pp is {plan.pp}: {config.num_hidden_layers} layers make at most {config.num_hidden_layers} stages"


def _nearest(count: int, parts: int) -> str:
    """The divisors of `count` around `parts`."""
    below = next(n for n in range(min(parts, count), 0, -1) if count % n == 0)
    above = next((n for n in range(parts, count + 1) if count % n == 0), None)
    return f"is {below}" if above is None else f"are {below} and {above}"


def _nearest_fit(groups: int, ep: int) -> str:
    """Around `ep`, the numbers that divide the groups or are multiples of them."""
    below = next(n for n in range(ep, 0, -1) if groups % n == 0 or n % groups == 0)
    above = next(n for n in range(ep, ep + groups + 1) if groups % n == 0 or n % groups == 0)
    return f"{below} and {above}"
