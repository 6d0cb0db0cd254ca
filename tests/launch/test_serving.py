"""`msds serve --mesh cpu:2` in real processes: it answers as one process does, and a lost rank ends it by name.

The plan has two replicas, because that has most to go wrong; other plans on two processes: test_model.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from msds import LLM, SamplingParams

LENGTH = 32
PROMPT = [5, 17, 200, 31, 7]


@dataclass
class Served:
    """A running `msds serve` of two ranks."""

    url: str
    process: subprocess.Popen[str]
    logs: Path
    ranks: list[int]

    def complete(self, **fields: Any) -> dict[str, Any]:
        response = requests.post(f"{self.url}/v1/completions", json=_body(**fields), timeout=120)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metric(self, name: str) -> float:
        """A gauge or counter without labels."""
        found = re.search(rf"^{name} (\S+)$", requests.get(f"{self.url}/metrics", timeout=120).text, re.MULTILINE)
        assert found is not None
        return float(found[1])


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("v3_base", tokenizer=True)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = tmp_path_factory.mktemp("logs")
    command = [sys.executable, "-m", "msds_serve", "serve", str(folder), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--mesh", "cpu:2", "--plan", "dp2.ep2", "--step-timeout", "120"]
    command += ["--max-model-len", str(LENGTH), "--max-num-seqs", "4", "--rank-logs", str(logs)]
    with (logs / "parent.log").open("w") as errors:
        process = subprocess.Popen(command, cwd=logs, stderr=errors, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 400
        while not _ready(url):
            assert process.poll() is None, (logs / "parent.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Served(url, process, logs, [int(pid) for pid in children])
    finally:
        process.terminate()
        process.wait(60)


def _ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/ready", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    return LLM(folder, progress=False, max_model_len=LENGTH, max_num_seqs=2)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.0, "seed": 3, "n": 2}]
)
def test_answers_are_those_of_one_process(served: Served, alone: LLM, sampling: dict[str, Any]) -> None:
    wanted = alone.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, **sampling))
    got = served.complete(**sampling, logprobs=0)["choices"]
    assert [one["text"] for one in got] == [one.text for one in wanted]
    for one, two in zip(got, wanted, strict=True):
        assert two.logprobs is not None
        want = [entry.logprob for entry in two.logprobs]
        assert one["logprobs"]["token_logprobs"] == pytest.approx(want, abs=1e-4)


def test_streams_are_those_of_one_process(served: Served, alone: LLM) -> None:
    (wanted,) = alone.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=11))
    body = _body(temperature=1.0, seed=11, stream=True)
    text = ""
    with requests.post(f"{served.url}/v1/completions", json=body, stream=True, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == wanted.text


def test_many_at_once_are_answered_as_alone(served: Served, alone: LLM) -> None:
    """More than both replicas decode together, of different lengths; one is given up by its client under way."""
    compiled = served.metric("msds_graph_compilations_total")
    prompts = [[3 + index, *PROMPT[: index % 5]] for index in range(9)]
    sampling = [{"temperature": index % 2, "seed": index, "max_tokens": 4 + index} for index in range(9)]

    def ask(index: int) -> str:
        return str(served.complete(prompt=prompts[index], **sampling[index])["choices"][0]["text"])

    body = _body(temperature=1.0, seed=1, stream=True, max_tokens=27)
    with requests.post(f"{served.url}/v1/completions", json=body, stream=True, timeout=120) as response:
        assert next(response.iter_lines()).startswith(b"data: ")
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = [clients.submit(ask, index) for index in range(len(prompts))]
            answers[0].result()
            response.close()
            got = [answer.result() for answer in answers]
    params = [SamplingParams(ignore_eos=True, **one) for one in sampling]  # type: ignore[arg-type]
    assert got == [output.text for output in alone.generate(prompts, params)]
    deadline = time.monotonic() + 60
    while served.metric("msds_requests_running"):
        assert time.monotonic() < deadline, "what its client has left still runs"
    assert served.metric("msds_graph_compilations_total") == compiled


def test_a_killed_rank_ends_the_service_which_names_it(served: Served) -> None:
    """The last test here: it takes the service with it."""
    other = next(pid for pid in served.ranks if b"MS_NODE_ID=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    body = _body(temperature=0.0, stream=True, max_tokens=27)
    with requests.post(f"{served.url}/v1/completions", json=body, stream=True, timeout=120) as response:
        lines = response.iter_lines()
        assert next(lines).startswith(b"data: ")
        os.kill(other, signal.SIGKILL)
        for _ in lines:
            pass
    assert served.process.wait(60) == 1
    said = (served.logs / "parent.log").read_text()
    assert re.search(r"msds: error: rank 1 was ended by SIGKILL", said), said
    assert "rank 0: rank 1 has ended" in said
    for pid in served.ranks:
        assert not Path(f"/proc/{pid}").exists()
