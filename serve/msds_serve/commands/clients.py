"""The commands that talk to a running server: their options, and what they print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from msds.errors import OptionError
from msds_serve import bench, replay
from msds_serve.api_keys import API_KEY_VARIABLE
from msds_serve.client import Server
from msds_serve.commands import add_command


def add(commands: Any) -> None:
    """Define `bench` and `replay`."""
    _add_bench(commands)
    _add_replay(commands)


def _add_bench(commands: Any) -> None:
    command = add_command(commands, "bench", _bench, "Measure any OpenAI-compatible server under load.")
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = bench.JSON_KEYS
    _add_server(command)
    command.add_argument("--model", metavar="NAME", help="default: the first that /v1/models lists")
    command.add_argument("--completions", action="store_true", help="/v1/completions instead of chat")
    command.add_argument(
        "--concurrency", metavar="N,N", type=_counts, default=(1, 4, 16, 64), help="streams; default 1,4,16,64"
    )
    amount = command.add_mutually_exclusive_group()
    amount.add_argument("--requests", metavar="N", type=_count, help="per concurrency; default 4 for each stream")
    amount.add_argument("--seconds", metavar="S", type=float, help="start requests for so long at each concurrency")
    prompts = command.add_mutually_exclusive_group()
    prompts.add_argument("--prompt-tokens", metavar="N", type=_count, default=128, help="of random words; default 128")
    prompts.add_argument(
        "--prompts", metavar="FILE", help='JSON lines: {"prompt": "..."}, or {"messages": [...]} for chat'
    )
    command.add_argument("--max-tokens", metavar="N", type=_count, default=64, help="per answer; default 64")
    command.add_argument(
        "--ignore-eos", action="store_true", help="send ignore_eos, where the server knows it: every answer full length"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else; keys below")


def _add_replay(commands: Any) -> None:
    summary = "Run a request log again; exit code 1 when a deterministic answer differs, or one fails."
    command = add_command(commands, "replay", _replay, summary)
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = replay.JSON_KEYS
    command.add_argument("log", metavar="FILE", help="what msds serve --request-log wrote")
    _add_server(command)
    command.add_argument("--model", metavar="NAME", help="instead of the recorded name")
    command.add_argument("--concurrency", metavar="N", type=_count, default=8, help="requests at a time; default 8")
    command.add_argument(
        "--speed", choices=("realtime", "max"), default="max", help="at the recorded times, or at once (default)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else; keys below")


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", required=True, metavar="URL", help="such as http://127.0.0.1:8000")
    command.add_argument("--api-key", metavar="KEY", help=f"default: the environment's {API_KEY_VARIABLE}")
    command.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=600.0, help="longest silence of the server; default 600"
    )


def _server(options: argparse.Namespace) -> Server:
    if not options.timeout > 0:
        raise OptionError(f"timeout is {options.timeout}: it must be above 0")
    key = options.api_key or os.environ.get(API_KEY_VARIABLE) or None
    return Server.at(options.url, api_key=key, timeout=options.timeout)


def _bench(options: argparse.Namespace) -> int:
    if options.seconds is not None and not options.seconds > 0:
        raise OptionError(f"seconds is {options.seconds}: it must be above 0")
    server, chat = _server(options), not options.completions
    prompts = bench.file_prompts(options.prompts, chat=chat) if options.prompts else None
    question = bench.Question(options.model or server.model(), chat, options.max_tokens, options.ignore_eos)
    say = _progress()
    say("trying one request")
    run = bench.Bench(server, question, prompts or bench.synthetic_prompts(server, question, options.prompt_tokens))
    run.try_out()
    interrupted = False
    try:
        for concurrency in options.concurrency:
            run.measure(concurrency, requests=options.requests, seconds=options.seconds, progress=say)
    except KeyboardInterrupt:
        interrupted = True
    say("")
    asked = f"the prompts of {options.prompts}" if options.prompts else f"prompts of {options.prompt_tokens} tokens"
    report = {"url": options.url, "prompts": asked, "interrupted": interrupted, **run.to_json()}
    _print(report, bench.render, as_json=options.json)
    return int(any(level["failed"] for level in report["levels"]))


def _replay(options: argparse.Namespace) -> int:
    server, recording, say = _server(options), replay.read_log(options.log), _progress()
    comparison, interrupted = replay.Comparison(), False
    try:
        replay.replay(
            recording,
            server,
            concurrency=options.concurrency,
            realtime=options.speed == "realtime",
            model=options.model,
            comparison=comparison,
            progress=say,
        )
    except KeyboardInterrupt:
        interrupted = True
    say("")
    skipped = [{"line": line, "reason": reason} for line, reason in recording.skipped]
    report = {"url": options.url, "log": options.log, "interrupted": interrupted, **comparison.to_json()}
    _print({**report, "skipped": skipped}, replay.render, as_json=options.json)
    return int(not comparison.passed)


def _print(report: dict[str, Any], render: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """The report, and then, where it was interrupted, the interrupt goes on."""
    print(json.dumps(report, ensure_ascii=False) if as_json else render(report), flush=True)
    if report["interrupted"]:
        raise KeyboardInterrupt


def _progress() -> Callable[[str], None]:
    """Says where the work is on standard error: one changing line on a terminal, else a line for what is new in kind.

    An empty text ends the changing line.
    """
    if sys.stderr.isatty():
        return lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    said: set[str] = set()

    def say(text: str) -> None:
        topic = text.partition(":")[0]
        if topic and topic not in said:
            said.add(topic)
            print(f"msds: {topic}", file=sys.stderr, flush=True)

    return say


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))
