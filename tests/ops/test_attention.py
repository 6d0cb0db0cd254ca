"""Attention against a loop over heads in float64, and masks against their definition."""

import numpy as np
import pytest

from msds_ops.attention import attend, attend_latent, attend_numpy, attention_bias, causal_mask


@pytest.mark.parametrize(
    ("sequences", "queries", "heads", "groups", "context", "key_dim", "value_dim"),
    [
        (1, 1, 4, 4, 7, 8, 8),  # one query, a head to a group
        (2, 3, 4, 2, 5, 8, 6),  # grouped, values narrower than keys
        (1, 5, 6, 1, 5, 4, 12),  # one group for all, values wider
        (3, 2, 2, 2, 1, 8, 8),  # a context of one
    ],
)
def test_attend(run, rng, sequences, queries, heads, groups, context, key_dim, value_dim):
    def attended(batch):
        return attend(batch["q"], batch["k"], batch["v"], attention_bias(batch["mask"], heads), 0.3)

    mask = rng.random((sequences, queries, context)) < 0.6
    mask[:, :, 0] = True
    batch = {
        "q": rng.normal(size=(sequences, queries, heads, key_dim)).astype(np.float32),
        "k": rng.normal(size=(sequences, groups, context, key_dim)).astype(np.float32),
        "v": rng.normal(size=(sequences, groups, context, value_dim)).astype(np.float32),
        "mask": mask,
    }
    got = run(attended, batch)
    assert got.shape == (sequences, queries, heads, value_dim)
    want = attend_numpy(batch["q"], batch["k"], batch["v"], mask, 0.3)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sequences", "queries", "heads", "context"), [(1, 1, 4, 6), (2, 3, 2, 5)])
def test_attend_latent_is_attention_whose_values_are_its_keys(run, rng, sequences, queries, heads, context):
    def attended(batch):
        q = batch["q"].transpose(0, 2, 1, 3)  # head first
        out = attend_latent(q, batch["latent"], attention_bias(batch["mask"], heads), 0.3)
        return out.transpose(0, 2, 1, 3)

    mask = rng.random((sequences, queries, context)) < 0.6
    mask[:, :, 0] = True
    q = rng.normal(size=(sequences, queries, heads, 8)).astype(np.float32)
    latent = rng.normal(size=(sequences, context, 8)).astype(np.float32)
    want = attend_numpy(q, latent[:, None], latent[:, None], mask, 0.3)
    got = run(attended, {"q": q, "latent": latent, "mask": mask})
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_grouped_heads_read_neighbouring_queries(run):
    """Four query heads on two key heads: heads 0 and 1 read the first, 2 and 3 the second."""

    def attended(batch):
        return attend(batch["q"], batch["k"], batch["v"], attention_bias(batch["mask"], 4), 1.0)

    batch = {
        "q": np.ones((1, 1, 4, 2), np.float32),
        "k": np.ones((1, 2, 1, 2), np.float32),
        "v": np.array([[[[10]], [[20]]]], np.float32),
        "mask": np.ones((1, 1, 1), bool),
    }
    np.testing.assert_array_equal(run(attended, batch)[0, 0, :, 0], [10, 10, 20, 20])


def test_attention_bias(run):
    def bias(batch):
        return attention_bias(batch["mask"], 3)

    mask = np.array([[[1, 0], [1, 1]]], bool)
    got = run(bias, {"mask": mask})
    np.testing.assert_array_equal(got, np.broadcast_to(np.where(mask[:, None], 0, -np.inf), (1, 3, 2, 2)))


def test_a_masked_column_has_no_weight_at_all(run):
    """Exactly 0 and not almost: what lies there may be anything finite, also far larger than what is seen."""

    def attended(batch):
        return attend(batch["q"], batch["k"], batch["v"], attention_bias(batch["mask"], 1), 1.0)

    batch = {
        "q": np.ones((1, 1, 1, 1), np.float32),
        "k": np.array([[[[0], [np.log(3)], [5000]]]], np.float32),
        "v": np.array([[[[4], [8], [1e30]]]], np.float32),
        "mask": np.array([[[1, 1, 0]]], bool),
    }
    np.testing.assert_allclose(run(attended, batch), 7, rtol=1e-6)


def test_softmax_of_half_precision_scores_is_taken_in_float32(run):
    def attended(batch):
        bias = attention_bias(batch["mask"], 1)
        return attend_latent(batch["q"], batch["latent"], bias, 1.0)

    latent = np.ones((1, 4096, 1), np.float16)  # in float16 the sum of the weights would stop growing at 2048
    batch = {"q": np.zeros((1, 1, 1, 1), np.float16), "latent": latent, "mask": np.ones((1, 1, 4096), bool)}
    np.testing.assert_allclose(run(attended, batch), 1, rtol=2e-3)


def test_causal_mask(run):
    """Row q sees real columns at its own or an earlier position; a padding row sees the real ones it may and itself."""

    def mask(batch):
        return causal_mask(batch["positions"], batch["query_lens"])

    positions = np.array([[0, 1, 2, 0], [5, 9, 70, 71]], np.int32)
    got = run(mask, {"positions": positions, "query_lens": np.array([3, 4], np.int32)})
    first = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    np.testing.assert_array_equal(got, np.array([first, np.tri(4)], bool))
