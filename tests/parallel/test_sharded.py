"""Models cut over two and four processes give what one process gives."""

from __future__ import annotations

import numpy as np
import pytest

import msds
from tests.parallel import cases
from tests.parallel.cases import CASES, Case

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def alone(parallel_folders):
    """alone(case) -> what one process computes of each replica's texts, with `updated.` after new weights."""

    def of(case: Case):
        folder = parallel_folders / "models" / case.folder
        model = msds.load(folder, mtp=bool(case.drafts), progress=False)
        runner = cases.make_runner(model, case)
        replicas = [replica for replica, lengths in enumerate(case.lengths) if lengths]
        arrays = {}
        for replica in replicas:
            arrays |= cases.run(runner, case, [replica])
        if case.spare is not None:  # every rank counts the tokens of all replicas
            arrays["expert_counts"] = runner.expert_counts()
        if case.updates:
            model.update_weights(cases.changed_weights(cases.whole_tree(folder, model)))
            for replica in replicas:
                later = cases.run(runner, case, [replica])
                arrays |= {f"updated.{name}": value for name, value in later.items()}
        return arrays

    return of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_one_process(case, results, alone):
    """Logits of prefill and decode, drafts, the ids chosen from them, and how often experts were, of all replicas on
    every rank."""
    want = alone(case)
    for rank in range(case.ranks):
        got = results(case.name, rank)
        assert got.pop("compiled_later") == 0
        assert set(got) == set(want)
        for name, value in want.items():
            assert got[name].shape == value.shape, (rank, name)
            if value.dtype.kind == "f":
                scale = max(1.0, float(np.abs(value).max()))
                worst = float(np.abs(got[name] - value).max()) / scale
                assert worst < TOLERANCE, (rank, name, worst)
            else:
                np.testing.assert_array_equal(got[name], value, err_msg=f"rank {rank}, {name}")
