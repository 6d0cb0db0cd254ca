"""What the metrics say of speculation and of experts; the rest is asked of a running service, in test_service.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msds.engine.balance import BalanceStats
from msds.engine.schedule_types import SchedulerStats
from msds.engine.speculation import SpeculationStats
from msds_serve.metrics import Metrics


def lines(speculation: SpeculationStats | None = None, balance: BalanceStats | None = None) -> list[str]:
    stats = SchedulerStats(0, 0, 0, 1, 0, 0, 0, 0)
    runner = SimpleNamespace(num_compiled=0)
    engine = SimpleNamespace(stats=stats, num_failed_steps=0, runner=runner, speculation=speculation, balance=balance)
    service: Any = SimpleNamespace(engine=engine, llm=SimpleNamespace(engine=engine))
    return Metrics(service).text().decode().splitlines()


def test_drafts_by_position() -> None:
    text = lines(SpeculationStats(drafted=(10, 7), accepted=(6, 2), is_on=True))
    assert {
        'msds_draft_tokens_total{position="1"} 10.0',
        'msds_draft_tokens_total{position="2"} 7.0',
        'msds_draft_tokens_accepted_total{position="1"} 6.0',
        'msds_draft_tokens_accepted_total{position="2"} 2.0',
        "msds_speculation_on 1.0",
    } <= set(text)


def test_without_speculation_there_is_nothing_of_it() -> None:
    assert not [line for line in lines() if "draft" in line or "speculation" in line]


def test_balance_of_experts() -> None:
    text = lines(balance=BalanceStats(imbalance=1.25, rebalancings=3, moves=40, failures=2))
    assert {
        "# TYPE msds_expert_load_imbalance_ratio gauge",
        "msds_expert_load_imbalance_ratio 1.25",
        "msds_expert_rebalances_total 3.0",
        "msds_expert_moves_total 40.0",
        "msds_expert_move_failures_total 2.0",
    } <= set(text)
    text = lines(balance=BalanceStats(imbalance=None, rebalancings=0, moves=0, failures=0))
    assert not [line for line in text if "imbalance" in line]
    assert "msds_expert_rebalances_total 0.0" in text
    assert not [line for line in lines() if "expert" in line]
