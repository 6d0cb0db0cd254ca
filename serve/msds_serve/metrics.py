"""Prometheus metrics: counters and histograms that requests feed, gauges read from the engine when scraped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from msds.engine.balance import BalanceStats
    from msds_serve.service import Service

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One registry per service, so that several can live in one process."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "msds_requests_total",
            "Requests by endpoint and HTTP status.",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "msds_prompt_tokens_total", "Prompt tokens of requests that were answered.", registry=self.registry
        )
        self.generation_tokens = Counter("msds_generation_tokens_total", "Tokens generated.", registry=self.registry)
        self.errors = Counter("msds_errors_total", "Failed requests by error code.", ("code",), registry=self.registry)
        self.time_to_first_token = Histogram(
            "msds_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.time_per_output_token = Histogram(
            "msds_time_per_output_token_seconds",
            "Between tokens of one answer, after the first.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(service))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class TokenClock:
    """Times the tokens of one request for the histograms."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._arrival = time.perf_counter()
        self._last: dict[int, float] = {}

    def tick(self, sequence_id: int) -> None:
        """A token of this sequence has come. The request's first one counts its prompt, once for all answers."""
        now = time.perf_counter()
        if not self._last:
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
        last = self._last.get(sequence_id)
        self._last[sequence_id] = now
        self._metrics.generation_tokens.inc()
        if last is None:
            self._metrics.time_to_first_token.observe(now - self._arrival)
        else:
            self._metrics.time_per_output_token.observe(now - last)


class _EngineCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        stats = self._service.engine.stats
        engine = self._service.llm.engine
        usable = max(1, stats.free_blocks + stats.referenced_blocks + stats.cached_blocks)
        yield GaugeMetricFamily("msds_requests_waiting", "Answers that wait for a place.", stats.waiting)
        yield GaugeMetricFamily("msds_requests_running", "Answers that hold cache blocks.", stats.running)
        used = stats.referenced_blocks / usable
        yield GaugeMetricFamily("msds_cache_usage_ratio", "Cache blocks that running answers hold.", used)
        yield CounterMetricFamily("msds_preemptions_total", "Answers that were put back.", stats.preemptions)
        queried, hit = stats.prefix_tokens_queried, stats.prefix_tokens_hit
        yield CounterMetricFamily("msds_prefix_cache_queried_tokens_total", "Prompt tokens looked up.", queried)
        yield CounterMetricFamily("msds_prefix_cache_hit_tokens_total", "Prompt tokens found.", hit)
        if engine.speculation is not None:
            drafts = engine.speculation
            yield _by_position("msds_draft_tokens_total", "Draft tokens verified.", drafts.drafted)
            yield _by_position("msds_draft_tokens_accepted_total", "Draft tokens kept.", drafts.accepted)
            yield GaugeMetricFamily("msds_speculation_on", "Whether drafting pays and is on.", int(drafts.is_on))
        if engine.balance is not None:
            yield from _of_experts(engine.balance)
        yield CounterMetricFamily("msds_failed_steps_total", "Steps that raised.", engine.num_failed_steps)
        yield CounterMetricFamily("msds_graph_compilations_total", "Graphs compiled.", engine.runner.num_compiled)


def _of_experts(balance: BalanceStats) -> Iterable[Metric]:
    """What came of balancing; no gauge before experts were counted."""
    if balance.imbalance is not None:
        text = "Load of the busiest rank of ep over the mean, in the last interval; 1 is even."
        yield GaugeMetricFamily("msds_expert_load_imbalance_ratio", text, balance.imbalance)
    yield CounterMetricFamily("msds_expert_rebalances_total", "Times that experts were moved.", balance.rebalancings)
    yield CounterMetricFamily("msds_expert_moves_total", "Expert slots that were given another.", balance.moves)
    text = "Times that a layer's experts could not be moved and stayed."
    yield CounterMetricFamily("msds_expert_move_failures_total", text, balance.failures)


def _by_position(name: str, text: str, counts: Sequence[int]) -> CounterMetricFamily:
    """A counter for each place after the last token, from 1."""
    family = CounterMetricFamily(name, text, labels=("position",))
    for position, count in enumerate(counts, start=1):
        family.add_metric((str(position),), count)
    return family
