"""Served tiny models for the tests of the HTTP surface: one that computes, and rigged ones that say what they must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from msds import LLM
from msds_serve.app import create_app
from msds_serve.service import Service, ServiceOptions
from tests.serve.rigged import RiggedRunner, listening, rigged_llm, write_rigged_folder

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


@dataclass(frozen=True)
class Rigged:
    """A rigged service behind a socket."""

    url: str
    service: Service
    runner: RiggedRunner


@pytest.fixture(scope="session")
def rig(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rigged]]:
    """rig(layout="qwen", thinks=False, **service_options): a rigged service, started once for the same arguments."""
    started: dict[tuple[Any, ...], Rigged] = {}
    with ExitStack() as stack:

        def serve(layout: str = "deepseek_v3", *, thinks: bool = False, **options: Any) -> Rigged:
            key = (layout, thinks, *sorted(options.items()))
            if key not in started:
                folder = tmp_path_factory.mktemp("rigged") / "model"
                write_rigged_folder(tiny("llama_base", tokenizer=True), folder, layout=layout, thinks=thinks)
                llm, runner = rigged_llm(folder, max_model_len=1024, max_num_seqs=8, max_waiting=256)
                service = Service(llm, ServiceOptions(**{"model_names": NAMES, "drain_seconds": 2.0} | options))
                started[key] = Rigged(stack.enter_context(listening(create_app(service))), service, runner)
            return started[key]

        yield serve
