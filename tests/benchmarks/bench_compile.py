"""How long one waits: compilation against depth, and `msds generate` until the first token.

    python -m tests.benchmarks.bench_compile --model smollm2

What is measured and how to read it: tests/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import machine, subjects
from tests.benchmarks.first_token import PROMPTS
from tests.benchmarks.report import machine_text, table, write_json

DEPTHS = (4, 8, 16, 32, 61)
QUICK_DEPTHS = (4, 8)
STEPS = ("prefill", "decode")
BLOCKS, BLOCK_SIZE, CHUNK = 32, 16, 64


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print Markdown to standard output and progress to standard error."""
    options = _parser().parse_args(arguments)
    os.environ.update(GLOG_v="3", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    described: dict[str, Any] = machine.describe(len(os.sched_getaffinity(0)))
    machine.warn_if_busy()
    compiled = measure_depths(QUICK_DEPTHS if options.quick else DEPTHS)
    folder = subjects.resolve(options.model)
    subjects.read_once(folder)
    rounds = 1 if options.quick else options.rounds
    phases = [_first_token(folder) for _ in range(rounds)]
    command = [_command(folder) for _ in range(rounds)]
    described["load_at_end"] = machine.load_average()
    content = {"machine": described, "compiled": compiled, "first_token": phases, "command": command}
    sections = [
        machine_text(described),
        depths_table(compiled),
        f"{options.model}, median of {rounds} fresh processes, files in the page cache:",
        first_token_table(phases, command),
    ]
    print("\n\n".join(sections))
    if options.json:
        write_json(options.json, content)
    machine.warn_if_busy()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_compile", description="compile time and time to the first token")
    parser.add_argument("--model", default="smollm2", help="smollm2 (default) or a Hugging Face folder with a chat")
    parser.add_argument("--rounds", type=int, default=3, help="cold starts; default 3")
    parser.add_argument("--quick", action="store_true", help="see that it works; not for publication")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    return parser


def measure_depths(depths: Sequence[int]) -> dict[int, dict[str, float]]:
    """Seconds to compile each step of a DeepSeek-V3-shaped model of each depth, every depth in a fresh process."""
    found = {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for depth in depths:
            print(f"compiling {depth} layers ...", file=sys.stderr, flush=True)
            found[depth] = pool.apply(compile_seconds, (depth,))
    return found


def compile_seconds(depth: int) -> dict[str, float]:
    """First call of each step less its second, through the Runner that serves."""
    from msds.config import read_config
    from msds.engine.batch import Row
    from msds.engine.runner import Runner
    from msds.model import Model
    from msds.models import model_functions
    from msds_graphs.plan import Plan
    from msds_graphs.specs import init_tree

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(subjects.V3_TINY | {"num_hidden_layers": depth}))
        config = read_config(folder)
        functions = model_functions(config)
        params = init_tree(functions.spec(config), seed=0)
        model = Model(folder, config, functions.derive(params, config=config), Plan(), functions, "float32")
    runner = Runner(
        model,
        num_blocks=BLOCKS + 1,
        block_size=BLOCK_SIZE,
        prefill_buckets=[{"S": 1, "Q": CHUNK, "B": BLOCKS}],
        decode_buckets=[{"S": 1, "Q": 1, "B": BLOCKS}],
    )
    context, blocks = BLOCKS * BLOCK_SIZE, tuple(range(1, BLOCKS + 1))
    seconds = {}
    for name, step, count in zip(STEPS, (runner.prefill, runner.decode), (CHUNK, 1), strict=True):
        rows = [Row([2] * count, context - count, blocks)]
        taken = []
        for _ in range(2):
            start = time.perf_counter()
            step(rows)
            taken.append(time.perf_counter() - start)
        seconds[name] = taken[0] - taken[1]
    return seconds


def depths_table(compiled: dict[int, dict[str, float]]) -> str:
    """Seconds by depth, and the straight line through them."""
    rows = [[str(depth), *(f"{seconds[step]:.1f}" for step in STEPS)] for depth, seconds in compiled.items()]
    depths = np.array(list(compiled))
    lines = []
    for step in STEPS:
        taken = np.array([seconds[step] for seconds in compiled.values()])
        slope, intercept = np.polyfit(depths, taken, 1)
        worst = np.abs(taken - (slope * depths + intercept)).max()
        lines.append(f"{step}: {slope:.3f} s per layer + {intercept:.1f} s, at most {worst:.1f} s off the line.")
    return table(["layers", *(f"compile {step}, s" for step in STEPS)], rows) + "\n\n" + "\n".join(lines)


def _first_token(folder: Path) -> dict[str, float]:
    print("cold start, taken apart ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "tests.benchmarks.first_token", str(folder), repr(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def _command(folder: Path) -> dict[str, Any]:
    """The command itself: seconds until the first byte of its answer, until it has ended, and the answer."""
    print("msds generate ...", file=sys.stderr, flush=True)
    arguments = ["generate", str(folder), "--chat", PROMPTS[0], "--max-tokens", "2", "--temperature", "0"]
    command = [sys.executable, "-c", "import sys; from msds_serve.cli import main; sys.exit(main())", *arguments]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        answer = process.stdout.read(1)
        first = time.perf_counter() - start
        answer += process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"msds generate ended with {process.returncode}")
    return {"first byte": first, "end": time.perf_counter() - start, "answer": answer.decode()}


def first_token_table(phases: Sequence[dict[str, float]], command: Sequence[dict[str, Any]]) -> str:
    """Cold and warm, phase by phase; what compiles is the cold call less the warm one."""
    at = {name: statistics.median(run[name] for run in phases) for name in phases[0]}
    ready = sum(at[name] for name in ("imports", "config and headers", "loading weights", "the rest of LLM()"))
    host = at["cold host"], at["warm host"]
    rows: list[tuple[str, float, float]] = [
        ("interpreter and imports", at["imports"], 0),
        ("config and headers", at["config and headers"], 0),
        ("loading weights", at["loading weights"], 0),
        ("binding, cache, tokenizer", at["the rest of LLM()"], 0),
        ("template, encoding, sampling", *host),
        ("compiling prefill", at["cold prefill"] - at["warm prefill"], 0),
        ("first prefill", at["warm prefill"], at["warm prefill"]),
        ("**first token**", ready + host[0] + at["cold prefill"], host[1] + at["warm prefill"]),
        ("compiling decode", at["cold decode"] - at["warm decode"], 0),
        ("first decode", at["warm decode"], at["warm decode"]),
    ]
    cells = [[name, f"{cold:.2f}", f"{warm:.3f}" if warm else "-"] for name, cold, warm in rows]
    for name, key in (("`msds generate`: first byte of the answer", "first byte"), ("`msds generate`: ended", "end")):
        cells.append([name, f"{statistics.median(run[key] for run in command):.2f}", "-"])
    return table(["", "cold, s", "second prompt, s"], cells)


if __name__ == "__main__":
    main()
