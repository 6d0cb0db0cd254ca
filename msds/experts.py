"""Moving experts between ranks while a model is loaded: their weights, and the tables that say where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from msds.errors import PlacementError
from msds.models.specs.placement import ExpertPlacement
from msds_graphs.binding import assign, to_numpy
from msds_graphs.collectives import all_reduce
from msds_graphs.ranks import Ranks

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

Weights = dict[str, npt.NDArray[Any]]


def move_experts(experts: Mapping[str, Any], old: ExpertPlacement, new: ExpertPlacement, ranks: Ranks) -> None:
    """From one placement of a layer to another of as many slots; every rank calls it, and all move or none does.

    experts: the bound node. What this rank is to hold is made beside what it holds, a second copy of its experts of
    the layer; when all ranks have theirs, weights and tables are swapped together. PlacementError on every rank, with
    the layer as it was, where one of them could not make it: it took part to the end, for the others would wait.
    A collective that fails, or the swap itself, raises what it raises: then nobody knows what the others hold.
    """
    held: Weights = {}
    coming: Weights = {}
    empty: dict[str, Tensor] = {}
    fault: Exception | None = None
    try:
        for name in PROJECTIONS:
            held[name] = to_numpy(experts[name])
            coming[name] = np.array(held[name])
            empty[name] = Tensor(np.zeros_like(held[name][0]))
    except Exception as error:
        fault = error
    _agree(fault, ranks)
    _agree(_exchange(held, coming, empty, old, new, ranks), ranks)
    values = coming | new.tables()
    assign({name: experts[name] for name in values}, values)


def _exchange(
    held: Weights,
    coming: Weights,
    empty: Mapping[str, Tensor],
    old: ExpertPlacement,
    new: ExpertPlacement,
    ranks: Ranks,
) -> Exception | None:
    """Fills each slot that changes by one sum over ep to which only the first holder adds its weights.

    What went wrong on this rank, which is the sum of nothing from then on but in every sum all the same.
    """
    mine, fault = ranks.index("ep"), None
    for name in PROJECTIONS:
        for rank, row in enumerate(new.slots):
            for slot, expert in enumerate(row):
                if old.slots[rank][slot] == expert:
                    continue
                source, place = old.holders(expert)[0]
                sent = empty[name]
                try:
                    if source == mine and fault is None:
                        sent = Tensor(held[name][place])
                except Exception as error:
                    fault = error
                arrived = all_reduce(sent, "ep", ranks)
                try:
                    if rank == mine and fault is None:
                        coming[name][slot] = arrived.asnumpy()
                except Exception as error:
                    fault = error
    return fault


def _agree(fault: Exception | None, ranks: Ranks) -> None:
    """PlacementError on all ranks if there is a fault on any."""
    failed = all_reduce(Tensor(np.array([fault is not None])), "stage", ranks)
    if failed.asnumpy()[0]:
        why = "another rank could not" if fault is None else str(fault) or type(fault).__name__
        raise PlacementError(why) from fault
