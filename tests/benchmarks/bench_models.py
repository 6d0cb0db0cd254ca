"""msds against transformers: same weights, same threads, float32, both in one run and in turn.

    python -m tests.benchmarks.bench_models --model mid
    python -m tests.benchmarks.bench_models --model smollm2 --threads 1 --json smollm2.json

What is measured and how to read it: tests/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msds.config import max_context, read_config
from tests.benchmarks import machine, subjects
from tests.benchmarks.engines import Remote, Setting
from tests.benchmarks.report import (
    Line,
    Spread,
    lines_table,
    machine_text,
    part_costs,
    parts_table,
    table,
    write_json,
)

ENGINES = ("msds", "transformers")


@dataclass(frozen=True)
class Plan:
    """How much is measured. contexts: tokens in the cache at the last of `steps` decode steps. generated: tokens of
    the end-to-end row, after `prompt` ones. parts_context: where the decode step is taken apart."""

    prefill: int = 512
    contexts: tuple[int, ...] = (128, 1024, 1040, 4096)
    batches: tuple[int, ...] = (1, 8)
    steps: int = 16
    rounds: int = 7
    prompt: int = 128
    generated: int = 32
    parts_context: int = 512


FULL = Plan()
QUICK = Plan(contexts=(128,), steps=4, rounds=2, generated=4)  # one context shape, so few compilations


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print Markdown to standard output and progress to standard error."""
    options = _parser().parse_args(arguments)
    os.environ.update(GLOG_v="3", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")
    folder = subjects.resolve(options.model)
    config = read_config(folder)
    plan = QUICK if options.quick else FULL
    rounds = options.rounds or plan.rounds
    if max_context(config) < plan.prefill:
        sys.exit(f"{folder} has a context of {max_context(config)} tokens: too few for a prefill of {plan.prefill}")
    contexts = [context for context in plan.contexts if context <= max_context(config)]
    longest = max(plan.prefill, *contexts)
    setting = Setting(folder, options.threads, longest, max(plan.batches), config.vocab_size)
    described = {"model": options.model, **machine.describe(options.threads)}
    machine.warn_if_busy()
    _say("memory bandwidth")
    everywhere = described["cores"]
    bandwidth = machine.measure_bandwidth(sorted({1, options.threads, everywhere}))
    subjects.read_once(folder)
    bench = Bench({kind: Remote(kind, setting) for kind in ENGINES}, rounds, bandwidth[options.threads])
    bench.start()
    bench.measure(plan, contexts)
    parts = [] if options.no_parts else part_costs(bench.parts(plan.parts_context))
    bench.close()
    described |= {"load_at_end": machine.load_average(), "bandwidth_bytes_per_second": bandwidth}
    content = {
        "machine": described,
        "rounds": rounds,
        "lines": bench.lines,
        "compiled": bench.compiled,
        "agreement": bench.agreement,
        "parts": parts,
    }
    print(markdown(content))
    if options.json:
        write_json(options.json, content)
    machine.warn_if_busy()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_models", description="msds against transformers on the same weights")
    parser.add_argument("--model", required=True, help="mid, smollm2, or a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--rounds", type=int, help=f"turns of each measurement; default {FULL.rounds}")
    parser.add_argument("--quick", action="store_true", help="a minute to see that it works; not for publication")
    parser.add_argument("--no-parts", action="store_true", help="do not take the decode step apart")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    return parser


class Bench:
    """Both engines and what has been measured of them so far."""

    def __init__(self, engines: dict[str, Remote], rounds: int, bandwidth: float) -> None:
        self.engines = engines
        self.rounds = rounds
        self.bandwidth = bandwidth
        self.lines: list[Line] = []
        self.compiled: list[tuple[str, float]] = []
        self.agreement: dict[str, float] = {}
        self._weight_bytes = self._cache_bytes = 0

    def start(self) -> None:
        """Imports, loading and compilation, once each: they cannot be repeated in one process."""
        base = {}
        for method, name in (("imports", "imports"), ("load", "loading, files in the page cache")):
            _say(name)
            self._once(name, "s", method)
            base[method] = {kind: engine.call("peak_memory") for kind, engine in self.engines.items()}
        for method, name in (("imports", "peak memory after imports"), ("load", "peak memory after loading")):
            self.lines.append(Line(name, "MiB", {kind: _mebibytes(size) for kind, size in base[method].items()}))
        _say("compiling")
        self.compiled = self.engines["msds"].call("compile")
        total = sum(seconds for _, seconds in self.compiled)
        name = f"compiling all {len(self.compiled)} shapes"
        self.lines.append(Line(name, "s", {"msds": Spread.of([total])}))
        self._weight_bytes, self._cache_bytes = self.engines["msds"].call("bytes_per_token")

    def measure(self, plan: Plan, contexts: Sequence[int]) -> None:
        """Prefill, decode and generation, the engines taking turns."""
        self._measure_prefill(plan.prefill)
        for context in contexts:
            _say(f"filling {context} tokens")
            for engine in self.engines.values():
                engine.call("fill", context - plan.steps)
            for batch in plan.batches:
                self._measure_decode(batch, context, plan.steps)
        for batch in plan.batches:
            name = f"generate(): {plan.prompt} + {plan.generated} tokens, batch {batch}"
            taken = self._in_turn(name, "generate", batch, plan.prompt, plan.generated)
            rates = {kind: [batch * plan.generated / seconds for seconds in all_] for kind, all_ in taken.items()}
            self.lines.append(Line(name, "tok/s", {kind: Spread.of(values) for kind, values in rates.items()}))
        peaks = {kind: _mebibytes(engine.call("peak_memory")) for kind, engine in self.engines.items()}
        self.lines.append(Line("peak memory of the whole run", "MiB", peaks))

    def parts(self, context: int) -> Any:
        """Variants of msds' decode step; see tests.benchmarks.parts. Last, because it takes memory of its own."""
        _say(f"parts of a decode step at context {context}")
        return self.engines["msds"].call("parts", context, self.rounds)

    def close(self) -> None:
        """Ends both processes."""
        for engine in self.engines.values():
            engine.close()

    def _measure_prefill(self, count: int) -> None:
        name = f"prefill, {count} tokens"
        results = self._in_turn(name, "prefill", count)
        rates = {kind: Spread.of([count / seconds for seconds, _ in rounds]) for kind, rounds in results.items()}
        self.lines.append(Line(name, "tok/s", rates))
        ours, theirs = (results[kind][-1][1] for kind in ENGINES)
        self.agreement[f"{name}: largest difference of the logits, of the largest logit"] = float(
            np.abs(ours - theirs).max() / np.abs(theirs).max()
        )

    def _measure_decode(self, batch: int, context: int, steps: int) -> None:
        name = f"decode, batch {batch}, context {context}"
        start = context - steps
        results = self._in_turn(name, "decode", batch, start, steps)
        rates = {
            kind: Spread.of([batch * steps / sum(turn.seconds) for turn in rounds]) for kind, rounds in results.items()
        }
        shares = {}
        if batch == 1:
            read = self._weight_bytes + self._cache_bytes * (context - steps / 2)
            shares = {kind: rate.median * read / self.bandwidth for kind, rate in rates.items()}
        self.lines.append(Line(name, "tok/s", rates, shares))
        ours, theirs = (results[kind][-1].chosen for kind in ENGINES)
        self.agreement[f"{name}: equal greedy choices"] = float((ours == theirs).mean())

    def _in_turn(self, name: str, method: str, *arguments: Any) -> dict[str, list[Any]]:
        """One discarded turn of each engine, then `rounds` turns, alternating."""
        _say(name)
        results: dict[str, list[Any]] = {kind: [] for kind in self.engines}
        for turn in range(self.rounds + 1):
            for kind, engine in self.engines.items():
                result = engine.call(method, *arguments)
                if turn:
                    results[kind].append(result)
        return results

    def _once(self, name: str, unit: str, method: str) -> None:
        values = {kind: Spread.of([engine.call(method)]) for kind, engine in self.engines.items()}
        self.lines.append(Line(name, unit, values))


def markdown(content: dict[str, Any]) -> str:
    """Everything that was measured, ready to be pasted."""
    described = content["machine"]
    bandwidth = described["bandwidth_bytes_per_second"]
    streams = ", ".join(f"{rate / 1e9:.1f} GB/s with {threads}" for threads, rate in bandwidth.items())
    sections = [
        f"### {described['model']}, float32, {described['threads']} threads",
        machine_text(described),
        f"Streaming read of float32: {streams} thread(s). {content['rounds']} rounds; median (lowest-highest).",
        lines_table(content["lines"], ENGINES),
        table(["msds compiles", "s"], [[name, f"{seconds:.1f}"] for name, seconds in content["compiled"]]),
    ]
    if content["parts"]:
        sections.append(parts_table(content["parts"]))
    checks = [[name, f"{value:.2g}"] for name, value in content["agreement"].items()]
    sections.append(table(["do both compute the same?", ""], checks))
    return "\n\n".join(sections)


def _mebibytes(size: int) -> Spread:
    return Spread.of([size / 2**20])


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
