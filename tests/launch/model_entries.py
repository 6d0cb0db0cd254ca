"""A model on several ranks without a service: it answers, takes new weights, and answers again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from msds import LLM, SamplingParams
from msds.engine.ranks import follow
from msds.errors import CheckpointError
from msds.launch import Place
from msds.launch.team import Follower, Leader
from msds.train.trainer import canonical
from msds_graphs.collectives import create_groups
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan
from msds_graphs.trees import tree_map

PROMPT = [5, 17, 200, 31, 7]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
OPTIONS = {"max_model_len": 32, "max_num_seqs": 1}


def answers(llm: LLM, folder: str) -> list[list[int]]:
    """What it says before and after its weights have changed; wrong weights change nothing."""
    before = llm.generate(PROMPT, GREEDY)[0]
    weights = canonical(LLM(folder, progress=False, **OPTIONS).model)
    try:
        llm.update_weights(tree_map(lambda leaf: leaf * np.float32(np.nan), weights))
    except CheckpointError:
        llm.update_weights(tree_map(lambda leaf: leaf * np.float32(1.5), weights))
    after = llm.generate(PROMPT, GREEDY)[0]
    assert before.error is None
    assert after.error is None
    return [list(before.token_ids), list(after.token_ids)]


def answer_rank(place: Place, folder: str, plan: str, target: str) -> None:
    ranks = Ranks(ShardPlan.parse(plan), place.rank)
    create_groups(ranks)
    options: dict[str, Any] = {"ranks": ranks, "progress": False, **OPTIONS}
    if place.rank:
        follower = Follower(place)
        follow(LLM(folder, team=follower, **options).engine.runner, follower)
        place.leave()
    leader = Leader(place, timeout=300.0, on_failure=place.fail)
    found = answers(LLM(folder, team=leader, **options), folder)
    Path(target).write_text(json.dumps(found), encoding="utf-8")
    leader.stop()
    place.leave()
