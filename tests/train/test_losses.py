"""Every loss and its gradient against torch, which has its own formulas for them, and GRPO against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from msds.train.grpo import group_advantages
from msds.train.losses import (
    balance_loss,
    distillation_loss,
    expert_counts,
    grpo_loss,
    shifted_cross_entropy,
    token_logprobs,
)
from msds_graphs.compile import compile
from msds_graphs.grad import value_and_grad

S, Q, V, E, K = 3, 6, 11, 8, 2
LENS = np.array([6, 4, 2], np.int32)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


LOGITS = draw(S, Q, V, scale=2.0)
TOKENS = np.random.default_rng(1).integers(0, V, (S, Q)).astype(np.int32)
WEIGHTS = np.where(np.arange(Q) < LENS[:, None], np.random.default_rng(2).random((S, Q)), 0).astype(np.float32)
WEIGHTS[:, 0] = 5.0  # the first token is predicted by nothing: this must not count


def value_and_gradient(fn: Any, x: Any, **batch: Any) -> tuple[float, Any]:
    """fn(x, batch) and its gradient by the compiled graph."""
    loss_and_grad = value_and_grad(fn)

    def step(bound, donated, given):  # type: ignore[no-untyped-def]
        value, grad = loss_and_grad(given["x"], given)
        return {"value": value, "grad": grad}, donated

    arrays = {"x": x, **batch}
    out = compile(step, bound=(), batch=arrays)(arrays)
    return float(out["value"]), out["grad"]


def torch_value_and_gradient(fn: Any, x: Any) -> tuple[float, Any]:
    tensor = torch.tensor(x, requires_grad=True)
    value = fn(tensor)
    value.backward()
    return float(value.detach()), tensor.grad.numpy()


def agree(ours: tuple[float, Any], theirs: tuple[float, Any]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=2e-5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=2e-6)
    assert np.abs(theirs[1]).max() > 1e-3


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_cross_entropy_of_a_later_token(shift: int) -> None:
    def ours(x: Any, batch: Any) -> Any:
        return shifted_cross_entropy(x, batch["tokens"], batch["weights"], shift)

    def theirs(x: Any) -> Any:
        losses = torch.nn.functional.cross_entropy(
            x[:, :-shift].reshape(-1, V), torch.tensor(TOKENS[:, shift:]).long().reshape(-1), reduction="none"
        )
        return (losses * torch.tensor(WEIGHTS[:, shift:]).reshape(-1)).sum()

    agree(value_and_gradient(ours, LOGITS, tokens=TOKENS, weights=WEIGHTS), torch_value_and_gradient(theirs, LOGITS))


def test_a_text_shorter_than_the_shift_has_no_loss() -> None:
    def ours(x: Any, batch: Any) -> Any:
        return shifted_cross_entropy(x, batch["tokens"], batch["weights"], 6) + 0 * x.sum()

    assert value_and_gradient(ours, LOGITS, tokens=TOKENS, weights=WEIGHTS)[0] == 0


def test_distillation() -> None:
    teacher = draw(S, Q, V, seed=4, scale=2.0)

    def ours(x: Any, batch: Any) -> Any:
        return distillation_loss(x, batch["teacher"], batch["weights"], batch["temperature"])

    def theirs(x: Any) -> Any:
        student = torch.log_softmax(x[:, :-1] / 2, -1)
        target = torch.softmax(torch.tensor(teacher)[:, :-1] / 2, -1)
        kl = torch.nn.functional.kl_div(student, target, reduction="none").sum(-1)
        return (kl * torch.tensor(WEIGHTS[:, 1:])).sum() * 4

    agree(
        value_and_gradient(ours, LOGITS, teacher=teacher, weights=WEIGHTS, temperature=TWO),
        torch_value_and_gradient(theirs, LOGITS),
    )
    same = value_and_gradient(ours, teacher, teacher=teacher, weights=WEIGHTS, temperature=TWO)
    assert same[0] == pytest.approx(0, abs=1e-5)


TWO = np.asarray(2.0, np.float32)

SCORES = np.random.default_rng(6).random((S * Q, E)).astype(np.float32)
CHOSEN = np.random.default_rng(7).permuted(np.tile(np.arange(E), (S * Q, 1)), axis=1)[:, :K].astype(np.int32)


def test_sequence_wise_balance() -> None:
    share = np.array([0.5, 0.3, 0.2], np.float32)

    def ours(x: Any, batch: Any) -> Any:
        return balance_loss(x, batch["chosen"], batch["lens"], Q, batch["share"])

    def theirs(x: Any) -> Any:
        """Equations 17 to 20 of DeepSeek-V3, text by text and expert by expert."""
        total = torch.zeros(())
        for text in range(S):
            rows = x[text * Q : text * Q + int(LENS[text])]
            normalised = rows / rows.sum(-1, keepdim=True)
            for expert in range(E):
                hits = (CHOSEN[text * Q : text * Q + LENS[text]] == expert).sum()
                f = E / (K * int(LENS[text])) * float(hits)
                total = total + float(share[text]) * f * normalised[:, expert].mean()
        return total

    agree(
        value_and_gradient(ours, SCORES, chosen=CHOSEN, lens=LENS, share=share),
        torch_value_and_gradient(theirs, SCORES),
    )


def test_expert_counts_leave_padding_out() -> None:
    def step(bound: Any, donated: Any, batch: Any) -> Any:
        return {"counts": expert_counts(batch["chosen"], batch["lens"], Q, E)}, donated

    batch = {"chosen": CHOSEN, "lens": LENS}
    real = np.concatenate([CHOSEN[text * Q : text * Q + LENS[text]] for text in range(S)])
    want = np.bincount(real.reshape(-1), minlength=E)
    assert compile(step, bound=(), batch=batch)(batch)["counts"].tolist() == want.tolist()


# --- GRPO ----------------------------------------------------------------------------------------------------------

ADVANTAGES = np.array([1.2, -0.7, 0.4], np.float32)
GRPO_WEIGHTS = np.where((np.arange(Q) >= 2) & (np.arange(Q) < LENS[:, None]), 0.1, 0.0).astype(np.float32)
GRPO_WEIGHTS[2, 1] = 0.2


def numpy_grpo(logits: Any, old: Any, ref: Any) -> tuple[float, float, float]:
    """DeepSeekMath's objective, negated, token by token in float64; with it the KL and the clipped weight."""
    total = kl_total = clipped_total = 0.0
    for s in range(S):
        for q in range(1, Q):
            weight = float(GRPO_WEIGHTS[s, q])
            row = logits[s, q - 1].astype(np.float64)
            logprob = row[TOKENS[s, q]] - np.log(np.exp(row - row.max()).sum()) - row.max()
            ratio = np.exp(logprob - old[s, q])
            bounded = min(max(ratio, 1 - 0.2), 1 + 0.3)
            gain = min(ratio * ADVANTAGES[s], bounded * ADVANTAGES[s])
            kl = np.exp(ref[s, q] - logprob) - (ref[s, q] - logprob) - 1
            total -= weight * (gain - 0.05 * kl)
            kl_total += weight * kl
            clipped_total += weight * (bounded * ADVANTAGES[s] < ratio * ADVANTAGES[s])
    return total, kl_total, clipped_total


