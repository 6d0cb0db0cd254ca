"""Models cut over two and four processes give what one process gives."""

from __future__ import annotations

import numpy as np
import pytest

import msds
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan
from tests.parallel import cases
from tests.parallel.cases import CASES, Case

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def alone(parallel_folders):
    """alone(case) -> per replica what one process computes, with `updated.` after new weights."""

    def of(case: Case):
        folder = parallel_folders / "models" / case.folder
        model = msds.load(folder, mtp=bool(case.drafts), progress=False)
        runner = cases.make_runner(model, case)
        replicas = [replica for replica, lengths in enumerate(case.lengths) if lengths]
        arrays = {replica: cases.run(runner, replica, case) for replica in replicas}
        if case.spare is not None:  # every rank counts the tokens of all replicas
            for replica in range(len(case.lengths)):
                arrays.setdefault(replica, {})["expert_counts"] = runner.expert_counts()
        if case.updates:
            model.update_weights(cases.changed_weights(cases.whole_tree(folder, model)))
            for replica in replicas:
                later = cases.run(runner, replica, case)
                arrays[replica] |= {f"updated.{name}": value for name, value in later.items()}
        return arrays

    return of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_one_process(case, results, alone):
    """Logits of prefill and decode, drafts, the ids chosen from them, and how often experts were, on every rank."""
    want = alone(case)
    for rank in range(case.ranks):
        got = results(case.name, rank)
        assert got.pop("compiled_later") == 0
        replica = Ranks(ShardPlan.parse(case.plan), rank).index("dp")
        assert set(got) == set(want.get(replica, ()))
        for name, value in want.get(replica, {}).items():
            assert got[name].shape == value.shape, (rank, name)
            if value.dtype.kind == "f":
                scale = max(1.0, float(np.abs(value).max()))
                worst = float(np.abs(got[name] - value).max()) / scale
                assert worst < TOLERANCE, (rank, name, worst)
            else:
                np.testing.assert_array_equal(got[name], value, err_msg=f"rank {rank}, {name}")
