"""The layouts of MindSpore training checkpoints against Hugging Face names: the whole table, one rule per line.

`{i}` is a layer, `{e}` an expert; a stored name without `{e}` for Hugging Face names with one is stacked over experts
along axis 0, as [E, ...] (`stack` 3) or flattened to [E * rows, columns] (2); both are read. MTP layers are
`model.layers.{num_hidden_layers + depth}` in Hugging Face's count.
Sources: MindFormers' converters for deepseek2, deepseek3 and llama, and the mappings of its mcore models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from msds.checkpoint import Skip
from msds.config import DeepseekConfig, ModelConfig
from msds.layouts.forms import (
    EXPERT,
    EXPERT_GATE_UP,
    EXPERT_T,
    GATE_UP,
    KV_B,
    KV_ROPE,
    KV_SPLIT,
    Q_ROPE,
    Q_SPLIT,
    QKV,
    SAME,
    Form,
)

LAYOUTS = {
    "mindformers": "attention.wq or l2q_nope_proj, feed_forward.w1: MindFormers 1.x, nothing fused",
    "mindformers-fused": "attention.w_qkv or l2q_proj, feed_forward.w_gate_hidden: MindFormers 1.x, fused",
    "mcore": "decoder.layers, self_attention.linear_qkv, mlp.linear_fc1, experts.weight1: MindFormers' mcore models",
}
"""The layouts that can be written, and by what names one knows them. Aliases beside them are read."""


@dataclass(frozen=True)
class Rule:
    """Hugging Face names made of stored names, and back. `layouts`: those that write it; none: an alias, only read."""

    hf: tuple[str, ...]
    stored: tuple[str, ...]
    form: Form = SAME
    layouts: frozenset[str] = frozenset()
    stack: int = 3
    family: str = ""

    def fits(self, config: ModelConfig) -> bool:
        """Whether the rule is for models of this config: with latent attention (D), with plain attention (L), any."""
        return self.family in ("", "D" if isinstance(config, DeepseekConfig) else "L")

    @property
    def is_stacked(self) -> bool:
        """Whether a stored tensor holds all experts."""
        return "{e}" in self.hf[0] and "{e}" not in self.stored[0]


_Line = tuple[str, str, str, Form]
"""Which layouts write it, Hugging Face names, stored names, form; names of a group are separated by spaces."""

# By letter: m mindformers, f mindformers-fused, c mcore, none of them: an alias that is read; D for DeepSeek alone,
# L for Llama and Qwen2 alone.
_LETTERS = {"m": "mindformers", "f": "mindformers-fused", "c": "mcore"}

_OUTER: tuple[_Line, ...] = (
    ("mf", "model.embed_tokens.weight", "model.tok_embeddings.embedding_weight", SAME),
    ("mf", "model.norm.weight", "model.norm_out.weight", SAME),
    ("mf", "lm_head.weight", "lm_head.weight", SAME),
    ("c", "model.embed_tokens.weight", "embedding.word_embeddings.weight", SAME),
    ("c", "model.norm.weight", "decoder.final_layernorm.weight", SAME),
    ("c", "lm_head.weight", "output_layer.weight", SAME),
)

_MINDFORMERS: tuple[_Line, ...] = (
    ("mf", "input_layernorm.weight", "attention_norm.weight", SAME),
    ("mf", "post_attention_layernorm.weight", "ffn_norm.weight", SAME),
    ("mL", "self_attn.q_proj.weight", "attention.wq.weight", SAME),
    ("mL", "self_attn.k_proj.weight", "attention.wk.weight", SAME),
    ("mL", "self_attn.v_proj.weight", "attention.wv.weight", SAME),
    (
        "fL",
        "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
        "attention.w_qkv.weight",
        QKV,
    ),
    ("mf", "self_attn.o_proj.weight", "attention.wo.weight", SAME),
    ("fD", "self_attn.q_proj.weight", "attention.q_proj.weight", Q_ROPE),
    ("mf", "self_attn.q_a_proj.weight", "attention.q2l_proj.weight", SAME),
    ("mf", "self_attn.q_a_layernorm.weight", "attention.lq_norm.weight", SAME),
    ("m", "self_attn.q_b_proj.weight", "attention.l2q_nope_proj.weight attention.l2q_pe_proj.weight", Q_SPLIT),
    ("f", "self_attn.q_b_proj.weight", "attention.l2q_proj.weight", Q_ROPE),
    (
        "m",
        "self_attn.kv_a_proj_with_mqa.weight",
        "attention.kv2l_latent_kv.weight attention.kv2l_k_pe.weight",
        KV_SPLIT,
    ),
    ("f", "self_attn.kv_a_proj_with_mqa.weight", "attention.kv2l.weight", KV_ROPE),
    ("mf", "self_attn.kv_a_layernorm.weight", "attention.lkv_norm.weight", SAME),
    ("m", "self_attn.kv_b_proj.weight", "attention.lkv2kv_k_nope.weight attention.lkv2kv_v.weight", KV_B),
    ("f", "self_attn.kv_b_proj.weight", "attention.lkv2kv.weight", SAME),
    ("m", "mlp.gate_proj.weight", "feed_forward.w1.weight", SAME),
    ("m", "mlp.up_proj.weight", "feed_forward.w3.weight", SAME),
    ("f", "mlp.gate_proj.weight mlp.up_proj.weight", "feed_forward.w_gate_hidden.weight", GATE_UP),
    ("mf", "mlp.down_proj.weight", "feed_forward.w2.weight", SAME),
    ("mf", "mlp.gate.weight", "feed_forward.routed_experts.router.dense.weight", SAME),
    ("mf", "mlp.gate.e_score_correction_bias", "feed_forward.routed_experts.router.router.topk_bias", SAME),
    ("", "mlp.gate.e_score_correction_bias", "feed_forward.routed_experts.router.e_score_correction_bias", SAME),
    ("", "mlp.gate.e_score_correction_bias", "feed_forward.routed_experts.topk_bias", SAME),
    ("mf", "mlp.experts.{e}.gate_proj.weight", "feed_forward.routed_experts.ffn.w1.weight", EXPERT),
    ("mf", "mlp.experts.{e}.up_proj.weight", "feed_forward.routed_experts.ffn.w3.weight", EXPERT),
    ("mf", "mlp.experts.{e}.down_proj.weight", "feed_forward.routed_experts.ffn.w2.weight", EXPERT),
    ("m", "mlp.shared_experts.gate_proj.weight", "feed_forward.shared_experts.w1.weight", SAME),
    ("m", "mlp.shared_experts.up_proj.weight", "feed_forward.shared_experts.w3.weight", SAME),
    (
        "f",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
        "feed_forward.shared_experts.w_gate_hidden.weight",
        GATE_UP,
    ),
    ("mf", "mlp.shared_experts.down_proj.weight", "feed_forward.shared_experts.w2.weight", SAME),
)

_MINDFORMERS_MTP: tuple[_Line, ...] = (
    ("mf", "enorm.weight", "norm_emb.weight", SAME),
    ("mf", "hnorm.weight", "norm.weight", SAME),
    ("mf", "eh_proj.weight", "dense.weight", SAME),
)

_MCORE: tuple[_Line, ...] = (
    ("c", "input_layernorm.weight", "input_layernorm.weight", SAME),
    ("c", "post_attention_layernorm.weight", "pre_mlp_layernorm.weight", SAME),
    (
        "cL",
        "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
        "self_attention.linear_qkv.weight",
        QKV,
    ),
    ("L", "self_attn.q_proj.weight", "self_attention.linear_q.weight", SAME),
    ("L", "self_attn.k_proj.weight", "self_attention.linear_k.weight", SAME),
    ("L", "self_attn.v_proj.weight", "self_attention.linear_v.weight", SAME),
    ("cD", "self_attn.q_proj.weight", "self_attention.linear_q_proj.weight", SAME),
    ("c", "self_attn.o_proj.weight", "self_attention.linear_proj.weight", SAME),
    ("c", "self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", SAME),
    ("c", "self_attn.q_a_layernorm.weight", "self_attention.q_layernorm.weight", SAME),
    ("c", "self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", SAME),
    ("c", "self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight", SAME),
    ("c", "self_attn.kv_a_layernorm.weight", "self_attention.kv_layernorm.weight", SAME),
    ("c", "self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight", SAME),
    ("c", "mlp.gate_proj.weight mlp.up_proj.weight", "mlp.linear_fc1.weight", GATE_UP),
    ("", "mlp.gate_proj.weight", "mlp.gating.weight", SAME),
    ("", "mlp.up_proj.weight", "mlp.hidden.weight", SAME),
    ("c", "mlp.down_proj.weight", "mlp.linear_fc2.weight", SAME),
    ("c", "mlp.gate.weight", "mlp.router.weight", SAME),
    ("c", "mlp.gate.e_score_correction_bias", "mlp.router.expert_bias", SAME),
    (
        "c",
        "mlp.experts.{e}.gate_proj.weight mlp.experts.{e}.up_proj.weight",
        "mlp.experts.weight1",
        EXPERT_GATE_UP,
    ),
    ("c", "mlp.experts.{e}.down_proj.weight", "mlp.experts.weight2", EXPERT_T),
    (
        "",
        "mlp.experts.{e}.gate_proj.weight mlp.experts.{e}.up_proj.weight",
        "mlp.experts.{e}.linear_fc1.weight",
        GATE_UP,
    ),
    ("", "mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.gating.weight", SAME),
    ("", "mlp.experts.{e}.up_proj.weight", "mlp.experts.{e}.hidden.weight", SAME),
    ("", "mlp.experts.{e}.down_proj.weight", "mlp.experts.{e}.linear_fc2.weight", SAME),
    (
        "c",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
        "mlp.shared_experts.linear_fc1.weight",
        GATE_UP,
    ),
    ("", "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.gating.weight", SAME),
    ("", "mlp.shared_experts.up_proj.weight", "mlp.shared_experts.hidden.weight", SAME),
    ("c", "mlp.shared_experts.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", SAME),
)

_MCORE_MTP: tuple[_Line, ...] = (
    ("c", "enorm.weight", "enorm.weight", SAME),
    ("c", "hnorm.weight", "hnorm.weight", SAME),
    ("c", "eh_proj.weight", "eh_proj.weight", SAME),
    ("c", "shared_head.norm.weight", "final_layernorm.weight", SAME),
)

_MAIN, _MTP = "model.layers.{i}.", "model.layers.{mtp}."
"""Hugging Face prefixes; `{mtp}`: the stored number counts MTP layers from 0."""

_TABLES = (
    ("", "", _OUTER),
    (_MAIN, "model.layers.{i}.", _MINDFORMERS),  # MTP layers too are counted behind the main ones
    (_MTP, "model.mtp_hidden_fusers.{mtp}.", _MINDFORMERS_MTP),
    (_MAIN, "decoder.layers.{i}.", _MCORE),
    (_MTP, "mtp.layers.{mtp}.transformer_layer.", _MCORE),
    (_MTP, "mtp.layers.{mtp}.", _MCORE_MTP),
)


def _rules() -> Iterator[Rule]:
    for hf_prefix, stored_prefix, lines in _TABLES:
        for letters, hf, stored, form in lines:
            hf_names = tuple(hf_prefix + name for name in hf.split())
            stored_names = tuple(stored_prefix + name for name in stored.split())
            layouts = frozenset(_LETTERS[letter] for letter in letters if letter in _LETTERS)
            stack, family = 2 if "c" in letters else 3, letters.strip("mfc")
            yield Rule(hf_names, stored_names, form, layouts, stack, family)
            names = hf_names + stored_names
            if hf_prefix and "{e}" not in hf and all(name.endswith(".weight") for name in names):
                biases = [
                    tuple(re.sub("weight$", "bias", name) for name in group) for group in (hf_names, stored_names)
                ]
                yield Rule(biases[0], biases[1], form, layouts, stack, family)


RULES = tuple(_rules())

SKIPPED = (
    Skip("adam_m.*", "a moment of the optimiser"),
    Skip("adam_v.*", "a moment of the optimiser"),
    Skip("exp_avg.*", "a moment of the optimiser"),
    Skip("exp_avg_sq.*", "a moment of the optimiser"),
    Skip("muon_m.*", "a moment of the optimiser"),
    Skip("moment1.*", "a moment of the optimiser"),
    Skip("moment2.*", "a moment of the optimiser"),
    Skip("moments.*", "a moment of the optimiser"),
    Skip("accu_grads.*", "accumulated gradients"),
    Skip("*.expert_load", "a count for balancing experts"),
    Skip("*.fi_accu", "a count for balancing experts"),
    Skip("*.max_logits_val", "a statistic of training"),
    *(
        Skip(name, "the state of a run")
        for name in (
            "epoch_num",
            "step_num",
            "global_step",
            "learning_rate",
            "beta1_power",
            "beta2_power",
            "loss_scale",
            "scale_sense",
            "current_iterator_step",
            "last_overflow_iterator_step",
            "random_op",
            "batch_size",
            "global_batch_size",
            "network",
            "optimizer",
            "ckpt_version",
        )
    ),
)
"""What a training checkpoint holds beside the weights."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Match:
    """A stored name: its rule, its place among the rule's stored names, and the numbers it has."""

    rule: Rule
    place: int
    numbers: dict[str, int]


