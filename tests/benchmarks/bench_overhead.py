"""What the engine takes beside its graphs: seconds outside of compiled calls over seconds inside, eight texts at once.

`python -m tests.benchmarks.bench_overhead MODEL`, after a round that compiles; medians of three.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import msds
from msds import SamplingParams
from msds_graphs.compile import Compiled

PROMPT_TOKENS, NEW_TOKENS, BATCH, ROUNDS = 64, 48, 8, 3
LOADS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
    "sampled, top-p 0.9, 2 log-probabilities": SamplingParams(
        temperature=1.0, top_p=0.9, seed=1, logprobs=2, max_tokens=NEW_TOKENS, ignore_eos=True
    ),
}


def main() -> None:
    """Print a row per load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="checkpoint folder")
    options = parser.parse_args()
    inside: list[float] = []
    call = Compiled._call

    def timed(self: Compiled, *arguments: Any) -> Any:
        start = time.perf_counter()
        outputs = call(self, *arguments)
        inside.append(time.perf_counter() - start)
        return outputs

    Compiled._call = timed  # type: ignore[method-assign]
    llm = msds.LLM(options.model, max_model_len=256, max_num_seqs=BATCH, progress=False)
    generator = np.random.default_rng(0)

    def prompts() -> list[list[int]]:
        vocabulary = llm.model.config.vocab_size
        return [generator.integers(10, vocabulary - 10, PROMPT_TOKENS).tolist() for _ in range(BATCH)]

    print("| load | outside / inside | ms per call | tok/s |\n| --- | ---: | ---: | ---: |")
    for name, sampling in LOADS.items():
        llm.generate(prompts(), sampling)
        rows = []
        for _ in range(ROUNDS):
            texts = prompts()
            inside.clear()
            start = time.perf_counter()
            llm.generate(texts, sampling)
            total = time.perf_counter() - start
            rows.append((total / sum(inside) - 1, 1e3 * float(np.mean(inside)), BATCH * NEW_TOKENS / total))
        outside, milliseconds, speed = np.median(rows, axis=0)
        print(f"| {name} | {outside:.1%} | {milliseconds:.1f} | {speed:.1f} |", flush=True)


if __name__ == "__main__":
    main()
