"""Dispatch and combine between four processes against their definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parallel import exchange


@pytest.mark.parametrize("rank", range(exchange.RANKS))
@pytest.mark.parametrize("name", exchange.SHAPES)
def test_tokens_come_sorted_and_go_back(results, name, rank):
    """Rows behind the counted ones are not a number, so that whoever reads them is noticed."""
    got, want = results("exchange", rank), exchange.expected(name, rank)
    rows, counts = got[f"{name}.rows"], got[f"{name}.counts"]
    tokens, chosen, held = exchange.SHAPES[name]
    assert rows.shape == (exchange.RANKS * tokens * min(held, chosen), exchange.FEATURES)
    assert counts.dtype == np.int64
    np.testing.assert_array_equal(counts, want["counts"])
    np.testing.assert_array_equal(rows[: counts.sum()], want["rows"])
    assert np.isnan(rows[counts.sum() :]).all()
    np.testing.assert_allclose(got[f"{name}.back"], want["back"], rtol=1e-6, atol=1e-6)
