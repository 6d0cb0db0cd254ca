"""A DeepSeek-V3-shaped graph of 61 layers compiles in bounded time that grows linearly with depth.

The numbers themselves are measured by tests/benchmarks/bench_compile.py; here are only the limits.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from msds.config import read_config
from msds.models import deepseek
from msds_graphs.compile import compile
from msds_graphs.plan import Plan
from msds_graphs.specs import init_tree

LIMIT_SECONDS = 60.0


def seconds(config):
    """Compiling the defining forward of a depth once, and running it on 16 tokens."""
    plan = Plan()

    def forward(params, cache, batch):
        return deepseek.forward(params, batch, config, plan), cache

    params = deepseek.derive(init_tree(deepseek.spec(config), seed=0), config=config)
    batch = {
        "tokens": np.arange(16, dtype=np.int32)[None],
        "positions": np.arange(16, dtype=np.int32)[None],
        "query_lens": np.array([16], np.int32),
    }
    step = compile(forward, bound=params, batch=batch)
    start = time.perf_counter()
    outputs = step(batch)
    passed = time.perf_counter() - start
    assert outputs["is_finite"].all()
    return passed


@pytest.mark.slow
def test_61_layers_in_a_minute_and_linear(tiny):
    config = replace(read_config(tiny("v3_base")), num_nextn_predict_layers=0, first_k_dense_replace=3)
    seconds(replace(config, num_hidden_layers=4))  # what the first compilation of a process costs
    taken = {depth: seconds(replace(config, num_hidden_layers=depth)) for depth in (4, 20, 61)}
    print("\n" + "  ".join(f"{depth} layers: {value:.1f} s" for depth, value in taken.items()))
    assert taken[61] < LIMIT_SECONDS
    early = (taken[20] - taken[4]) / 16
    late = (taken[61] - taken[20]) / 41
    assert late < 2 * early  # seconds per layer, deep against shallow
