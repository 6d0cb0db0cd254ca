"""What a training step minimises: pure functions `objective(params, batch, config, plan) -> (loss, parts)`.

parts: named scalars for the log, and "counts", tokens per expert of each MoE layer, [E] each, for the bias rule. Each
objective says which arrays its batch has beside tokens, positions [S, Q], query_lens [S] and weights [S, Q]. Its
numbers enter the graph as scalars of the batch: a run may change them (DeepSeek-V3 lowers lambda late) without
compiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mindspore as ms
from mindspore import Tensor, ops

from msds.config import ModelConfig
from msds.errors import OptionError
from msds.models import model_functions
from msds.train.losses import (
    balance_loss,
    distillation_loss,
    expert_counts,
    grpo_loss,
    shifted_cross_entropy,
    token_logprobs,
)
from msds_graphs.plan import Plan
from msds_graphs.specs import ArraySpec

Objective = Any
"""Callable[[params, batch, config, plan], tuple[Tensor, dict]], parsed by MindSpore."""


class ObjectiveSettings(Protocol):
    """Settings of an objective, a dataclass of numbers: they make the function, and name the arrays of its batch."""

    def extra_batch(self, config: ModelConfig) -> dict[str, ArraySpec]:
        """Arrays beside the common ones."""

    def make(self, config: ModelConfig) -> Objective:
        """The objective for models of this family."""


@dataclass(frozen=True)
class NextToken:
    """Next-token prediction with the MTP and balance losses (DeepSeek-V3, sections 2.1.2, 2.2 and 4.2).

    mtp_weight: lambda, on the mean of the depths' losses; balance_weight: alpha, per MoE layer, on the mean over
    sequences.
    """

    mtp_weight: float = 0.3
    balance_weight: float = 1e-4

    def __post_init__(self) -> None:
        _check_not_negative(self, "mtp_weight", "balance_weight")

    def extra_batch(self, config: ModelConfig) -> dict[str, ArraySpec]:
        """sequence_share [S]: 1 / sequences of the whole step, 0 for padding."""
        return {"sequence_share": ArraySpec(("S",), "float32")}

    def make(self, config: ModelConfig) -> Objective:
        """loss = cross entropy + mtp_weight * mtp + balance_weight * balance."""
        forward_train = model_functions(config).forward_train

        def objective(params, batch, config, plan):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            out = forward_train(params, batch, config, plan)
            cross_entropy = shifted_cross_entropy(out["logits"], batch["tokens"], batch["weights"], 1)
            loss, parts = auxiliary(out, batch)
            parts["cross_entropy"] = cross_entropy
            return cross_entropy + loss, parts

        return objective


@dataclass(frozen=True)
class Distillation:
    """Learning a teacher's next-token distributions: KL to its logits, and `hard_weight` times the cross entropy."""

    temperature: float = 1.0
    hard_weight: float = 0.0
    mtp_weight: float = 0.3
    balance_weight: float = 1e-4

    def __post_init__(self) -> None:
        _check_not_negative(self, "hard_weight", "mtp_weight", "balance_weight")
        if not self.temperature > 0:
            raise OptionError(f"temperature is {self.temperature}: distillation needs one above 0")

    def extra_batch(self, config: ModelConfig) -> dict[str, ArraySpec]:
        """teacher_logits [S, Q, vocab] beside what NextToken has."""
        logits = ArraySpec(("S", "Q", config.vocab_size), "float32")
        return NextToken().extra_batch(config) | {"teacher_logits": logits}

    def make(self, config: ModelConfig) -> Objective:
        """loss = KL + hard_weight * cross entropy + mtp_weight * mtp + balance_weight * balance."""
        forward_train = model_functions(config).forward_train

        def objective(params, batch, config, plan):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            out = forward_train(params, batch, config, plan)
            kl = distillation_loss(out["logits"], batch["teacher_logits"], batch["weights"], batch["temperature"])
            cross_entropy = shifted_cross_entropy(out["logits"], batch["tokens"], batch["weights"], 1)
            loss, parts = auxiliary(out, batch)
            parts["cross_entropy"] = cross_entropy
            parts["kl"] = kl
            return kl + batch["hard_weight"] * cross_entropy + loss, parts

        return objective


@dataclass(frozen=True)
class Grpo:
    """Group-relative policy optimisation (see `grpo_loss`); MTP modules learn the sampled answers beside it."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.01
    mtp_weight: float = 0.0
    balance_weight: float = 1e-4

    def __post_init__(self) -> None:
        _check_not_negative(self, "clip_low", "clip_high", "kl_weight", "mtp_weight", "balance_weight")

    def extra_batch(self, config: ModelConfig) -> dict[str, ArraySpec]:
        """advantages [S], old_logprobs and ref_logprobs [S, Q] beside what NextToken has."""
        per_token = ArraySpec(("S", "Q"), "float32")
        return NextToken().extra_batch(config) | {
            "advantages": ArraySpec(("S",), "float32"),
            "old_logprobs": per_token,
            "ref_logprobs": per_token,
        }

    def make(self, config: ModelConfig) -> Objective:
        """loss = GRPO + mtp_weight * mtp + balance_weight * balance."""
        forward_train = model_functions(config).forward_train

        def objective(params, batch, config, plan):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            out = forward_train(params, batch, config, plan)
            length = batch["tokens"].shape[1]
            logprobs = token_logprobs(out["logits"][:, : length - 1], batch["tokens"][:, 1:])
            policy_loss, policy_parts = grpo_loss(logprobs, batch)
            loss, parts = auxiliary(out, batch)
            parts["kl"] = policy_parts["kl"]
            parts["clipped"] = policy_parts["clipped"]
            return policy_loss + loss, parts

        return objective


def auxiliary(out: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """The weighted MTP and balance losses; parts: mtp (mean over depths), balance (mean over layers), counts."""
    queries = batch["tokens"].shape[1]
    zero = ops.zeros((), ms.float32)
    loss, mtp, balance = zero, zero, zero
    counts: tuple[Tensor, ...] = ()
    depths, layers = len(out["mtp_logits"]), len(out["routing"])
    for depth in range(depths):
        mtp = mtp + shifted_cross_entropy(out["mtp_logits"][depth], batch["tokens"], batch["weights"], depth + 2)
    for routed in out["routing"]:
        scores, topk_idx = routed["scores"], routed["topk_idx"]
        per_layer = balance_loss(scores, topk_idx, batch["query_lens"], queries, batch["sequence_share"])
        balance = balance + per_layer
        counts = (*counts, expert_counts(topk_idx, batch["query_lens"], queries, scores.shape[1]))
    if depths > 0:
        loss = loss + batch["mtp_weight"] / depths * mtp
    if layers > 0:
        loss = loss + batch["balance_weight"] * balance
    return loss, {"mtp": mtp / max(depths, 1), "balance": balance / max(layers, 1), "counts": counts}


def plain_logprobs(config: ModelConfig, plan: Plan) -> Objective:
    """The function that gives log-probabilities of a batch's own tokens by `forward`: [S, Q], 0 for the first token."""
    forward = model_functions(config).forward

    def step(params, state, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        tokens = batch["tokens"]
        logits = forward(params, batch, config, plan)["logits"]
        logprobs = token_logprobs(logits[:, : tokens.shape[1] - 1], tokens[:, 1:])
        return {"logprobs": ops.concat((ops.zeros((tokens.shape[0], 1), ms.float32), logprobs), 1)}, state

    return step


def _check_not_negative(settings: Any, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) >= 0:
            raise OptionError(f"{name} is {getattr(settings, name)}: it must be at least 0")
