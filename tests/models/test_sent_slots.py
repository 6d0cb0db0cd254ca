"""Where tokens are sent: real ones to the slots that a gather would find them in, padding to those of its own rank."""

from __future__ import annotations

import numpy as np
import pytest

from msds.models.deepseek import local_slots, sent_slots
from msds.models.specs.placement import ExpertPlacement, balance_experts
from msds_graphs.compile import compile
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan

EXPERTS, RANKS, TOKENS, CHOSEN = 8, 4, 6, 3


def experts_of(placement: ExpertPlacement, has_tables: bool) -> dict[str, np.ndarray]:
    held = np.zeros((placement.slots_per_rank, 1, 1), np.float32)
    return {"gate_proj": held, **(placement.tables() if has_tables else {})}


def found(function, placement, has_tables, batch, rank):
    ranks = Ranks(ShardPlan(dp=RANKS, ep=RANKS), rank)

    def step(bound, donated, batch):
        return {"slots": function(batch, bound, ranks)}, donated

    return compile(step, bound=experts_of(placement, has_tables), batch=batch)(batch)["slots"]


def sent(batch, experts, ranks):
    return sent_slots(batch["idx"], batch["is_real"], experts, ranks)


def local(batch, experts, ranks):
    return local_slots(batch["idx"], experts, ranks)


@pytest.mark.parametrize("spare", [None, 0, 2])
def test_tokens_are_sent_where_a_gather_finds_them(spare):
    rng = np.random.default_rng(0)
    placement = ExpertPlacement.contiguous(EXPERTS, RANKS)
    if spare is not None:
        placement = balance_experts(rng.zipf(1.5, EXPERTS).clip(max=100), RANKS, EXPERTS // RANKS + spare)
    held, has_tables = placement.slots_per_rank, spare is not None
    idx = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(RANKS * TOKENS)]).astype(np.int32)
    is_real = rng.random(RANKS * TOKENS) < 0.7
    parts = [slice(rank * TOKENS, (rank + 1) * TOKENS) for rank in range(RANKS)]
    slots = np.concatenate(
        [
            found(sent, placement, has_tables, {"idx": idx[part], "is_real": is_real[part]}, rank)
            for rank, part in enumerate(parts)
        ]
    )
    assert slots.dtype == np.int32
    assert all(len(set(row)) == CHOSEN for row in slots.tolist())  # the operators' condition
    flat = np.array([expert for row in placement.slots for expert in row])
    np.testing.assert_array_equal(flat[slots[is_real]], idx[is_real])
    for rank, part in enumerate(parts):
        want = found(local, placement, has_tables, {"idx": idx}, rank)
        mine = slots - rank * held
        mine = np.where((mine >= 0) & (mine < held), mine, held)
        np.testing.assert_array_equal(mine[is_real], want[is_real])
        home = [(rank * held + k) % (RANKS * held) for k in range(CHOSEN)]
        assert slots[part][~is_real[part]].tolist() == [home] * int((~is_real[part]).sum())