def _template(name: str) -> str:
    return _PLACE.sub("#", name)


_BY_STORED = {_template(name): (rule, place) for rule in RULES for place, name in enumerate(rule.stored)}
_BY_HF: dict[str, list[tuple[Rule, str]]] = {}
for _rule in RULES:
    for _name in _rule.hf:
        _BY_HF.setdefault(_template(_name), []).append((_rule, _name))


def match_stored(name: str) -> Match | None:
    """The rule for a stored name, or None."""
    found = _BY_STORED.get(_NUMBER.sub("#", name))
    if found is None:
        return None
    rule, place = found
    keys = _PLACE.findall(rule.stored[place])
    return Match(rule, place, dict(zip(keys, map(int, _NUMBER.findall(name)), strict=True)))


def is_hf_name(name: str) -> bool:
    """Whether a name is one of Hugging Face's and of no training layout."""
    template = _NUMBER.sub("#", name)
    return template in _BY_HF and template not in _BY_STORED


def fill(name: str, numbers: dict[str, int], config: ModelConfig) -> str:
    """A Hugging Face name pattern with its numbers; MTP layers are counted behind the main ones."""
    values = dict(numbers)
    if "mtp" in values:
        values["mtp"] += config.num_hidden_layers
    return _PLACE.sub(lambda place: str(values[place[1]]), name)


