"""One cold start of msds, taken apart. Run as a process: prints one JSON object of seconds.

python -m tests.benchmarks.first_token MODEL MONOTONIC_SECONDS_WHEN_STARTED
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

PROMPTS = ("What is the capital of France?", "Write one sentence about the sea.")


class Stopwatch:
    """Seconds spent in wrapped calls, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Time `owner.attribute` from now on. Calls of one name must not nest."""
        original: Callable[..., Any] = getattr(owner, attribute)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, attribute, timed)

    def take(self, *names: str) -> list[float]:
        """The seconds of these names, which start again at 0."""
        return [self.seconds.pop(name, 0.0) for name in names]


def main(folder: str, started: float) -> None:
    """Load with the defaults of `msds generate` and answer two prompts with two tokens each."""
    import msds
    import msds.engine.runner
    import msds.model
    import msds_graphs.compile  # noqa: F401  (MindSpore: the bulk of the imports)
    from msds.checkpoint import Checkpoint
    from msds.llm import LLM

    result = {"imports": time.monotonic() - started}
    watch = Stopwatch()
    for owner in (msds.llm, msds.model):
        watch.wrap(owner, "read_config", "config and headers")
    watch.wrap(Checkpoint, "open", "config and headers")
    watch.wrap(msds.model, "load_weights", "loading weights")
    begin = time.perf_counter()
    llm = LLM(folder, progress=False)
    total = time.perf_counter() - begin
    result["config and headers"], result["loading weights"] = watch.take("config and headers", "loading weights")
    result["the rest of LLM()"] = total - result["config and headers"] - result["loading weights"]
    watch.wrap(llm.engine.runner, "prefill", "prefill")
    watch.wrap(llm.engine.runner, "decode", "decode")
    for name, prompt in zip(("cold", "warm"), PROMPTS, strict=True):
        begin = time.perf_counter()
        llm.chat([{"role": "user", "content": prompt}], msds.SamplingParams(temperature=0, max_tokens=2))
        total = time.perf_counter() - begin
        prefill, decode = watch.take("prefill", "decode")
        result |= {f"{name} prefill": prefill, f"{name} decode": decode, f"{name} host": total - prefill - decode}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
