"""Readiness of a service whose device hangs: /ready says so, /health does not, and both recover."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import requests

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
