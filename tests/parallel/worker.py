"""One rank of a job: runs every case of its world size and writes what came out. Started by conftest.py."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import numpy as np


def die_with_parent() -> None:
    """No rank outlives the process that started it, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("started by nobody")


def main(folder: Path) -> None:
    """folder: checkpoints under `models`; results go to `case.rank.npz`."""
    from mindspore.communication import get_group_size, get_rank, init

    import msds
    from msds.config import read_config
    from msds.weights import without_mtp
    from msds_graphs.collectives import create_groups
    from msds_graphs.counter import compile_count
    from msds_graphs.ranks import Ranks
    from msds_graphs.sharding import ShardPlan
    from tests.parallel import cases, collectives, exchange

    init()
    rank, size = get_rank(), get_group_size()
    if size == 4:
        np.savez(folder / f"collectives.{rank}.npz", **collectives.run(rank))
        np.savez(folder / f"exchange.{rank}.npz", **exchange.run(rank))
    for case in cases.CASES:
        if case.ranks != size:
            continue
        ranks = Ranks(ShardPlan.parse(case.plan), rank)
        create_groups(ranks)
        path = folder / "models" / case.folder
        stored = read_config(path)
        settled = stored if case.drafts else without_mtp(stored)
        model = msds.load(
            path,
            mtp=bool(case.drafts),
            plan=case.implementations,
            ranks=ranks,
            placements=cases.placements(settled, case, 0),
            progress=False,
        )
        runner = cases.make_runner(model, case)

        def swap(case=case, model=model) -> None:  # type: ignore[no-untyped-def]
            if case.spare is not None:
                model.place_experts(cases.placements(model.config, case, 1))

        replicas = range(ranks.size("dp"))
        arrays = cases.run(runner, case, replicas, swap)
        if case.spare is not None:
            arrays["expert_counts"] = runner.expert_counts()
        compiled = compile_count()
        if case.updates:
            model.update_weights(cases.changed_weights(cases.whole_tree(path, model)))
            arrays |= {f"updated.{name}": value for name, value in cases.run(runner, case, replicas).items()}
        arrays["compiled_later"] = np.array(compile_count() - compiled)
        np.savez(folder / f"{case.name}.{rank}.npz", **arrays)
        print(case.name, "done", flush=True)


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]))