def rule_for_hf(name: str, layout: str, config: ModelConfig) -> tuple[Rule, dict[str, int]] | None:
    """The rule that writes a Hugging Face tensor in a layout, and the numbers of its name; None: it has no place."""
    candidates = [
        (rule, pattern)
        for rule, pattern in _BY_HF.get(_NUMBER.sub("#", name), ())
        if layout in rule.layouts and rule.fits(config)
    ]
    numbers = list(map(int, _NUMBER.findall(name)))
    if not numbers:
        return (candidates[0][0], {}) if candidates else None
    is_mtp = numbers[0] >= config.num_hidden_layers
    # In a layout that has names of its own for MTP layers those come first.
    candidates.sort(key=lambda candidate: ("{mtp}" in candidate[1]) != is_mtp)
    for rule, pattern in candidates:
        values = dict(zip(_PLACE.findall(pattern), numbers, strict=True))
        if "mtp" in values:
            values["mtp"] -= config.num_hidden_layers
        if values.get("mtp", 0) >= 0:
            return rule, values
    return None


def experts_of(config: ModelConfig) -> int:
    """Routed experts, 0 for a model without."""
    return config.n_routed_experts if isinstance(config, DeepseekConfig) else 0


def known_layouts() -> str:
    """The layouts, for a refusal."""
    return "; ".join(f"{name}: {text}" for name, text in LAYOUTS.items())
