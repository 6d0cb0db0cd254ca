"""Moving experts between ranks while a model is loaded: their weights, and the tables that say where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from msds.models.specs.placement import ExpertPlacement
from msds_graphs.binding import assign, to_numpy
from msds_graphs.collectives import all_reduce
from msds_graphs.ranks import Ranks

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def move_experts(experts: dict[str, Any], old: ExpertPlacement, new: ExpertPlacement, ranks: Ranks) -> None:
    """From one placement of a layer to another of as many slots; every rank of the stage calls it.

    experts: the bound node. Each slot that changes is filled by one sum over ep to which only the first holder adds
    its weights, so besides a copy of this rank's experts one expert is in memory.
    """
    mine = ranks.index("ep")
    tables = new.tables()
    for name in PROJECTIONS:
        held = to_numpy(experts[name])
        moved = np.array(held)
        for rank, row in enumerate(new.slots):
            for slot, expert in enumerate(row):
                if old.slots[rank][slot] == expert:
                    continue
                source, place = old.holders(expert)[0]
                sent = held[place] if source == mine else np.zeros_like(held[0])
                arrived = all_reduce(Tensor(sent), "ep", ranks) if ranks.size("ep") > 1 else Tensor(sent)
                if rank == mine:
                    moved[slot] = arrived.asnumpy()
        assign({name: experts[name]}, {name: moved})
    names = tuple(tables)
    assign({name: experts[name] for name in names}, {name: tables[name] for name in names})
