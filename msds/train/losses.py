"""Losses over teacher-forced logits, for use inside a compiled training step.

S sequences, Q positions, V vocabulary, E experts, K experts per token. Every loss is a weighted sum over positions:
`weights` [S, Q] float32 says how much predicting the token at a position counts (0: not at all; prompts, padding), and
carries the normalisation, so that accumulating over micro-batches is adding. The first token of a text is predicted by
nothing and never counts.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from msds_ops.iota import iota


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p of each given token: [S, Q, V], [S, Q] int32 -> [S, Q] float32."""
    logprobs = ops.log_softmax(logits.astype(ms.float32), -1)
    return ops.gather_d(logprobs, -1, tokens.expand_dims(-1)).reshape(tokens.shape)


def shifted_cross_entropy(logits: Tensor, tokens: Tensor, weights: Tensor, shift: int) -> Tensor:
    """- sum of weights * log p(token), where position i predicts the token at i + shift -> scalar.

    shift 1 is next-token prediction; MTP depth k predicts with shift k + 2 (DeepSeek-V3, equation 24).
    """
    length = tokens.shape[1]
    if shift >= length:
        return ops.zeros((), ms.float32)
    logprobs = token_logprobs(logits[:, : length - shift], tokens[:, shift:])
    return -(logprobs * weights[:, shift:]).sum()


def balance_loss(scores: Tensor, topk_idx: Tensor, query_lens: Tensor, queries: int, shares: Tensor) -> Tensor:
    """Sequence-wise balance of one MoE layer (DeepSeek-V3, equations 17-20, without alpha), weighted by `shares` [S].

    scores [S * Q, E], topk_idx [S * Q, K], query_lens [S] -> scalar: for each text sum_i f_i P_i, where f_i is
    E / (K T) times the count of its tokens routed to expert i, and P_i the mean share of expert i in its scores. The
    counts are of the experts that were chosen, bias and groups included, where the paper ranks the plain scores: what
    is to be balanced is the load there really is. 1 is perfect balance.
    """
    experts, chosen = scores.shape[1], topk_idx.shape[1]
    is_real = (iota(queries).expand_dims(0) < query_lens.expand_dims(1)).astype(ms.float32).expand_dims(-1)  # [S, Q, 1]
    length = ops.maximum(query_lens, 1).astype(ms.float32).expand_dims(-1)  # a padding sequence has none
    affinity = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    affinity = (affinity.reshape(-1, queries, experts) * is_real).sum(1) / length  # [S, E]
    hits = expert_hits(topk_idx, experts).reshape(-1, queries, experts)
    loads = (hits * is_real).sum(1) * (experts / chosen) / length
    return ((ops.stop_gradient(loads) * affinity).sum(-1) * shares).sum()


def expert_hits(topk_idx: Tensor, experts: int) -> Tensor:
    """Which experts each token went to: [T, K] -> [T, E] float32 of zeros and ones."""
    hit = topk_idx.expand_dims(-1) == iota(experts).reshape(1, 1, -1)
    return hit.astype(ms.float32).sum(1)


def expert_counts(topk_idx: Tensor, query_lens: Tensor, queries: int, experts: int) -> Tensor:
    """Tokens per expert, padding left out: [S * Q, K] -> [E] float32."""
    is_real = (iota(queries).expand_dims(0) < query_lens.expand_dims(1)).astype(ms.float32).reshape(-1, 1)
    return (expert_hits(topk_idx, experts) * is_real).sum(0)


def distillation_loss(logits: Tensor, teacher_logits: Tensor, weights: Tensor, temperature: Tensor) -> Tensor:
    """Forward KL(teacher || student) of next-token distributions, times temperature^2 (Hinton et al. 2015) -> scalar.

    logits, teacher_logits [S, Q, V]: what position i says of the token at i + 1, which `weights` [S, Q] weighs.
    """
    length = logits.shape[1]
    teacher = ops.log_softmax(teacher_logits[:, : length - 1].astype(ms.float32) / temperature, -1)
    student = ops.log_softmax(logits[:, : length - 1].astype(ms.float32) / temperature, -1)
    divergence = (ops.exp(teacher) * (teacher - student)).sum(-1)
    return (divergence * weights[:, 1:]).sum() * ops.square(temperature)


def grpo_loss(logprobs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """GRPO's objective, negated (DeepSeekMath, equations 3 and 4; DeepSeek-R1, equation 1) -> scalar, parts.

    logprobs [S, Q - 1]: of token i + 1 at position i, by the policy. batch: weights [S, Q] (1 / (G |o|) on the tokens
    of an answer, over the number of prompts), advantages [S], old_logprobs and ref_logprobs [S, Q], where the entry of
    a token stands at its own position; clip_low, clip_high, kl_weight []. The ratio is clipped to [1 - clip_low,
    1 + clip_high]; the KL to the reference is the unbiased, never negative estimate of equation 4. Parts: kl, clipped
    (the share of weight that was clipped).
    """
    weights = batch["weights"][:, 1:]
    counts = (weights > 0).astype(ms.float32)
    advantages = batch["advantages"].expand_dims(1)
    # where nothing counts, stale numbers must not overflow: inf times a weight of 0 is NaN
    ratio = ops.exp((logprobs - batch["old_logprobs"][:, 1:]) * counts)
    clipped = ops.minimum(ops.maximum(ratio, 1.0 - batch["clip_low"]), 1.0 + batch["clip_high"])
    surrogate = ops.minimum(ratio * advantages, clipped * advantages)
    drift = (batch["ref_logprobs"][:, 1:] - logprobs) * counts
    divergence = ops.exp(drift) - drift - 1.0
    is_clipped = (clipped * advantages < ratio * advantages).astype(ms.float32)
    parts = {"kl": (divergence * weights).sum(), "clipped": (is_clipped * weights).sum()}
    return -((surrogate - batch["kl_weight"] * divergence) * weights).sum(), parts
