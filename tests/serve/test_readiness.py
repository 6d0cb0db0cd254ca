"""Readiness of a service whose device hangs: /ready says so, /health does not, and both recover."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from msds_serve import run
from tests.serve.conftest import Rigged
from tests.serve.rigged import wait_until


def test_a_stalled_engine_is_not_ready_and_recovers(rig: Callable[..., Rigged]) -> None:
    rigged = rig(stall_seconds=0.2)
    url = rigged.url

    def status(path: str) -> int:
        return requests.get(url + path, timeout=20).status_code

    def ask() -> requests.Response:
        body: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        return requests.post(f"{url}/v1/completions", json=body, timeout=20)

    answers: list[requests.Response] = []
    assert ask().status_code == 200
    rigged.runner.gate.clear()
    caller = threading.Thread(target=lambda: answers.append(ask()))
    try:
        caller.start()
        wait_until(lambda: status("/ready") == 503)
        assert status("/health") == 200
        refused = ask()
        assert refused.status_code == 503
        assert "in one step for" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
    finally:
        rigged.runner.gate.set()
        caller.join(20)
    wait_until(lambda: status("/ready") == 200)
    assert answers[0].status_code == 200  # the one that waited is served
    assert ask().status_code == 200


def test_a_lost_rank_is_said_to_probes_and_to_those_who_wait(
    rig: Callable[..., Rigged], monkeypatch: pytest.MonkeyPatch
) -> None:
    rigged = rig(stall_seconds=50.0)
    monkeypatch.setattr(run, "LAST_WORDS_SECONDS", 0.0)
    lost = "rank 1 did not finish step decode within 3 s"
    said: list[str] = []
    team = SimpleNamespace(place=SimpleNamespace(fail=said.append))
    answers: list[requests.Response] = []
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
    caller = threading.Thread(
        target=lambda: answers.append(requests.post(f"{rigged.url}/v1/completions", json=body, timeout=20))
    )
    rigged.runner.gate.clear()
    try:
        caller.start()
        wait_until(lambda: rigged.service.engine.engine.has_work)
        run._break_off(rigged.service, team, lost)  # type: ignore[arg-type]
        caller.join(20)
        assert answers[0].status_code == 503
        assert lost in answers[0].text
        ready = requests.get(f"{rigged.url}/ready", timeout=20)
        assert ready.status_code == 503
        assert lost in ready.text
        assert requests.get(f"{rigged.url}/health", timeout=20).status_code == 200
        refused = requests.post(f"{rigged.url}/v1/completions", json=body, timeout=20)
        assert refused.status_code == 503
        assert lost in refused.text
        assert said == [lost]
    finally:
        rigged.runner.gate.set()
