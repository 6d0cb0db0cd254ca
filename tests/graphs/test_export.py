"""MINDIR export: what is read back computes what the step computes, without this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from msds_graphs.compile import compile
from msds_graphs.errors import GraphError
from tests.graphs import small


def test_an_exported_step_computes_the_same(tmp_path: Path) -> None:
    compiled = compile(
        small.pool,
        bound=small.weights(),
        donated=small.state(),
        batch=small.BATCH,
        buckets=small.BUCKETS,
        outputs=small.OUTPUTS,
        pad={"x": 0, "lens": 1},
    )
    batch = small.batch_of(2, 4)
    wanted = compiled(batch)
    path = compiled.export(tmp_path / "pool", {"S": 2, "Q": 4})
    assert path == tmp_path / "pool.mindir"
    assert path.stat().st_size > 0

    cell = nn.GraphCell(ms.load(str(path)))
    pooled, scores, total = cell(ms.Tensor(batch["x"]), ms.Tensor(batch["lens"][0]))
    np.testing.assert_array_equal(pooled.asnumpy(), wanted["pooled"])
    np.testing.assert_array_equal(scores.asnumpy(), wanted["details"][0]["scores"])
    assert float(total.asnumpy()) == float(wanted["details"][1])
    np.testing.assert_allclose(
        pooled.asnumpy(), small.pool_numpy(small.weights(), batch["x"], batch["lens"][0]), rtol=1e-5, atol=1e-6
    )


def count(bound: Any, donated: Any, batch: Any) -> Any:
    return {"n": donated["n"] + batch["x"]}, {"n": donated["n"] + batch["x"]}


def test_donated_state_is_exported_with_its_values_and_lives_on_in_the_cell(tmp_path: Path) -> None:
    batch = {"x": np.array(1, np.float32)}
    compiled = compile(count, bound=(), donated={"n": np.array(5, np.float32)}, batch=batch)
    compiled(batch)
    cell = nn.GraphCell(ms.load(str(compiled.export(tmp_path / "count.mindir"))))
    assert [float(cell(ms.Tensor(batch["x"]))[0].asnumpy()) for _ in range(2)] == [7, 8]
    assert float(compiled.donated["n"].asnumpy()) == 6


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    batch = {"x": np.array(1, np.float32)}
    compiled = compile(count, bound=(), donated={"n": np.array(5, np.float32)}, batch=batch)
    with pytest.raises(GraphError, match=r"the folder .*missing does not exist"):
        compiled.export(tmp_path / "missing" / "count")
    with pytest.raises(GraphError, match="bucket S=1 is not planned"):
        compiled.export(tmp_path / "count", {"S": 1})
