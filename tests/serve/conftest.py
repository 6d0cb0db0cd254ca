"""Served tiny models for the tests of the HTTP surface: one that computes, and rigged ones that say what they must.

With `--mesh cpu:N` the one that computes is `msds serve` on N processes, and whoever needs to look into the process of
the engine, or to replace its device, is skipped by the fixtures `service` and `rig`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from msds import LLM
from msds_serve.app import create_app
from msds_serve.service import Service, ServiceOptions
from tests.launch.served import Served, serving
from tests.serve.rigged import RiggedRunner, listening, rigged_llm, write_rigged_folder

NAMES = ("tiny", "alias")
KEY = "secret"
ENGINE = {"max_model_len": 128, "max_num_seqs": 4, "max_waiting": 32}
SERVICE = {"max_body_bytes": 20_000, "request_timeout": 60}


@pytest.fixture(scope="session")
def folder(tiny: Callable[..., Path]) -> Path:
    """A tiny DeepSeek-V3 with a chat template; its answers are noise, but the same noise every time."""
    return tiny("v3_base", tokenizer=True)


@pytest.fixture(scope="session")
def service(request: pytest.FixtureRequest, folder: Path) -> Service:
    """The service of that model in this process, started by `client`."""
    if mesh_of(request):
        pytest.skip("looks into the process of the engine, which under --mesh is another")
    llm = LLM(folder, prefill_chunk=32, **ENGINE)
    return Service(llm, ServiceOptions(model_names=NAMES, **SERVICE))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """An HTTP client of the running service."""
    if mesh_of(request):
        with http_client(request.getfixturevalue("on_ranks")) as client:
            yield client
    else:
        app = create_app(request.getfixturevalue("service"))
        with TestClient(app, raise_server_exceptions=False) as client:
            yield client


@pytest.fixture(scope="session")
def on_ranks(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The model served by `msds serve --mesh`, as the command line of the tests says."""
    plan = request.config.getoption("--plan")
    arguments = ["--mesh", mesh_of(request), *(["--plan", plan] if plan else [])]
    with serving(folder, tmp_path_factory.mktemp("ranks"), *SERVE_ARGUMENTS, *arguments) as served:
        yield served


SERVE_ARGUMENTS = [
    *("--served-model-name", *NAMES, "--api-key", KEY),
    *(f"--{name.replace('_', '-')}={value}" for name, value in (ENGINE | SERVICE).items()),
]
"""The options of `service`, as `msds serve` takes them."""


def http_client(served: Served) -> httpx.Client:
    """What asks a service in other processes as `TestClient` asks one in this."""
    return httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)


def mesh_of(request: pytest.FixtureRequest) -> str:
    """The option --mesh of the tests; empty without."""
    return request.config.getoption("--mesh") or ""


@dataclass(frozen=True)
class Rigged:
    """A rigged service behind a socket."""

    url: str
    service: Service
    runner: RiggedRunner


@pytest.fixture(scope="session")
def rig(
    request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Rigged]]:
    """rig(layout="qwen", thinks=False, **service_options): a rigged service, started once for the same arguments."""
    if mesh_of(request):
        pytest.skip("its answers are scripted in place of a device: no rank would compute anything")
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
