"""How fast a training step is: the tiny R1's own step against transformers' model with torch's AdamW.

    python -m tests.benchmarks.bench_train

Same weights, same batches, same threads, one process, turns alternating. Neither side runs the MTP module, which
transformers lacks. What is measured and how to read it: tests/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import machine
from tests.benchmarks.report import machine_text, table, write_json

SEQUENCES, LENGTHS = 64, (64, 128)
RATE = 1e-3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print Markdown to standard output and progress to standard error."""
    options = _parser().parse_args(arguments)
    os.environ.update(GLOG_v="3", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    machine.pin_threads(options.threads)
    described: dict[str, Any] = machine.describe(options.threads)
    machine.warn_if_busy()
    from msds.train.tiny_r1.recipe import write_untrained

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_untrained(Path(scratch) / "model")
        sides = {"msds": _msds_step(folder), "torch": _torch_step(folder, options.threads)}
    seconds: dict[str, dict[int, list[float]]] = {side: {length: [] for length in LENGTHS} for side in sides}
    losses: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(options.rounds + 1):  # the first turn compiles, and is discarded
        for length in LENGTHS:
            tokens = np.random.default_rng([turn, length]).integers(3, 500, (SEQUENCES, length)).astype(np.int32)
            for side, step in sides.items():
                start = time.perf_counter()
                losses[side].append(step(tokens))
                if turn:
                    seconds[side][length].append(time.perf_counter() - start)
            print(f"turn {turn} length {length}: {losses['msds'][-1]:.4f} {losses['torch'][-1]:.4f}", file=sys.stderr)
    described["load_at_end"] = machine.load_average()
    rows = []
    for length in LENGTHS:
        speed = {side: SEQUENCES * length / statistics.median(seconds[side][length]) for side in sides}
        cells = [f"{speed['msds']:,.0f}", f"{speed['torch']:,.0f}", f"{speed['msds'] / speed['torch']:.2f}"]
        rows.append([f"training step, {SEQUENCES} x {length} tokens", "tok/s", *cells])
    apart = max(abs(a - b) for a, b in zip(losses["msds"], losses["torch"], strict=True))
    print(machine_text(described))
    print(table(["measurement", "unit", "msds", "torch", "msds / torch"], rows))
    print(f"\nLargest difference of the two losses over {len(losses['msds'])} steps: {apart:.1e}.")
    if options.json:
        write_json(options.json, {"machine": described, "seconds": seconds, "losses": losses})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser


def _msds_step(folder: Path) -> Callable[[Any], float]:
    import msds
    from msds.train.objectives import NextToken
    from msds.train.optimizer import AdamW
    from msds.train.step import TrainStep
    from msds.train.trainer import canonical

    model = msds.load(folder, mtp=False, progress=False)
    step = TrainStep(
        model.config,
        canonical(model),
        buckets=[{"S": SEQUENCES, "Q": length} for length in LENGTHS],
        objective=NextToken(mtp_weight=0.0, balance_weight=0.0),
        optimizer=AdamW(bias_update_speed=0.0),
    )
    count = iter(range(1, 1_000_000))

    def run(tokens: Any) -> float:
        sequences, length = tokens.shape
        batch = {
            "tokens": tokens,
            "positions": np.tile(np.arange(length, dtype=np.int32), (sequences, 1)),
            "query_lens": np.full(sequences, length, np.int32),
            "weights": np.full(tokens.shape, 1 / (sequences * (length - 1)), np.float32),
            "sequence_share": np.full(sequences, 1 / sequences, np.float32),
        }
        return step([batch], rate=RATE, step=next(count)).values["cross_entropy"]

    return run


def _torch_step(folder: Path, threads: int) -> Callable[[Any], float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)

    def run(tokens: Any) -> float:
        ids = torch.tensor(tokens).long()
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return float(loss.detach())

    return run


if __name__ == "__main__":
    main()
