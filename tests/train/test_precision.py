"""Mixed precision: which weights are cast for computing, and that what is stored and updated is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest

import msds
from msds.train.step import Precision, TrainStep
from msds.train.trainer import canonical
from msds_graphs.binding import to_numpy
from msds_graphs.trees import tree_map
from tests.train.conftest import LENGTH, SEQUENCES

NEAR_ONE = np.float32(1 + 2**-12)
"""float16 makes 1 of it."""


@pytest.mark.parametrize(
    ("path", "casts"),
    [
        ("layers.1.self_attn.o_proj.weight", True),
        ("layers.1.mlp.experts.gate_proj", True),
        ("layers.1.mlp.shared_experts.gate_proj.weight", True),
        ("layers.1.mlp.gate.weight", False),
        ("layers.1.mlp.gate.e_score_correction_bias", False),
    ],
)
def test_everything_but_the_router_is_cast(path: str, casts: bool) -> None:
    assert Precision(compute="bfloat16").casts(path) == casts
    assert not Precision(params="bfloat16", compute="bfloat16").casts(path)


@dataclass(frozen=True)
class SumOfSquares:
    """Of a projection and of the router, each in the dtype that it arrives in."""

    def extra_batch(self, config: Any) -> dict[str, Any]:
        return {}

    def make(self, config: Any) -> Any:
        experts, routers = config.n_routed_experts, 1 + config.num_nextn_predict_layers  # of `small`

        def objective(params, batch, config, plan):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            projection, router = params["lm_head"]["weight"], params["layers"][1]["mlp"]["gate"]["weight"]
            of_projection = (projection * projection).astype(ms.float32).sum()
            of_router = (router * router).astype(ms.float32).sum()
            counts = ms.ops.zeros((experts,), ms.float32)
            parts = {"projection": of_projection, "router": of_router, "counts": (counts,) * routers}
            return of_projection + of_router, parts

        return objective


def test_a_step_computes_in_half_precision_and_keeps_float32(small: Path) -> None:
    model = msds.load(small, progress=False)
    tree = tree_map(lambda leaf: np.full_like(leaf, NEAR_ONE), canonical(model))
    batch = {
        "tokens": np.zeros((SEQUENCES, LENGTH), np.int32),
        "positions": np.zeros((SEQUENCES, LENGTH), np.int32),
        "query_lens": np.full(SEQUENCES, LENGTH, np.int32),
        "weights": np.zeros((SEQUENCES, LENGTH), np.float32),
    }
    step = TrainStep(
        model.config,
        tree,
        buckets=[{"S": SEQUENCES, "Q": LENGTH}],
        objective=SumOfSquares(),  # type: ignore[arg-type]
        precision=Precision(compute="float16"),
    )
    values = step([batch], rate=1e-3, step=1).values
    projection, router = tree["lm_head"]["weight"], tree["layers"][1]["mlp"]["gate"]["weight"]
    assert values["projection"] == projection.size
    assert values["router"] == pytest.approx(router.size * float(NEAR_ONE) ** 2, rel=1e-6)
    assert values["router"] > router.size
    for leaf in step.state["params"]:
        assert to_numpy(leaf).dtype == np.float32
    moved = step.params()["lm_head"]["weight"]
    assert (moved < NEAR_ONE).all()  # the gradient came back through the cast
    assert (moved != moved.astype(np.float16)).any()