def test_grpo_against_numpy_and_finite_differences() -> None:
    old = draw(S, Q, seed=8, scale=0.4) - 2.5
    ref = draw(S, Q, seed=9, scale=0.4) - 2.5
    stale = GRPO_WEIGHTS == 0
    old[stale] = 3e4  # what does not count may hold anything

    def ours(x: Any, batch: Any) -> Any:
        return grpo_loss(token_logprobs(x[:, :-1], batch["tokens"][:, 1:]), batch)[0]

    value, grad = value_and_gradient(
        ours,
        LOGITS,
        tokens=TOKENS,
        weights=GRPO_WEIGHTS,
        advantages=ADVANTAGES,
        old_logprobs=old,
        ref_logprobs=ref,
        clip_low=np.asarray(0.2, np.float32),
        clip_high=np.asarray(0.3, np.float32),
        kl_weight=np.asarray(0.05, np.float32),
    )
    want, kl, clipped = numpy_grpo(LOGITS, old, ref)
    assert value == pytest.approx(want, rel=1e-4)
    assert kl > 0.1
    assert 0 < clipped < GRPO_WEIGHTS[:, 1:].sum()
    for index in [(0, 1, 3), (0, 4, 0), (1, 2, 7), (2, 0, 5), (0, 2, int(TOKENS[0, 3]))]:
        ahead, behind = LOGITS.astype(np.float64), LOGITS.astype(np.float64)
        ahead[index] += 1e-5
        behind[index] -= 1e-5
        slope = (numpy_grpo(ahead, old, ref)[0] - numpy_grpo(behind, old, ref)[0]) / 2e-5
        assert grad[index] == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_advantages_are_relative_to_the_group() -> None:
    advantages = group_advantages(np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 2]]))
    np.testing.assert_allclose(advantages[0], [1, -1, -1, 1])
    assert advantages[1].tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(advantages[2], (np.array([0, 0, 0, 2]) - 0.5) / np.std([0, 0, 0, 2]), rtol=1e-6)
