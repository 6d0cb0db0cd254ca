"""Multi-token prediction: its input contract, its depths, its own cache across chunks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msds_graphs.binding import assign
from tests.models.compare import IDS, TOLERANCE, difference
from tests.models.kit import values_of
from tests.models.mtp_kit import LENGTH, Mtp
from tests.reference import numpy_deepseek


@pytest.fixture(scope="module")
def mtp(tiny):
    return Mtp(tiny("v3_two_mtp"))


def test_both_depths_equal_the_numpy_reference(mtp):
    """Position 0 included; depth 1 continues from what depth 0 returned, and each has a cache layer of its own."""
    hidden = mtp.hidden
    for depth in range(2):
        got, want = mtp.run(depth, hidden), mtp.want(depth, hidden)
        assert difference(got["logits"][0], want["logits"]) < TOLERANCE
        assert difference(got["hidden"][0], want["hidden"]) < TOLERANCE
        assert got["is_finite"].all()
        hidden = got["hidden"][0]


def test_the_hidden_state_is_that_of_the_main_model_after_its_norm(mtp):
    """What the main model returns is what MTP takes."""
    batch = {
        "tokens": IDS[None, :LENGTH].astype(np.int32),
        "positions": np.arange(LENGTH, dtype=np.int32)[None],
        "query_lens": np.array([LENGTH], np.int32),
    }
    assert difference(mtp.model._compiled_forward()(batch)["hidden"][0], mtp.hidden) < TOLERANCE


@settings(max_examples=6)
@example(cuts={2, 5, 6})
@given(cuts=st.sets(st.integers(1, LENGTH - 1)))
def test_chunks_equal_one_chunk(mtp, cuts):
    """2 + 3 + 1 tokens and the rest, or any other split: the layer's cache is filled across chunks."""
    want = mtp.want(0, mtp.hidden)["logits"]
    for start, stop in itertools.pairwise([0, *sorted(cuts), LENGTH]):
        got = mtp.run(0, mtp.hidden, start, stop - start)["logits"][0]
        assert difference(got, want[start:stop]) < TOLERANCE


@pytest.mark.parametrize("half", [0, 1], ids=["embedding", "hidden"])
def test_what_the_halves_of_eh_proj_see(mtp, half):
    """With everything else of the layer silent and eh_proj = [I | 0] or [0 | I], one half passes straight through."""
    before = values_of(mtp.model.params)
    layer, bound = before["mtp"][0], mtp.model.params["mtp"][0]
    zeros = {"o_proj": (bound["self_attn"]["o_proj"]["weight"]), "down": bound["mlp"]["experts"]["down_proj"]}
    shared = bound["mlp"]["shared_experts"]["down_proj"]["weight"]
    identity = np.zeros((64, 128), np.float32)
    identity[:, 64 * half : 64 * half + 64] = np.eye(64)
    for parameter in (*zeros.values(), shared):
        assign(parameter, np.zeros(parameter.shape, np.float32))
    assign(bound["eh_proj"]["weight"], identity)
    try:
        got = mtp.run(0, mtp.hidden)["hidden"][0]
    finally:
        assign(mtp.model.params, before)
    if half == 0:
        embedded = before["embed_tokens"]["weight"][IDS[1 : LENGTH + 1]]
        joined = numpy_deepseek.rms_norm(embedded.astype(np.float64), layer["enorm"]["weight"], 1e-6)
    else:
        joined = numpy_deepseek.rms_norm(mtp.hidden.astype(np.float64), layer["hnorm"]["weight"], 1e-6)
    want = numpy_deepseek.rms_norm(joined, layer["shared_head"]["norm"]["weight"], 1e-6)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
