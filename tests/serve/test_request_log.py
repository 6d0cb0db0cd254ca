"""The request log of a real service, and the replay of it: what is in a line, what survives, and what differs."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_serve.app import create_app
from msds_serve.cli import main
from msds_serve.client import CHAT, COMPLETIONS, Exchange, Server
from msds_serve.replay import JSON_KEYS, Entry, difference, read_log
from msds_serve.request_log import MAX_LINE_BYTES, RequestLog, digest
from msds_serve.service import Service, ServiceOptions
from tests.serve.rigged import RiggedRunner, byte_tokens, listening, rigged_llm, wait_until, write_rigged_folder

Capture = pytest.CaptureFixture[str]
KEYS = ["id", "time", "path", "status", "seconds", "body", "choices", "usage", "error", "aborted"]
USER = [{"role": "user", "content": "what?"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


class Logged:
    """A rigged service that logs its requests."""

    def __init__(self, url: str, runner: RiggedRunner, path: Path) -> None:
        self.url, self.runner, self.path = url, runner, path
        self.server = Server.at(url, api_key="secret-key")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("logged") / "model"
    return write_rigged_folder(tiny("llama_base", tokenizer=True), target, thinks=True)


@pytest.fixture
def logged(folder: Path, tmp_path: Path) -> Iterator[Logged]:
    llm, runner = rigged_llm(folder, max_model_len=256, max_num_seqs=8)
    service = Service(llm, ServiceOptions(model_names=("tiny",), api_keys=("secret-key",), drain_seconds=0))
    path = tmp_path / "requests.jsonl"
    with listening(create_app(service, RequestLog(path))) as url:
        yield Logged(url, runner, path)


def run_replay(capsys: Capture, logged: Logged, *arguments: str, code: int = 0, log: Path | None = None) -> Any:
    command = ["replay", str(log or logged.path), "--url", logged.url, "--api-key", "secret-key", "--json", *arguments]
    assert main(command) == code
    return json.loads(capsys.readouterr().out)


def test_a_line_per_request(logged: Logged) -> None:
    whole = logged.server.ask(CHAT, ASK)
    streamed = logged.server.ask(CHAT, ASK | {"stream": True})
    text = logged.server.ask(COMPLETIONS, {"model": "tiny", "prompt": "a", "n": 2, "seed": 3, "max_tokens": 2})
    refused = logged.server.ask(CHAT, ASK | {"model": "none"})
    Server.at(logged.url).ask(CHAT, ASK)
    lines = logged.lines()
    assert [list(line) for line in lines] == [KEYS] * 5
    assert [line["status"] for line in lines] == [200, 200, 200, 404, 401]
    assert [line["aborted"] for line in lines] == [False] * 5
    assert lines[0]["body"] == ASK
    assert lines[0]["choices"] == whole.answer.choices == lines[1]["choices"] == streamed.answer.choices
    assert set(lines[0]["choices"][0]) == {"index", "finish_reason", "reasoning"}
    assert lines[0]["usage"]["completion_tokens"] == lines[1]["usage"]["completion_tokens"] == 6
    assert lines[2]["choices"] == text.answer.choices
    assert [choice["index"] for choice in lines[2]["choices"]] == [0, 1]
    assert lines[3]["error"] in str(refused.error)
    assert lines[4]["body"] is None
    assert "secret-key" not in logged.path.read_text()
    assert logged.path.stat().st_mode & 0o777 == 0o600


def test_a_client_that_leaves(logged: Logged) -> None:
    connection = http.client.HTTPConnection(logged.url.removeprefix("http://"), timeout=20)
    logged.runner.steps_until_closed = 5  # it cannot end before we have left
    body = json.dumps(ASK | {"stream": True, "max_tokens": 200})
    connection.request(
        "POST", CHAT, body=body, headers={"Authorization": "Bearer secret-key", "Content-Type": "application/json"}
    )
    response = connection.getresponse()
    response.readline()
    response.close()
    connection.close()
    wait_until(lambda: logged.path.stat().st_size)
    logged.runner.gate.set()
    (line,) = logged.lines()
    assert line["aborted"]
    assert line["error"] is None
    assert line["status"] == 200
    assert all(choice["finish_reason"] is None for choice in line["choices"])
    assert 1 <= line["usage"]["completion_tokens"] <= 6


def test_the_same_again(logged: Logged, capsys: Capture) -> None:
    for seed in range(3):
        logged.server.ask(CHAT, ASK | {"temperature": 1.0, "seed": seed, "stream": bool(seed), "n": 2})
    logged.server.ask(CHAT, ASK | {"temperature": 1.0})
    logged.server.ask(CHAT, ASK | {"max_tokens": 0})
    report = run_replay(capsys, logged, "--speed", "realtime")
    assert (report["requests"], report["same"], report["not_compared"]) == (5, 4, 1)
    assert report["different"] == report["failed"] == 0
    assert report["skipped"] == report["differences"] == []
    assert report["replayed_ms"]["p50"] > 0
    for key in report:
        assert key in JSON_KEYS.replace(",", " ").split()


def test_another_answer_is_found(logged: Logged, capsys: Capture) -> None:
    question = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 20, "temperature": 0}
    ids = byte_tokens(logged.runner.model, b"first answer")
    logged.runner.script([7, 8, 9], ids)
    logged.server.ask(COMPLETIONS, question)
    logged.server.ask(CHAT, ASK)
    logged.runner.script([7, 8, 9], byte_tokens(logged.runner.model, b"first of all"))
    report = run_replay(capsys, logged, code=1)
    assert (report["same"], report["different"]) == (1, 1)
    (found,) = report["differences"]
    assert found["what"] == "choice 0: text from character 6 on is 'of all' instead of 'answer'"
    assert found["id"] == logged.lines()[0]["id"]
    assert main(["replay", str(logged.path), "--url", logged.url, "--api-key", "secret-key"]) == 1
    assert "3 same, 1 different" in capsys.readouterr().out  # the first replay is in the log too


def test_what_fails_now(logged: Logged, capsys: Capture) -> None:
    logged.server.ask(CHAT, ASK)
    report = run_replay(capsys, logged, "--model", "other", code=1)
    assert report["failed"] == 1
    assert "404" in report["differences"][0]["what"]


def test_a_cut_line_costs_only_itself(logged: Logged, capsys: Capture) -> None:
    for _ in range(3):
        logged.server.ask(CHAT, ASK)
    data = logged.path.read_bytes()
    cut = logged.path.with_suffix(".cut")
    cut.write_bytes(data[:-20])
    report = run_replay(capsys, logged, log=cut)
    assert report["same"] == 2
    assert report["skipped"] == [{"line": 3, "reason": "the last line is cut off"}]
    again = RequestLog(cut)
    again.write(json.loads(data.splitlines()[0]))
    again.close()
    recording = read_log(str(cut))
    assert sorted(entry.line for entry in recording.entries) == [1, 2, 4]
    assert recording.skipped == [(3, "not JSON, or cut off")]


def test_rotation(logged: Logged) -> None:
    logged.server.ask(CHAT, ASK)
    old = logged.path.with_suffix(".1")
    logged.path.rename(old)
    logged.server.ask(CHAT, ASK)
    logged.server.ask(CHAT, ASK)
    assert len(old.read_bytes().splitlines()) == 1
    assert len(logged.lines()) == 2


def test_lines_are_bounded(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log")
    line = {"id": "x", "body": {"prompt": "a"}, "choices": [{"index": 0, "finish_reason": "stop", "text": "b" * 2**20}]}
    log.write(line)
    log.write(line | {"body": {"prompt": "a" * 2**20}})
    log.close()
    short, shorter = (tmp_path / "log").read_bytes().splitlines()
    assert max(len(short), len(shorter)) < MAX_LINE_BYTES
    assert json.loads(short)["choices"] == [
        {"index": 0, "finish_reason": "stop", "sha256": digest(line["choices"][0])}  # type: ignore[index]
    ]
    assert json.loads(short)["body"] == {"prompt": "a"}
    assert json.loads(shorter)["body"] is None


def test_a_full_disk_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"))
    log.write({"id": "x", "choices": []})
    log.close()
    assert "misses a line" in caplog.text


def test_files_that_cannot_be_used(tmp_path: Path, capsys: Capture) -> None:
    assert main(["serve", str(tmp_path), "--request-log", str(tmp_path / "no" / "log")]) == 2
    assert "request_log" in capsys.readouterr().err
    (tmp_path / "log").write_text('{"path": "/v1/models"}\n[]\n{')
    for name, named in (("absent", "absent"), ("log", "line 1: its path is '/v1/models'")):
        assert main(["replay", str(tmp_path / name), "--url", "http://127.0.0.1:9"]) == 2
        assert named in capsys.readouterr().err


WORDS = st.text("ab", max_size=5)
CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 2), "finish_reason": st.sampled_from(["stop", "length"])},
    optional={"content": WORDS, "reasoning": WORDS, "tool_calls": st.lists(st.tuples(WORDS, WORDS).map(list))},
)
CHOICES = st.lists(CHOICE, max_size=3, unique_by=lambda choice: choice["index"])


@given(was=CHOICES, now=CHOICES, hashed=st.booleans())
def test_answers_are_the_same_exactly_when_they_are_equal(was: Any, now: Any, hashed: bool) -> None:
    exchange = Exchange(status=200)
    exchange.answer._choices.update({choice["index"]: choice for choice in now})
    short = [{"index": choice["index"], "sha256": digest(choice)} for choice in was]
    entry = Entry(1, "x", 0.0, CHAT, {}, 200, 1.0, short if hashed else was, True)
    equal = sorted(was, key=lambda choice: choice["index"]) == exchange.answer.choices
    assert (difference(entry, exchange) is None) == equal
