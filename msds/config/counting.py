"""Parameters of a model by arithmetic on its config, before any array or file exists."""

from dataclasses import dataclass

from msds.config.deepseek import DeepseekConfig
from msds.config.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Numbers of scalar parameters. A tied head counts once, as the embedding."""

    total: int
    """Main model: embedding, layers with all experts, norms, head, routing biases; without MTP layers."""
    active: int
    """What one token passes through in the main model: of the routed experts only the chosen ones, all of the
    head (the embedding's matrix where the two are tied), and of an untied embedding nothing but its row."""
    embedding: int
    """The embedding table, part of `total`."""
    mtp: int
    """All MTP layers, without the copies of embedding and head that published files store beside each."""


def count_parameters(config: DeepseekConfig | LlamaConfig) -> ParameterCount:
    """Count the parameters of the weights tree that `config` describes."""
    embedding = config.vocab_size * config.hidden_size
    ends = config.hidden_size + (0 if config.tie_word_embeddings else embedding)  # final norm and head
    if isinstance(config, LlamaConfig):
        total = embedding + ends + config.num_hidden_layers * _llama_layer(config)
        active = total if config.tie_word_embeddings else total - embedding + config.hidden_size
        return ParameterCount(total=total, active=active, embedding=embedding, mtp=0)
    moe_layers, width = config.num_moe_layers, config.hidden_size
    dense = _deepseek_layer(config, _mlp(config, config.intermediate_size))
    moe = _deepseek_layer(config, _experts(config, config.n_routed_experts))
    chosen = _deepseek_layer(config, _experts(config, config.num_experts_per_tok))
    shared = ends + (config.num_hidden_layers - moe_layers) * dense
    mtp_layer = (moe if config.n_routed_experts else dense) + 2 * width**2 + 3 * width  # eh_proj, three norms
    return ParameterCount(
        total=embedding + shared + moe_layers * moe,
        active=(embedding if config.tie_word_embeddings else width) + shared + moe_layers * chosen,
        embedding=embedding,
        mtp=config.num_nextn_predict_layers * mtp_layer,
    )


def _llama_layer(config: LlamaConfig) -> int:
    """Two norms, attention and MLP, with the biases that the config has."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = width * (queries + 2 * keys) + queries * width
    attention += (queries + 2 * keys if config.attention_bias else 0) + (width if config.attention_out_bias else 0)
    return 2 * width + attention + 3 * width * inner + (2 * inner + width if config.mlp_bias else 0)


def _deepseek_layer(config: DeepseekConfig, mlp: int) -> int:
    """Two norms, MLA and the MLP or experts counted by the caller."""
    width, heads = config.hidden_size, config.num_attention_heads
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    keys = width * latent + config.kv_lora_rank * (1 + heads * (config.qk_nope_head_dim + config.v_head_dim))
    output = heads * config.v_head_dim * width
    biases = latent + width + (config.q_lora_rank or 0) if config.attention_bias else 0
    queries = heads * config.qk_head_dim
    if config.q_lora_rank is None:
        queries *= width
    else:
        queries = config.q_lora_rank * (width + 1 + queries)
    return 2 * width + queries + keys + output + biases + mlp


def _mlp(config: DeepseekConfig, inner: int) -> int:
    return 3 * config.hidden_size * inner


def _experts(config: DeepseekConfig, routed: int) -> int:
    """Router, `routed` routed experts and the shared ones."""
    experts = _mlp(config, config.moe_intermediate_size * (routed + config.n_shared_experts))
    bias = config.n_routed_experts if config.topk_method == "noaux_tc" else 0
    return config.n_routed_experts * config.hidden_size + bias + experts
