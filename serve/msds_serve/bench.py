"""Measure a server: streams at several concurrencies, and what they wait. Any OpenAI-compatible server.

One thread a stream, a new connection a request, all answers streamed. Each text is drawn anew, so that no prefix
cache answers for the model.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msds.errors import OptionError
from msds_serve.client import CHAT, COMPLETIONS, Exchange, Server, ServerError, in_parallel

JSON_KEYS = """\
keys of --json:
  url, model, endpoint         what was measured
  prompts, max_tokens          what each request asked for
  token_counts                 "usage": the server's counts; "chunks": it sends none, so chunks were counted; "mixed"
  interrupted                  whether ^C ended the run early
  levels                       one object per concurrency:
    concurrency, seconds       streams at a time; from the first request to the end of the last answer
    ok, failed, first_error    requests, and why the first that failed did (null where none did)
    prompt_tokens, output_tokens                    sums over the requests that are ok
    output_tokens_per_second, requests_per_second   over `seconds`
    finish_reasons             how many answers ended with "stop", "length", ...
    ttft_ms                    {p50, p90, p99} from sending a request to the first text of its answer
    tpot_ms                    the same of the mean time per output token of an answer, after its first
    itl_ms                     the same of the time between two chunks of an answer
    e2e_ms                     the same from sending a request to the end of its answer
  A percentile is null where nothing was measured."""

PERCENTILES = (50, 90, 99)
REQUESTS_PER_STREAM = 4
_RETRY_SECONDS = 0.2  # after a failed request, so that a server that refuses is not flooded
_WORDS = "time year people way day man thing woman life child world school state family student group country hand"


@dataclass(frozen=True)
class Question:
    """What every request asks, besides its prompt. chat: which endpoint. max_tokens: of each answer."""

    model: str
    chat: bool
    max_tokens: int
    ignore_eos: bool = False

    @property
    def path(self) -> str:
        """The endpoint."""
        return CHAT if self.chat else COMPLETIONS

    def body(self, prompt: str | list[Any], max_tokens: int | None = None) -> dict[str, Any]:
        """The body for a text, or (chat) for a list of messages."""
        if self.chat:
            messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            asked: dict[str, Any] = {"messages": messages}
        else:
            asked = {"prompt": prompt}
        fixed = {"model": self.model, "max_tokens": max_tokens or self.max_tokens, "temperature": 0, "stream": True}
        extra = {"ignore_eos": True} if self.ignore_eos else {}
        return {**fixed, **asked, "stream_options": {"include_usage": True}, **extra}


@dataclass
class Level:
    """What was measured at one concurrency."""

    concurrency: int
    seconds: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def ok(self) -> list[Exchange]:
        """The exchanges that brought a whole answer."""
        return [exchange for exchange in self.exchanges if exchange.error is None]

    @property
    def first_error(self) -> str | None:
        """Why the first request that failed did."""
        return next((exchange.error for exchange in self.exchanges if exchange.error is not None), None)

    def to_json(self) -> dict[str, Any]:
        """As `JSON_KEYS` says."""
        ok, span = self.ok, max(self.seconds, 1e-9)
        output = sum(output_tokens(exchange) for exchange in ok)
        reasons = Counter(choice["finish_reason"] for exchange in ok for choice in exchange.answer.choices)
        gaps = [after - before for exchange in ok for before, after in itertools.pairwise(exchange.piece_times)]
        return {
            "concurrency": self.concurrency,
            "seconds": round(self.seconds, 3),
            "ok": len(ok),
            "failed": len(self.exchanges) - len(ok),
            "first_error": self.first_error,
            "prompt_tokens": sum(int((exchange.answer.usage or {}).get("prompt_tokens") or 0) for exchange in ok),
            "output_tokens": output,
            "output_tokens_per_second": round(output / span, 2),
            "requests_per_second": round(len(ok) / span, 3),
            "finish_reasons": dict(sorted(reasons.items())),
            "ttft_ms": percentiles([exchange.piece_times[0] for exchange in ok if exchange.piece_times]),
            "tpot_ms": percentiles([seconds for exchange in ok if (seconds := _per_token(exchange)) is not None]),
            "itl_ms": percentiles(gaps),
            "e2e_ms": percentiles([exchange.seconds for exchange in ok]),
        }


@dataclass
class Bench:
    """A run over several levels; `levels` grows, so that an interrupt leaves what was measured."""

    server: Server
    question: Question
    prompts: Iterator[str | list[Any]]
    levels: list[Level] = field(default_factory=list)

    def measure(
        self, concurrency: int, *, requests: int | None, seconds: float | None, progress: Callable[[str], None]
    ) -> Level:
        """Keep `concurrency` streams busy until so many requests were sent, or for so long; those begun are ended.

        An interrupt leaves the level with the answers so far and is passed on.
        """
        level = Level(concurrency)
        self.levels.append(level)
        total = None if seconds is not None else requests or REQUESTS_PER_STREAM * concurrency
        start = time.perf_counter()

        def bodies() -> Iterator[dict[str, Any]]:
            for prompt in itertools.islice(self.prompts, total):
                if seconds is not None and time.perf_counter() - start >= seconds:
                    return
                yield self.question.body(prompt)

        for exchange in in_parallel(bodies(), self._ask, concurrency):
            level.exchanges.append(exchange)
            level.seconds = max(level.seconds, exchange.sent + exchange.seconds - start)
            of = f"of {total}" if total is not None else f"in {level.seconds:.0f} of {seconds:g} s"
            progress(f"{concurrency} streams: {len(level.exchanges)} {of} requests done")
        return level

    def _ask(self, body: Mapping[str, Any]) -> Exchange:
        exchange = self.server.ask(self.question.path, body)
        if exchange.error is not None:
            time.sleep(_RETRY_SECONDS)
        return exchange

    def try_out(self) -> None:
        """One request that is not counted; ServerError with the reason when it fails, before anything is measured."""
        exchange = self.server.ask(self.question.path, self.question.body(next(self.prompts)))
        if exchange.error is not None:
            raise ServerError(f"the first request failed: {exchange.error}")

    def to_json(self) -> dict[str, Any]:
        """Endpoint, token counts and levels, as `JSON_KEYS` says."""
        counted = {
            "usage" if exchange.answer.usage is not None else "chunks" for level in self.levels for exchange in level.ok
        }
        return {
            "model": self.question.model,
            "endpoint": self.question.path,
            "max_tokens": self.question.max_tokens,
            "token_counts": counted.pop() if len(counted) == 1 else "mixed" if counted else "usage",
            "levels": [level.to_json() for level in self.levels],
        }


def synthetic_prompts(server: Server, question: Question, num_tokens: int) -> Iterator[str]:
    """Endless texts of about `num_tokens` tokens, as the server counts them, its chat template included.

    Two short requests find out how many tokens a word has; a server without usage is taken to have one for each.
    """
    few, many = (_prompt_tokens(server, question, count) for count in (8, 24))
    words = num_tokens
    if few is not None and many is not None and many > few:
        per_word = (many - few) / 16
        words = round((num_tokens - (few - 8 * per_word)) / per_word)
        if words < 2:
            raise OptionError(
                f"prompt_tokens is {num_tokens}: this server counts {few} for a prompt of 8 words already; ask for more"
            )
    return (_text(words, seed) for seed in itertools.count(1000))


def file_prompts(path: str, *, chat: bool) -> Iterator[str | list[Any]]:
    """Endlessly the prompts of a JSON lines file: each line a string, {"prompt": ...} or, for chat, {"messages": ...}.

    OptionError names the line that is none of these.
    """
    prompts: list[str | list[Any]] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"prompts {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_file_prompt(line, f"{path}, line {number}", chat=chat))
    if not prompts:
        raise OptionError(f"prompts {path} holds no line")
    return itertools.cycle(prompts)


def _file_prompt(line: str, where: str, *, chat: bool) -> str | list[Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{where}, is not JSON: {error}") from None
    if isinstance(entry, Mapping):
        if chat and isinstance(entry.get("messages"), list):
            return list(entry["messages"])
        entry = entry.get("prompt")
    if not isinstance(entry, str) or not entry:
        wanted = '{"messages": [...]}, {"prompt": "..."}' if chat else '{"prompt": "..."}'
        raise OptionError(f"{where}, must be {wanted} or a string")
    return entry


def output_tokens(exchange: Exchange) -> int:
    """Tokens of an answer: as the server counts, or the chunks where it does not."""
    counted = (exchange.answer.usage or {}).get("completion_tokens")
    return int(counted) if counted is not None else exchange.answer.num_pieces


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """{p50, p90, p99} in milliseconds, interpolated between the two nearest; None of nothing."""
    if not seconds:
        return {f"p{share}": None for share in PERCENTILES}
    values = [seconds[0]] * 99 if len(seconds) == 1 else statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{share}": round(1e3 * values[share - 1], 3) for share in PERCENTILES}


def render(report: Mapping[str, Any]) -> str:
    """The table of a report, and what a reader must know of it."""
    groups = (("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms"), ("ITL ms", "itl_ms"), ("end to end ms", "e2e_ms"))
    shares = "".join(f"{f'p{share}':>8}" for share in PERCENTILES)
    lines = [
        f"{report['model']} at {report['url']}{report['endpoint']}: {report['prompts']}, max_tokens "
        f"{report['max_tokens']}",
        "",
        " " * 39 + "".join(f"{title:>26}" for title, _ in groups),
        f"{'streams':>7}{'ok':>6}{'failed':>8}{'tok/s':>10}{'req/s':>8}" + f"  {shares}" * len(groups),
    ]
    for level in report["levels"]:
        row = f"{level['concurrency']:>7}{level['ok']:>6}{level['failed']:>8}"
        row += f"{level['output_tokens_per_second']:>10.1f}{level['requests_per_second']:>8.2f}"
        for _, key in groups:
            row += "  " + "".join(f"{_milliseconds(level[key][f'p{share}']):>8}" for share in PERCENTILES)
        lines.append(row)
    num_ok = max(1, sum(level["ok"] for level in report["levels"]))
    prompt = sum(level["prompt_tokens"] for level in report["levels"]) / num_ok
    output = sum(level["output_tokens"] for level in report["levels"]) / num_ok
    lines += ["", f"on average {prompt:.1f} prompt tokens and {output:.1f} output tokens a request"]
    if report["token_counts"] != "usage":
        lines.append("the server sends no usage (or not always): chunks were counted instead of tokens")
    for level in report["levels"]:
        if level["first_error"] is not None:
            lines.append(f"{level['concurrency']} streams, first failure: {level['first_error']}")
    return "\n".join(lines)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _per_token(exchange: Exchange) -> float | None:
    """Mean seconds per output token after the first; None where there is only one."""
    times, tokens = exchange.piece_times, output_tokens(exchange)
    return (times[-1] - times[0]) / (tokens - 1) if tokens > 1 and times else None


def _prompt_tokens(server: Server, question: Question, num_words: int) -> int | None:
    exchange = server.ask(question.path, question.body(_text(num_words, num_words), max_tokens=1))
    if exchange.error is not None:
        raise ServerError(f"the first request failed: {exchange.error}")
    count = (exchange.answer.usage or {}).get("prompt_tokens")
    return None if count is None else int(count)


def _text(num_words: int, seed: int) -> str:
    """Words that are one token in most vocabularies, others for each seed."""
    rng = random.Random(seed)
    words = _WORDS.split()
    return " ".join(["The", *(rng.choice(words) for _ in range(num_words - 1))])
