"""AdamW as a pure function over leaves, the learning rate's schedule, and the bias rule that balances routers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mindspore as ms
from mindspore import Tensor, ops

from msds.errors import OptionError


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2); defaults of DeepSeek-V3, section 4.2.

    Decay applies to matrices only: norms, biases and gates' correction biases keep their size. max_grad_norm: the
    gradients' global norm is scaled down to it. bias_update_speed: gamma of auxiliary-loss-free balancing.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    bias_update_speed: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}: it must be at least 0 and below 1")
        for name in ("eps", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} is {getattr(self, name)}: it must be above 0")
        for name in ("weight_decay", "bias_update_speed"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} is {getattr(self, name)}: it must be at least 0")


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: linear warm-up, constant, then a half cosine down to `final` times the peak.

    decay_steps counts from the end: the last of `total_steps` has the lowest rate. OptionError for numbers that do not
    fit together.
    """

    peak: float
    total_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    final: float = 0.1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise OptionError(f"the learning rate is {self.peak}: it must be a number above 0")
        if min(self.warmup_steps, self.decay_steps) < 0 or self.warmup_steps + self.decay_steps > self.total_steps:
            raise OptionError(
                f"warmup_steps {self.warmup_steps} and decay_steps {self.decay_steps} do not fit into "
                f"{self.total_steps} steps: lower them or train longer"
            )
        if not 0 <= self.final <= 1:
            raise OptionError(f"final is {self.final}: it must be from 0 to 1")

    def rate(self, step: int) -> float:
        """The rate of step 0, 1, ... total_steps - 1."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        into_decay = step - (self.total_steps - self.decay_steps) + 1
        if into_decay <= 0:
            return self.peak
        share = min(1.0, into_decay / self.decay_steps)
        return self.peak * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * share)))


def clip_scale(grads: tuple[Tensor, ...], max_norm: Tensor) -> tuple[Tensor, Tensor]:
    """(factor that brings the global norm down to `max_norm` or leaves it, the norm), both scalars, float32."""
    total = ops.zeros((), ms.float32)
    for grad in grads:
        total = total + ops.square(grad).sum()
    norm = ops.sqrt(total)
    return ops.minimum(max_norm / (norm + 1e-6), ops.ones((), ms.float32)), norm


def adamw_leaf(
    settings: AdamW, leaf: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], control: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One leaf's step: (new leaf, new first moment, new second moment).

    control: rate, step (1 for the first) and weight_decay, float32 scalars; betas and eps are of `settings`.
    """
    first = settings.beta1 * moments[0] + (1 - settings.beta1) * grad
    second = settings.beta2 * moments[1] + (1 - settings.beta2) * ops.square(grad)
    corrected1 = first / (1 - ops.pow(Tensor(settings.beta1, ms.float32), control["step"]))
    corrected2 = second / (1 - ops.pow(Tensor(settings.beta2, ms.float32), control["step"]))
    update = corrected1 / (ops.sqrt(corrected2) + settings.eps)
    if leaf.ndim >= 2:
        update = update + control["weight_decay"] * leaf
    return leaf - control["rate"] * update, first, second


def updated_bias(bias: Tensor, counts: Tensor, speed: Tensor) -> Tensor:
    """e_score_correction_bias after a step: up for underloaded experts, down for overloaded ones, by `speed`.

    bias, counts [E] (Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, algorithm 1).
    """
    return bias + speed * ops.sign(counts.mean() - counts)
