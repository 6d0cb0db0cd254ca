"""After warm-up nothing compiles: lengths, concurrency, choices, drafts, prefix hits and misses in all combinations."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import msds
from msds import SamplingParams
from msds_graphs.counter import count_compiles
from tests.engine.drafting import Always
from tests.models.mutants import shortened

LIMIT = 1100
LENGTHS = (1, 17, 1000, LIMIT - 1)
CONCURRENCY = (1, 10, 50, 1)


@pytest.mark.parametrize("drafts", [0, 1])
def test_no_load_compiles_anything_after_warm_up(tiny: Any, tmp_path: Any, drafts: int) -> None:
    folder = shortened(tiny("v3_base", tokenizer=True), tmp_path / "one", 1)
    llm = msds.LLM(
        folder, max_model_len=LIMIT, max_num_seqs=4, num_speculative_tokens=drafts, progress=False, warm_up=True
    )
    if drafts:
        llm.engine._speculation = Always(drafts)
    rng = np.random.default_rng(21)
    known = [rng.integers(3, 300, length).tolist() for length in LENGTHS]
    hits = 0
    with count_compiles() as compiles:
        for count, n, is_known in itertools.product(CONCURRENCY, (1, 3), (False, True)):
            lengths = list(itertools.islice(itertools.cycle(LENGTHS), max(count, 4)))
            prompts = [
                known[LENGTHS.index(size)] if is_known else rng.integers(3, 300, size).tolist() for size in lengths
            ]
            few = SamplingParams(n=n, max_tokens=1, temperature=1.0, seed=4, ignore_eos=True)
            sampling = [replace(few, max_tokens=min(3, LIMIT - size) if count < 50 else 1) for size in lengths]
            size = len(prompts) if count > 1 else 1
            for at in range(0, len(prompts), size):
                group = prompts[at : at + size]
                outputs = llm.generate(group, sampling[at : at + size])
                assert [output.error for output in outputs] == [None] * (n * len(group))
            hits = llm.engine.stats.prefix_tokens_hit
    assert compiles.count == 0
    assert hits > 1000
