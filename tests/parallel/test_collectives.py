"""Collectives between four processes against their definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parallel import collectives


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("plan", collectives.PLANS)
def test_collectives_are_as_defined(results, plan, rank):
    got = results("collectives", rank)
    for name, want in collectives.expected(plan, rank).items():
        value = got[f"{plan}/{name}"]
        assert value.dtype == want.dtype, name
        np.testing.assert_allclose(value, want, rtol=1e-6, atol=1e-6, err_msg=name)
