"""Estimated speeds of one plan, and published ones beside them."""

from __future__ import annotations

from dataclasses import dataclass

from msds.planning.anchors import Anchor, anchors_for
from msds.planning.cost import StepTime, decode_time, prefill_time, tokens_per_step
from msds.planning.memory import Ledger


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Estimates. prefill: tokens per second of all ranks, of prompts as long as `context`. single: tokens per second
    of a text alone. decode: the step with `texts` texts that each see `context` tokens. decode_total: tokens per
    second of all of them."""

    context: int
    texts: int
    prefill: float
    single: float
    decode: StepTime
    decode_total: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published figure and what the plan comes to under its limit, in tokens per second of one rank; estimate is
    None where no text meets the limit."""

    anchor: Anchor
    estimate: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.estimate is None else self.estimate / self.anchor.tokens_per_second


def estimate_speed(ledger: Ledger, texts: int) -> Speed:
    """Speeds with `texts` texts of the demand's length."""
    context = ledger.demand.max_model_len
    step = decode_time(ledger, texts, context)
    per_step = tokens_per_step(ledger.demand.mtp)
    return Speed(
        context=context,
        texts=texts,
        prefill=_prefill(ledger, context),
        single=per_step / decode_time(ledger, 1, context).seconds,
        decode=step,
        decode_total=texts * per_step / step.seconds,
    )


def compare(ledger: Ledger, speed: Speed, most_texts: int) -> tuple[Comparison, ...]:
    """Published figures for this model and hardware beside the estimates."""
    demand = ledger.demand
    found = []
    for anchor in anchors_for(demand.config, demand.mesh.hardware.kind):
        estimate: float | None
        if anchor.phase == "prefill":
            estimate = speed.prefill / demand.mesh.ranks
        elif anchor.phase == "single text":
            estimate = speed.single / demand.mesh.ranks
        else:
            assert anchor.limit is not None
            estimate = _under(ledger, anchor.limit, most_texts)
        found.append(Comparison(anchor=anchor, estimate=estimate))
    return tuple(found)


def _prefill(ledger: Ledger, context: int) -> float:
    """Tokens per second of all replicas, the chunks of a prompt seeing half of it on average."""
    chunk = min(ledger.demand.engine.prefill_chunk, context)
    step = prefill_time(ledger, max(chunk, context // 2))
    return ledger.plan.dp * chunk / step.seconds


def _under(ledger: Ledger, limit: float, most_texts: int) -> float | None:
    """Decode tokens per second and rank with as many texts as fit and keep the limit."""
    plan, context = ledger.plan, ledger.demand.max_model_len
    per_step = tokens_per_step(ledger.demand.mtp)
    low, high = 0, most_texts // plan.dp
    while low < high:
        middle = (low + high + 1) // 2
        if decode_time(ledger, middle * plan.dp, context).seconds / per_step <= limit:
            low = middle
        else:
            high = middle - 1
    if not low:
        return None
    texts = low * plan.dp
    return texts * per_step / decode_time(ledger, texts, context).seconds / plan.ranks
