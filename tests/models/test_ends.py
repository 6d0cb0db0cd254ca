"""Both ends of a step: which rows become logits, and whose numbers count as broken."""

from __future__ import annotations

import numpy as np
import pytest

from msds.models.ends import last_rows, outputs
from msds.presets import r1_distill_llama_8b
from msds_graphs.compile import compile
from msds_graphs.ranks import ALONE


@pytest.mark.parametrize("count", [1, 2, 4])
def test_last_rows(count):
    def step(bound, donated, batch):
        return last_rows(batch["hidden"], batch["query_lens"], count), donated

    hidden = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    lens = np.array([4, 1, 3], np.int32)
    batch = {"hidden": hidden, "query_lens": lens}
    got = compile(step, bound=(), batch=batch)(batch)
    for row, length in enumerate(lens):
        places = [max(0, length - count + j) for j in range(count)]  # where too short, its first row again
        np.testing.assert_array_equal(got[row], hidden[row, places])


def test_padding_never_counts_as_broken():
    """Every token is judged, whichever rows become logits; padding never."""
    config = r1_distill_llama_8b()

    def step(params, donated, batch):
        return outputs(params, params["norm"], batch["x"], batch, 1, config, ALONE), donated

    params = {"norm": {"weight": np.ones(2, np.float32)}, "lm_head": {"weight": np.eye(3, 2, dtype=np.float32)}}
    x = np.ones((3, 4, 2), np.float32)
    x[0, 3, 0] = np.nan  # padding: 3 tokens
    x[1, 0, 1] = np.inf  # a token, not the last
    batch = {
        "x": x.reshape(12, 2),
        "tokens": np.zeros((3, 4), np.int32),
        "query_lens": np.array([3, 3, 4], np.int32),
    }
    got = compile(step, bound=params, batch=batch)(batch)
    assert got["is_finite"].tolist() == [[True] * 4, [False, True, True, True], [True] * 4]
    assert got["logits"].shape == (3, 1, 3)
    assert got["hidden"].shape == (3, 1, 2)
    np.testing.assert_allclose(got["logits"][0, 0], [1, 1, 0], atol=1e-4)
