"""What is run on one process and on several: the same texts, the same steps, the same random checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msds.checkpoint import Checkpoint
from msds.config import read_config
from msds.engine.batch import Row
from msds.engine.runner import Runner
from msds.model import Model
from msds.models.specs.parts import moe_layers
from msds.models.specs.placement import ExpertPlacement, balance_experts
from msds.weights import load_weights, stored_skips
from msds_graphs.plan import Plan
from msds_graphs.sharding import ShardPlan
from msds_graphs.trees import Tree, tree_map

BLOCK_SIZE, BLOCKS, MAX_SEQS, CHUNK, STEPS = 8, 2, 2, 8, 3
DRAFTS = 2
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """lengths: of the texts of each replica, at most two, none for an idle one, but not for all. spare: slots per rank
    beyond the experts' own, which makes placements be used and swapped, and experts be counted. updates: new weights
    are put in after the steps. exchange: tokens go to the ranks of their experts as they would by Ascend's operators.
    short: one layer, with experts where the model has any, and the MTP layers: half the
    time to compile."""

    variant: str
    plan: str
    lengths: tuple[tuple[int, ...], ...] = ((7, 3),)
    drafts: int = 0
    spare: int | None = None
    updates: bool = False
    exchange: bool = False
    short: bool = True

    @property
    def name(self) -> str:
        spare = "" if self.spare is None else f"-spare{self.spare}"
        return f"{self.variant}-{self.plan}{spare}" + ("-exchange" if self.exchange else "")

    @property
    def implementations(self) -> Plan:
        """Of the ops with a choice."""
        return Plan({"exchange": "reference"} if self.exchange else {})

    @property
    def folder(self) -> str:
        return f"{self.variant}-short" if self.short else self.variant

    @property
    def ranks(self) -> int:
        return ShardPlan.parse(self.plan).ranks


CASES = (
    Case("v3_base", "tp2.ep2", drafts=DRAFTS, short=False),
    Case("v3_base", "dp2.ep2", ((7, 3), (5,)), drafts=DRAFTS, spare=1),
    Case("v2_lite", "tp2"),  # experts cut by width alone
    Case("v2_lite", "dp2", ((), (4, 2))),  # the same, over replicas
    Case("llama_base", "dp2", ((5, 2), (7,))),
    Case("llama_bias", "tp2", updates=True),
    Case("qwen2_odd_vocab", "tp2", short=False),
    Case("v3_base", "dp2.tp2.ep2", ((8, 2), ()), drafts=DRAFTS),
    Case("v3_attention_bias", "dp4.ep4", ((8,), (1, 3), (), (2,)), spare=2, updates=True),
    Case("v2_group_limited", "tp4.ep4"),
    # within a block: a second draft beyond it attends to what padding wrote, which other experts compute here
    Case("v3_base", "dp2.ep2", ((4, 3), (2,)), drafts=DRAFTS, spare=1, exchange=True),
    Case("v3_base", "dp4.ep4", ((8,), (1, 3), (), (2,)), exchange=True),  # idle replicas, experts without tokens
    Case("llama_mha", "tp4"),
)


def text(replica: int, index: int, length: int) -> list[int]:
    """A prompt; no two are equal."""
    generator = np.random.default_rng([replica, index])
    return [int(token) for token in generator.integers(0, 500, length)]


def placements(model_config: Any, case: Case, round_: int) -> tuple[ExpertPlacement, ...]:
    """A placement per MoE layer, another in each round, from counts as they could have been seen."""
    if case.spare is None:
        return ()
    ep, experts = ShardPlan.parse(case.plan).ep, model_config.n_routed_experts
    generator = np.random.default_rng(round_)
    return tuple(
        balance_experts(generator.zipf(1.5, experts).clip(max=1000), ep, experts // ep + case.spare)
        for _ in moe_layers(model_config)
    )


def make_runner(model: Model, case: Case) -> Runner:
    """One prefill and one decode bucket."""
    return Runner(
        model,
        num_blocks=1 + MAX_SEQS * BLOCKS,
        block_size=BLOCK_SIZE,
        prefill_buckets=[{"S": MAX_SEQS, "Q": CHUNK, "B": BLOCKS}],
        decode_buckets=[{"S": MAX_SEQS, "Q": 1, "B": BLOCKS}],
        num_drafts=case.drafts,
        counts_experts=case.spare is not None,
    )


def run(runner: Runner, case: Case, replicas: Sequence[int], swap: Any = None) -> Arrays:
    """Prefill and a few greedy steps of the texts of some replicas: everything that came out, by text.

    A runner of one replica computes one at a time, one of several all together. swap: called between steps.
    """
    prompts = {(r, index): text(r, index, length) for r in replicas for index, length in enumerate(case.lengths[r])}
    tables = {(r, index): list(range(1 + index * BLOCKS, 1 + (index + 1) * BLOCKS)) for r, index in prompts}
    homes = {key: key[0] if runner.num_replicas > 1 else 0 for key in prompts}
    last, hidden, arrays = {}, {}, {}
    result = runner.prefill(
        [Row(ids, 0, tables[key], None, homes[key]) for key, ids in prompts.items()], all_logits=True
    )
    for row, (key, ids) in enumerate(prompts.items()):
        arrays[f"{key}.prefill"] = result.logits[row, : len(ids)]
        arrays[f"{key}.finite"] = result.is_finite[row, : len(ids)]
        last[key], hidden[key] = int(result.logits[row, len(ids) - 1].argmax()), result.hidden[row, len(ids) - 1]
    for step in range(STEPS):
        if swap is not None and step == 1:
            swap()
        rows = [Row([last[key]], len(ids) + step, tables[key], hidden[key], homes[key]) for key, ids in prompts.items()]
        drafts = runner.draft(rows) if case.drafts else ()
        result = runner.decode(rows)
        for row, key in enumerate(prompts):
            arrays[f"{key}.decode{step}"] = result.logits[row, 0]
            arrays[f"{key}.chosen{step}"] = np.array(last[key])
            if case.drafts:
                arrays[f"{key}.drafts{step}"] = drafts[row]
            last[key], hidden[key] = int(result.logits[row, 0].argmax()), result.hidden[row, 0]
    return arrays


def changed_weights(tree: Tree) -> Tree:
    """A whole tree of other values: every array halved, and with it nothing else."""
    return tree_map(lambda leaf: np.asarray(leaf) * np.float32(0.5), tree)


def whole_tree(folder: Path, model: Model) -> Tree:
    """The canonical tree of a folder, uncut."""
    spec = model.functions.spec(model.config, "float32")
    skips = stored_skips(read_config(folder), model.config)
    return load_weights(Checkpoint.open(folder), spec, model.config, skips, progress=False)
