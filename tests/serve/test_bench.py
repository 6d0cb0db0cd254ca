"""`msds bench` against a real socket: what it counts, what it says of failures, and the arithmetic of its report."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from msds_serve.bench import JSON_KEYS, Level, percentiles, render
from msds_serve.cli import main
from msds_serve.client import Exchange
from msds_serve.protocol.streaming import DONE, event
from tests.serve.conftest import Rigged

Rig = Callable[..., Rigged]
Capture = pytest.CaptureFixture[str]


def bench(capsys: Capture, url: str, *arguments: str, code: int = 0) -> Any:
    """The JSON report of a run that ends with `code`."""
    assert main(["bench", "--url", url, "--json", *arguments]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("endpoint", [[], ["--completions"]], ids=["chat", "completions"])
def test_every_request_and_token_is_counted(rig: Rig, capsys: Capture, endpoint: list[str]) -> None:
    asked = ["--concurrency", "1,3", "--requests", "6", "--max-tokens", "5", "--prompt-tokens", "60", "--ignore-eos"]
    report = bench(capsys, rig().url, *asked, *endpoint)
    assert report["model"] == "tiny"
    assert report["token_counts"] == "usage"
    assert [level["concurrency"] for level in report["levels"]] == [1, 3]
    for level in report["levels"]:
        assert (level["ok"], level["failed"], level["first_error"]) == (6, 0, None)
        assert level["output_tokens"] == 30
        assert level["finish_reasons"] == {"length": 6}
        assert abs(level["prompt_tokens"] / 6 - 60) < 25  # words of the tiny vocabulary are of several tokens
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            assert 0 < level[name]["p50"] <= level[name]["p90"] <= level[name]["p99"]
        assert level["ttft_ms"]["p50"] <= level["e2e_ms"]["p50"]


def test_every_key_of_the_report_is_documented(rig: Rig, capsys: Capture) -> None:
    report = bench(capsys, f"{rig().url}/v1/", "--concurrency", "1", "--requests", "1", "--max-tokens", "2")
    documented = JSON_KEYS.replace(",", " ").split()
    for key in [*report, *report["levels"][0]]:
        assert key in documented


def test_a_person_reads_a_table(rig: Rig, capsys: Capture) -> None:
    arguments = ["--concurrency", "2", "--seconds", "0.3", "--max-tokens", "3", "--model", "alias"]
    assert main(["bench", "--url", rig().url, *arguments]) == 0
    shown = capsys.readouterr()
    assert "alias at http" in shown.out
    header, row = shown.out.splitlines()[3:5]
    assert header.split()[:5] == ["streams", "ok", "failed", "tok/s", "req/s"]
    assert len(row.split()) == len(header.split())
    assert "trying one request" in shown.err


def test_prompts_from_a_file(rig: Rig, capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"sea"\n\n{"prompt": "sky"}\n{"messages": [{"role": "user", "content": "high"}]}\n')
    report = bench(capsys, rig().url, "--prompts", str(file), "--concurrency", "1", "--requests", "3")
    assert report["levels"][0]["ok"] == 3
    for line, named in (('{"prompt": 3}', "line 1"), ("{", "not JSON"), ("", "no line")):
        file.write_text(line)
        assert main(["bench", "--url", rig().url, "--prompts", str(file)]) == 2
        assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "named"),
    [("127.0.0.1:8000", "url is"), ("http://127.0.0.1:9", "does not answer"), ("http://a:b", "url is")],
)
def test_servers_that_are_none(capsys: Capture, url: str, named: str) -> None:
    assert main(["bench", "--url", url]) == 2
    assert named in capsys.readouterr().err


def test_a_refused_first_request_is_quoted(rig: Rig, capsys: Capture) -> None:
    assert main(["bench", "--url", rig().url, "--max-tokens", "5000"]) == 2
    assert "max_tokens is 5000" in capsys.readouterr().err
    assert main(["bench", "--url", rig().url, "--model", "none"]) == 2
    assert "the model 'none' does not exist" in capsys.readouterr().err


def test_keys(rig: Rig, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    url = rig(api_keys=("secret",)).url
    small = ["--concurrency", "1", "--requests", "1"]
    assert main(["bench", "--url", url, *small]) == 2
    assert "401" in capsys.readouterr().err
    assert bench(capsys, url, "--api-key", "secret", *small)["levels"][0]["ok"] == 1
    monkeypatch.setenv("MSDS_API_KEY", "secret")
    assert bench(capsys, url, *small)["levels"][0]["ok"] == 1


class Foreign(http.server.BaseHTTPRequestHandler):
    """A server without usage, of whose answers some fail: whole, then 503, an error event, a cut stream, garbage."""

    count = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        turn, Foreign.count = Foreign.count % 5, Foreign.count + 1
        self.send_response(503 if turn == 1 else 200)
        self.end_headers()
        delta = event({"choices": [{"index": 0, "delta": {"content": "a"}}]})
        end = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        bodies = [
            delta + delta + end + DONE,
            b"busy",
            event({"error": {"message": "it broke"}}) + DONE,
            delta,
            b"data: [1]\n\n",
        ]
        self.wfile.write(bodies[turn])

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def foreign() -> Iterator[str]:
    Foreign.count = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_failures_are_counted_and_chunks_stand_for_tokens(
    foreign: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msds_serve.bench._RETRY_SECONDS", 0)
    (tmp_path / "p").write_text('"hi"')
    arguments = ["--model", "m", "--prompts", str(tmp_path / "p"), "--concurrency", "1", "--requests", "10"]
    report = bench(capsys, foreign, *arguments, code=1)  # the first answer, a whole one, is the uncounted one
    (level,) = report["levels"]
    assert report["token_counts"] == "chunks"
    assert (level["ok"], level["failed"], level["output_tokens"]) == (2, 8, 4)
    assert level["first_error"] == "503: busy"
    assert "chunks were counted" in render(report)
    Foreign.count = 0
    worker = ["it broke", "ended before", "not OpenAI's protocol"]
    for skip, named in enumerate(worker, start=2):
        Foreign.count = skip
        assert main(["bench", "--url", foreign, *arguments]) == 2
        assert named in capsys.readouterr().err


def test_an_interrupt_prints_what_was_measured(rig: Rig, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str) -> None:
        if text.startswith("2 streams: 3 "):
            raise KeyboardInterrupt

    monkeypatch.setattr("msds_serve.commands.clients._progress", lambda: interrupt)
    arguments = ["--concurrency", "1,2,3", "--requests", "5", "--max-tokens", "2"]
    report = bench(capsys, rig().url, *arguments, code=130)
    assert report["interrupted"]
    assert [level["ok"] for level in report["levels"]] == [5, 3]


def test_the_arithmetic_of_a_level() -> None:
    level = Level(1, seconds=2.0)
    for offset in (0.0, 1.0):
        exchange = Exchange(status=200, seconds=1.0 + offset, piece_times=[0.1 + offset, 0.2 + offset, 0.5 + offset])
        exchange.answer.add_chunk({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]})
        exchange.answer.add_chunk({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
        level.exchanges.append(exchange)
    level.exchanges.append(Exchange(error="503: busy"))
    report = level.to_json()
    assert report["output_tokens_per_second"] == 5.0
    assert report["requests_per_second"] == 1.0
    assert report["prompt_tokens"] == 14
    assert report["ttft_ms"]["p50"] == pytest.approx(600)
    assert report["tpot_ms"]["p50"] == pytest.approx(100)
    assert report["itl_ms"]["p50"] == pytest.approx(200)
    assert report["itl_ms"]["p99"] == pytest.approx(300)
    assert report["e2e_ms"]["p90"] == pytest.approx(1900)


def test_percentiles() -> None:
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
    assert percentiles([0.5]) == {"p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert percentiles([count / 1000 for count in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
