"""A plan as data, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msds.models.specs.rules import is_executed
from msds.planning.cost import StepTime
from msds.planning.demand import Demand
from msds.planning.memory import PARTS, RankMemory
from msds.planning.remedies import MOST_SUGGESTED_RANKS, Remedy
from msds.planning.search import Candidate
from msds.planning.speed import Comparison, Speed
from msds.planning.units import Unit, unit_of
from msds_graphs.sharding import ShardPlan

SHOWN = 8
"""Other plans that the text shows; JSON has all."""
_BAR = 30


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What `msds plan` says. memory: of the fullest rank. total_bytes: name -> bytes of all ranks together.

    most_texts: texts of full length that fit together. longest_text: tokens, with one text per replica.
    """

    demand: Demand
    plan: ShardPlan
    memory: RankMemory
    total_bytes: dict[str, int]
    most_texts: int
    longest_text: int
    speed: Speed
    comparisons: tuple[Comparison, ...]
    others: tuple[Candidate, ...]
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def _unit(self) -> Unit:
        """In which weights are at least 1, so that no part of them vanishes."""
        return unit_of(self.memory.weight_bytes)

    def to_json(self) -> dict[str, Any]:
        """JSON types. Bytes are integers, of the fullest rank unless said otherwise; seconds and tokens per second are
        estimates.

        model, mesh, plan {dp, tp, ep, pp}, dtype, quant, max_model_len, mtp, eplb_step_interval,
        num_redundant_experts; concurrency: texts of full length planned for, null if none was asked for; fits
        memory: bytes of the fullest rank: weights {part: bytes}, weights_total, cache, block (one cache block), blocks,
            activations, graphs_and_workspace (on a CPU with the process itself), communication, needed, budget,
            capacity, stage (its pipeline stage)
        total: bytes of all ranks: weights, cache
        capacity: texts (of full length, together), longest_text (tokens, one text per replica)
        estimates: context, texts, prefill_tokens_per_second, single_text_tokens_per_second, decode_tokens_per_second,
            decode_seconds (a step), decode_causes {memory or operations, links, launching}
        published: [{tokens_per_second_per_rank, limit_seconds, phase, conditions, source, estimate, ratio}]
        others: [{plan, status: fits | too large | illegal, reason, needed, decode_seconds}], best first; [] if a plan
            was given
        remedies: [{change, plan, needed, budget, fits, executed}]; notes: [text]; is_estimate: true
        """
        demand, memory, speed = self.demand, self.memory, self.speed
        return {
            "model": demand.model,
            "mesh": str(demand.mesh),
            "plan": self.plan.to_json(),
            "dtype": demand.dtype,
            "quant": demand.quant,
            "max_model_len": demand.max_model_len,
            "concurrency": demand.concurrency,
            "mtp": demand.mtp,
            "eplb_step_interval": demand.engine.eplb_step_interval,
            "num_redundant_experts": demand.engine.num_redundant_experts,
            "fits": self.fits,
            "memory": _memory_json(memory, demand.memory_bytes),
            "total": self.total_bytes,
            "capacity": {"texts": self.most_texts, "longest_text": self.longest_text},
            "estimates": {
                "context": speed.context,
                "texts": speed.texts,
                "prefill_tokens_per_second": speed.prefill,
                "single_text_tokens_per_second": speed.single,
                "decode_tokens_per_second": speed.decode_total,
                "decode_seconds": speed.decode.seconds,
                "decode_causes": speed.decode.causes,
            },
            "published": [_comparison_json(item) for item in self.comparisons],
            "others": [_candidate_json(item) for item in self.others],
            "remedies": [
                {key: getattr(item, key) for key in ("change", "plan", "needed", "budget", "fits", "executed")}
                for item in self.remedies
            ],
            "notes": list(self.notes),
            "is_estimate": True,
        }

    def render(self) -> str:
        """The report as lines of text for a terminal, without a final line break."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        demand, memory = self.demand, self.memory
        scheme = demand.dtype if demand.quant == "none" else f"{demand.dtype}, {demand.quant}"
        yield f"{demand.model} on {demand.mesh}, {scheme}, texts of {demand.max_model_len:,} tokens: an estimate"
        yield ""
        verdict = "fits" if self.fits else "DOES NOT FIT"
        if self.fits and not is_executed(self.plan):
            verdict += ", but is planned only, not executed"
        unit, name = self._unit, self.demand.mesh.hardware.rank_name
        has = unit.number(memory.budget) + (
            "" if self.fits else f": short of {unit.number(memory.needed - memory.budget)}"
        )
        yield f"{verdict}: plan {self.plan} needs {unit.text(memory.needed)} per {name}, has {has}"
        yield from self._remedy_lines(unit, name)
        yield ""
        yield from self._memory_lines(unit, name)
        yield ""
        yield from self._speed_lines(name)
        if self.others:
            yield ""
            yield from self._other_lines(unit)
        yield ""
        yield from (f"- {note}" for note in self.notes)

    def _remedy_lines(self, unit: Unit, name: str) -> Iterator[str]:
        width = max((len(remedy.change) for remedy in self.remedies), default=0)
        for remedy in self.remedies:
            if not remedy.is_option:
                ranks, share = self.demand.mesh.ranks, self.demand.memory_fraction
                of = (f"{ranks} x " if ranks > 1 else "") + unit.text(remedy.needed)
                yield f"  or {remedy.change} on this machine: {of} are {share:.0%} of it (plan {remedy.plan})"
                continue
            end = "" if remedy.executed else ": planned only, not executed"
            end = end if remedy.fits else ": not enough"
            need = f"would need {unit.number(remedy.needed)} of {unit.number(remedy.budget)}"
            yield f"  {remedy.change:<{width}}  {need} (plan {remedy.plan}){end}"
        if self.remedies and not any(remedy.works for remedy in self.remedies if remedy.is_option):
            yield "  nothing else that helps was found: not fewer or shorter texts" + (
                "" if self.demand.is_cpu else f", and no mesh up to {MOST_SUGGESTED_RANKS} {name}s"
            )

    def _memory_lines(self, unit: Unit, name: str) -> Iterator[str]:
        memory = self.memory
        largest = max(memory.budget, memory.needed)

        def row(title: str, size: int, *, bar: bool = True) -> str:
            marks = "#" * round(_BAR * size / largest) if bar else ""
            return f"  {title:<24}{unit.number(size):>11}  {marks}".rstrip()

        yield f"  {unit.name + ' of one ' + name:<24}{'':>11}  {'.' * round(_BAR * memory.budget / largest)} budget"
        for part in PARTS:
            if part in memory.weights:
                yield row(part.replace("_", " "), memory.weights[part])
        yield row("weights", memory.weight_bytes, bar=False)
        yield row(f"cache, {memory.num_blocks:,} blocks", memory.cache_bytes)
        outside = "" if memory.counted else " *"
        yield row("activations" + outside, memory.activations)
        yield row(("graphs, workspace" if memory.counted else "graphs, process") + outside, memory.runtime)
        if memory.communication:
            yield row("communication" + outside, memory.communication)
        yield row("needed", memory.needed, bar=False)
        if not memory.counted:
            yield row("the whole process", memory.needed + memory.other_bytes, bar=False)
            yield "  * outside the budget"
        yield ""
        yield (
            f"room for {self.most_texts:,} texts of {self.demand.max_model_len:,} tokens together; "
            f"one text per replica may have {self.longest_text:,} tokens"
        )

    def _speed_lines(self, name: str) -> Iterator[str]:
        speed = self.speed
        causes = ", ".join(f"{cause} {seconds * 1e3:.1f}" for cause, seconds in speed.decode.causes.items())
        yield f"estimated speed, context {speed.context:,} tokens"
        yield f"  prefill      {speed.prefill:>9,.0f} tok/s"
        yield f"  a text alone {speed.single:>9,.1f} tok/s"
        yield (
            f"  {speed.texts:>4} texts   {speed.decode_total:>9,.0f} tok/s, "
            f"{speed.decode.seconds * 1e3:.1f} ms per step ({causes})"
        )
        for item in self.comparisons:
            anchor = item.anchor
            limit = "" if anchor.limit is None else f" at {anchor.limit * 1e3:.0f} ms"
            mine = "no text within the limit" if item.estimate is None else f"{item.estimate:,.0f}"
            ratio = "" if item.ratio is None else f", {item.ratio:.2f} of it"
            theirs = f"{anchor.tokens_per_second:,.0f} tok/s per {name}"
            yield f"  published {anchor.phase}{limit}: {theirs}; this plan, estimated: {mine}{ratio}"
            yield f"    ({anchor.conditions}; {anchor.source})"

    def _other_lines(self, unit: Unit) -> Iterator[str]:
        yield "other plans: first what fits, by estimated decode time; then what is too large; then what is illegal"
        legal = [item for item in self.others if item.status != "illegal"]
        for item in legal[:SHOWN]:
            assert item.memory is not None
            assert item.decode is not None
            size = unit.text(item.memory.needed)
            yield f"  {item.plan!s:<20}{size:>14}  {item.decode.seconds * 1e3:>6.1f} ms  {item.reason}"
        if len(legal) > SHOWN:
            yield f"  and {len(legal) - SHOWN} more (--json)"
        reasons: dict[str, list[str]] = {}
        for item in self.others:
            if item.status == "illegal":
                reasons.setdefault(item.reason, []).append(str(item.plan))
        for reason, plans in list(reasons.items())[:SHOWN]:
            more = f" and {len(plans) - 3} more" if len(plans) > 3 else ""
            yield f"  {', '.join(plans[:3])}{more}: {reason}"
        if len(reasons) > SHOWN:
            yield f"  and {len(reasons) - SHOWN} more reasons (--json)"


def _memory_json(memory: RankMemory, capacity: int) -> dict[str, Any]:
    return {
        "weights": {part: memory.weights[part] for part in PARTS if part in memory.weights},
        "weights_total": memory.weight_bytes,
        "cache": memory.cache_bytes,
        "block": memory.block_bytes,
        "blocks": memory.num_blocks,
        "activations": memory.activations,
        "graphs_and_workspace": memory.runtime,
        "communication": memory.communication,
        "needed": memory.needed,
        "budget": memory.budget,
        "capacity": capacity,
        "stage": memory.stage,
    }


def _candidate_json(item: Candidate) -> dict[str, Any]:
    decode: StepTime | None = item.decode
    return {
        "plan": item.plan.to_json(),
        "status": item.status,
        "reason": item.reason,
        "needed": None if item.memory is None else item.memory.needed,
        "decode_seconds": None if decode is None else decode.seconds,
    }


def _comparison_json(item: Comparison) -> dict[str, Any]:
    anchor = item.anchor
    return {
        "tokens_per_second_per_rank": anchor.tokens_per_second,
        "limit_seconds": anchor.limit,
        "phase": anchor.phase,
        "conditions": anchor.conditions,
        "source": anchor.source,
        "estimate": item.estimate,
        "ratio": item.ratio,
    }
