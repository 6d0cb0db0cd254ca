"""`msds serve --mesh cpu:2` in real processes: it answers as one process does, passes the tests of the service, and a
lost rank ends it by name.

The plan has two replicas, because that has most to go wrong; other plans on two processes: test_model.py. The tests of
the service that are imported here run once more, against `client`; `pytest tests/serve --mesh cpu:2` runs all that can.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from msds import LLM, SamplingParams
from tests.launch.served import Served, serving
from tests.serve.conftest import ENGINE, SERVE_ARGUMENTS, http_client
from tests.serve.test_service import (  # noqa: F401  (collected here too)
    COMPLETIONS,
    TestChat,
    TestCompletions,
    TestProbes,
    TestRefusals,
    metric,
    test_leaving_a_stream_ends_the_generation,
    test_tokenize_and_back,
    wait_until_idle,
)
from tests.serve.test_structured import TestFormats, bias  # noqa: F401

PROMPT = [5, 17, 200, 31, 7]


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("v3_base", tokenizer=True)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = [*SERVE_ARGUMENTS, "--mesh", "cpu:2", "--plan", "dp2.ep2"]
    with serving(folder, tmp_path_factory.mktemp("ranks"), *arguments) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with http_client(served) as client:
        yield client


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    return LLM(folder, progress=False, **ENGINE)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.0, "seed": 3, "n": 2}]
)
def test_answers_are_those_of_one_process(client: httpx.Client, alone: LLM, sampling: dict[str, Any]) -> None:
    wanted = alone.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, **sampling))
    got = client.post(COMPLETIONS, json=_body(**sampling, logprobs=0)).json()["choices"]
    assert [one["text"] for one in got] == [one.text for one in wanted]
    for one, two in zip(got, wanted, strict=True):
        assert two.logprobs is not None
        want = [entry.logprob for entry in two.logprobs]
        assert one["logprobs"]["token_logprobs"] == pytest.approx(want, abs=1e-4)


def test_streams_are_those_of_one_process(client: httpx.Client, alone: LLM) -> None:
    (wanted,) = alone.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=11))
    body = _body(temperature=1.0, seed=11, stream=True)
    text = ""
    with client.stream("POST", COMPLETIONS, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == wanted.text


def test_many_at_once_are_answered_as_alone(client: httpx.Client, alone: LLM) -> None:
    """More than both replicas decode together, of different lengths; one is given up by its client under way."""
    prompts = [[3 + index, *PROMPT[: index % 5]] for index in range(9)]
    sampling = [{"temperature": index % 2, "seed": index, "max_tokens": 4 + index} for index in range(9)]

    def ask(index: int) -> str:
        body = _body(prompt=prompts[index], **sampling[index])
        return str(client.post(COMPLETIONS, json=body).json()["choices"][0]["text"])

    body = _body(temperature=1.0, seed=1, stream=True, max_tokens=100)
    with client.stream("POST", COMPLETIONS, json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = [clients.submit(ask, index) for index in range(len(prompts))]
            answers[0].result()
            response.close()
            got = [answer.result() for answer in answers]
    params = [SamplingParams(ignore_eos=True, **one) for one in sampling]  # type: ignore[arg-type]
    assert got == [output.text for output in alone.generate(prompts, params)]
    wait_until_idle(client)


def test_nothing_was_compiled_after_warm_up(client: httpx.Client, served: Served) -> None:
    """None of the tests above had anything compiled; warm-up says what it compiles, line by line."""
    warmed_up = len(re.findall(r"^\w+: [A-Z]=\d.*%$", (served.logs / "parent.log").read_text(), re.MULTILINE))
    assert metric(client, "msds_graph_compilations_total") == warmed_up > 0


def test_a_killed_rank_ends_the_service_which_names_it(served: Served, client: httpx.Client) -> None:
    """The last test here: it takes the service with it."""
    other = next(pid for pid in served.ranks if b"MS_NODE_ID=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    body = _body(temperature=0.0, stream=True, max_tokens=100)
    with client.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(other, signal.SIGKILL)
        for _ in lines:
            pass
    assert served.process.wait(60) == 1
    said = (served.logs / "parent.log").read_text()
    assert re.search(r"msds: error: rank 1 was ended by SIGKILL", said), said
    assert "rank 0: rank 1 has ended" in said
    for pid in served.ranks:
        assert not Path(f"/proc/{pid}").exists()
