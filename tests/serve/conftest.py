"""One served tiny model for all tests of the HTTP surface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from msds import LLM
from msds_serve.app import create_app
from msds_serve.service import Service, ServiceOptions

NAMES = ("tiny", "alias")


@pytest.fixture(scope="session")
def service(tiny: Callable[..., Path]) -> Service:
    """A tiny DeepSeek-V3 with a chat template; its answers are noise, but the same noise every time."""
    llm = LLM(tiny("v3_base", tokenizer=True), max_model_len=128, max_num_seqs=4, prefill_chunk=32, max_waiting=8)
    return Service(llm, ServiceOptions(model_names=NAMES, max_body_bytes=20_000, request_timeout=60))


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[TestClient]:
    """An HTTP client of the running service."""
    with TestClient(create_app(service), raise_server_exceptions=False) as client:
        yield client
