"""What a process takes against what its plan said: load, compile every shape, fill the cache with texts, generate.

    python -m tests.benchmarks.bench_memory --model smollm2

What is measured and how to read it: tests/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msds.planning import make_demand, make_plan
from tests.benchmarks import machine, subjects
from tests.benchmarks.report import machine_text, table, write_json

NEW_TOKENS = 8
"""Of each of the last texts; the rest of them is prompt."""
MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in a process of its own, print Markdown to standard output and progress to standard error."""
    options = _parser().parse_args(arguments)
    folder = subjects.resolve(options.model)
    described: dict[str, Any] = machine.describe(len(os.sched_getaffinity(0)))
    asked = {"folder": str(folder), "max_model_len": options.max_model_len, "num_speculative_tokens": options.drafts}
    # planned first: what is free is what the process will find
    planned = plan_bytes(str(folder), options.max_model_len, options.drafts)
    environment = os.environ | {"GLOG_v": "3", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.benchmarks.bench_memory", "--measure", json.dumps(asked)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    machine_now = {**described, "model": options.model, "load_at_end": machine.load_average()}
    content = {"machine": machine_now, "planned": planned, "measured": measured}
    print(markdown(content))
    if options.json is not None:
        write_json(options.json, content)


def plan_bytes(folder: str, max_model_len: int | None, drafts: int) -> dict[str, int]:
    """The plan's parts by name, in bytes, for one process."""
    memory = make_plan(make_demand(folder, "cpu:1", max_model_len=max_model_len, mtp=drafts)).memory
    return {
        "weights": memory.weight_bytes,
        "cache": memory.cache_bytes,
        "activations": memory.activations,
        "graphs, process": memory.runtime,
    }


def measure(folder: str, max_model_len: int | None, num_speculative_tokens: int) -> dict[str, int]:
    """Phase -> peak resident bytes of this process after it, and `arrays`: bytes of the bound weights and cache."""
    import msds
    from msds_graphs.trees import tree_flatten

    llm = msds.LLM(
        folder, max_model_len=max_model_len, num_speculative_tokens=num_speculative_tokens, progress=sys.stderr.isatty()
    )
    runner = llm.engine.runner
    arrays = sum(leaf.nbytes for tree in (llm.model.params, runner.cache) for leaf in tree_flatten(tree)[0])
    found = {"arrays": arrays, "loaded": _peak()}
    runner.warm_up(lambda line: print(line, file=sys.stderr))
    found["compiled"] = _peak()
    # texts that differ from their first token on, so that none shares a block with another
    length, vocab = llm.max_model_len - NEW_TOKENS, llm.model.config.vocab_size
    texts = [[(7 + text + index) % vocab for index in range(length)] for text in range(llm.options.max_num_seqs)]
    llm.generate(texts, msds.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    found["generated"] = _peak()
    return found


def _peak() -> int:
    """VmHWM of this process in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def markdown(content: Mapping[str, Any]) -> str:
    """One row of the plan against the process, and what both are made of."""
    planned, measured = content["planned"], content["measured"]
    total, peak = sum(planned.values()), measured["generated"]
    arrays = planned["weights"] + planned["cache"]
    rows = [
        ["weights and cache", _mib(arrays), _mib(measured["arrays"]), f"{arrays / measured['arrays']:.3f}"],
        ["whole process, at its peak", _mib(total), _mib(peak), f"{total / peak:.2f}"],
    ]
    parts = ", ".join(f"{name} {_mib(size)}" for name, size in planned.items())
    phases = ", ".join(f"{name} {_mib(measured[name])}" for name in ("loaded", "compiled", "generated"))
    return "\n\n".join(
        [
            machine_text(content["machine"]),
            table(["MiB", "planned", "measured", "planned / measured"], rows),
            f"Planned, MiB: {parts}. Peaks after each phase, MiB: {phases}.",
        ]
    )


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_memory", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="mid, smollm2 or a folder")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="default: as the engine's")
    parser.add_argument("--drafts", type=int, default=0, metavar="N", help="draft tokens of MTP")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        asked = json.loads(sys.argv[2])
        print(json.dumps(measure(asked.pop("folder"), **asked)))
    else:
        main()
