"""The commands that talk to a running server: their options, and what they print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from msds.errors import OptionError
from msds_serve.bench import JSON_KEYS, Bench, Question, file_prompts, render, synthetic_prompts
from msds_serve.client import Server

API_KEY_VARIABLE = "MSDS_API_KEY"

AddCommand = Callable[[Any, str, Any, str], argparse.ArgumentParser]


def add_client_commands(commands: Any, add_command: AddCommand) -> None:
    """Add `bench` to the subparsers; `add_command(commands, name, run, summary)` makes a parser."""
    _add_bench(commands, add_command)


def _add_bench(commands: Any, add_command: AddCommand) -> None:
    command = add_command(commands, "bench", _bench, "Measure any OpenAI-compatible server under load.")
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = JSON_KEYS
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
    prompts = file_prompts(options.prompts, chat=chat) if options.prompts else None
    question = Question(options.model or server.model(), chat, options.max_tokens, options.ignore_eos)
    say = _progress()
    say("trying one request")
    bench = Bench(server, question, prompts or synthetic_prompts(server, question, options.prompt_tokens))
    bench.try_out()
    interrupted = False
    try:
        for concurrency in options.concurrency:
            bench.measure(concurrency, requests=options.requests, seconds=options.seconds, progress=say)
    except KeyboardInterrupt:
        interrupted = True
    say("")
    asked = f"the prompts of {options.prompts}" if options.prompts else f"prompts of {options.prompt_tokens} tokens"
    report = {"url": options.url, "prompts": asked, "interrupted": interrupted, **bench.to_json()}
    print(json.dumps(report, ensure_ascii=False) if options.json else render(report))
    if interrupted:
        raise KeyboardInterrupt
    return int(any(level["failed"] for level in report["levels"]))


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
