"""How tokens reach their experts is chosen once, from constants; what cannot be is named before anything runs."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest

from msds_graphs.compile import compile
from msds_graphs.errors import GraphError
from msds_graphs.exchange import dispatch, exchange_form
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan


@pytest.mark.parametrize(
    ("impl", "machine", "ranks", "tokens", "dtype", "form"),
    [
        ("portable", "a2", 16, 32, ms.bfloat16, "operators"),
        ("portable", "a3", 16, 32, ms.float16, "operators"),
        ("portable", "a2", 16, 512, ms.bfloat16, "gathered"),
        ("portable", "a2", 16, 32, ms.float32, "gathered"),
        ("portable", "a2", 1, 32, ms.bfloat16, "gathered"),
        ("portable", "cpu", 1, 32, ms.float32, "gathered"),
        ("reference", "cpu", 1, 32, ms.float32, "emulated"),
        ("reference", "a2", 16, 32, ms.bfloat16, "emulated"),
    ],
)
def test_the_form_of_an_exchange(impl: str, machine: str, ranks: int, tokens: int, dtype: Any, form: str) -> None:
    assert exchange_form(impl, machine, ranks, tokens, 7168, 8, 256, dtype) == form


def test_an_implementation_that_does_not_exist_is_named() -> None:
    with pytest.raises(GraphError, match="exchange has no implementation 'cpu': use portable or reference"):
        exchange_form("cpu", "cpu", 1, 1, 32, 1, 1, ms.float32)


def test_emulation_wants_whole_experts_on_every_replica() -> None:
    ranks = Ranks(ShardPlan(tp=2, ep=2))

    def step(bound: Any, donated: Any, batch: Any) -> Any:
        return dispatch(batch["x"], batch["slots"], batch["weights"], 1, ranks, "emulated")[0], donated

    batch = {"x": np.ones((1, 4), np.float32), "slots": np.zeros((1, 1), np.int32), "weights": np.ones((1, 1))}
    batch["weights"] = batch["weights"].astype(np.float32)
    with pytest.raises(GraphError, match="exchange is 'reference' with tp = 2, dp = 1, ep = 2"):
        compile(step, bound=(), batch=batch)(batch)
