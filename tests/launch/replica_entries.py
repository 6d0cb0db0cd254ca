"""A model of several replicas, driven from Python: what one process says to the same questions, it has to say too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import msds.llm
from msds import LLM, SamplingParams
from msds.engine.ranks import follow
from msds.engine.runner import Runner
from msds.engine.sequence import Delta, GenerationSequence, Output
from msds.launch import Place
from msds.launch.team import Follower, Leader
from msds.train.trainer import canonical
from msds_graphs.collectives import create_groups
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan
from msds_graphs.trees import tree_map
from tests.engine.drafting import Always

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
SEEDED = replace(GREEDY, temperature=1.0, seed=7)
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 300, length).tolist() for length in (50, 20, 33, 9, 2, 17, 1)]


def few_shapes(*, max_num_seqs: int, num_drafts: int, **_: int) -> tuple[Any, Any]:
    """In place of `step_ladders`: texts of 64 tokens in chunks of 32, or short ones together; quick to compile."""
    prefill = ({"S": 1, "Q": 32, "B": 4}, {"S": 2, "Q": 16, "B": 4})
    return prefill, tuple({"S": max_num_seqs, "Q": queries, "B": 4} for queries in sorted({1, 1 + num_drafts}))


def told(outputs: list[Output]) -> list[Any]:
    return [[output.token_ids, output.finish_reason, output.usage.cached_tokens > 0] for output in outputs]


def answers(llm: LLM, folder: str) -> dict[str, Any]:
    """What it says to many at once, to one alone, to one whose beginning it knows, beside aborts, with new weights."""
    said = {}
    said["many"] = told(llm.generate(PROMPTS, [GREEDY, SEEDED, *[GREEDY, replace(SEEDED, seed=1)] * 2, SEEDED]))
    said["one"] = told(llm.generate([PROMPTS[1]], SEEDED))
    said["choices"] = told(llm.generate([PROMPTS[0]], replace(SEEDED, n=3, prompt_logprobs=0)))
    first = llm.generate([PROMPTS[2]], GREEDY)[0]
    said["prefix"] = told(llm.generate([[*PROMPTS[2], *first.token_ids, 5]], GREEDY))
    said["abort"] = _abort(llm)
    drafts = llm.options.num_speculative_tokens  # with the layer that makes them
    weights = canonical(LLM(folder, progress=False, num_speculative_tokens=drafts).model)
    llm.update_weights(tree_map(lambda leaf: leaf * np.float32(1.5), weights))
    said["new weights"] = told(llm.generate(PROMPTS[:3], GREEDY))
    return json.loads(json.dumps(said))  # type: ignore[no-any-return]


def _abort(llm: LLM) -> list[Any]:
    """Two go on where two others are given up, in the middle of their answers; new weights that change nothing."""
    engine, ended = llm.engine, []

    def listen(sequence: GenerationSequence, delta: Delta) -> None:
        if delta.finish_reason is not None:
            ended.append(sequence)

    sequences = [engine.add(prompt, SEEDED, listen)[0] for prompt in PROMPTS[:4]]
    while len(sequences[0].output_ids) < 2:
        engine.step()
    engine.abort(sequences[0])
    engine.abort(sequences[3])
    engine.invalidate()
    while engine.step():
        pass
    return [sequence.output_ids for sequence in sequences[1:3]]


def watched(llm: LLM) -> set[tuple[str, tuple[int, ...]]]:
    """The steps that will have been run, each with the replicas that had rows in it."""
    seen = set()
    call = llm.engine.runner._call

    def watching(step: Any, rows: Any) -> Any:
        seen.add((step.name, tuple(sorted({row.replica for row in rows}))))
        return call(step, rows)

    llm.engine.runner._call = watching  # type: ignore[method-assign]
    return seen


def answer_rank(place: Place, folder: str, plan: str, target: str, options: dict[str, Any]) -> None:
    """Writes to `target` what rank 0 said and the steps it ran; to `target`.rank how many graphs came after warm-up."""
    msds.llm.step_ladders = few_shapes
    ranks = Ranks(ShardPlan.parse(plan), place.rank)
    create_groups(ranks)
    options = {"ranks": ranks, "progress": False, **options}
    if place.rank:
        follower = Follower(place)
        runner = LLM(folder, team=follower, **options).engine.runner
        compiled = runner.num_compiled
        follow(runner, follower)
        _count(runner, compiled, f"{target}.{place.rank}")
        place.leave()
    leader = Leader(place, timeout=300.0, on_failure=place.fail)
    llm = LLM(folder, team=leader, **options)
    if llm.options.num_speculative_tokens:
        llm.engine._speculation = Always(llm.options.num_speculative_tokens)
    compiled = llm.engine.runner.num_compiled
    llm.warm_up(progress=False)
    seen = watched(llm)
    Path(target).write_text(json.dumps([answers(llm, folder), sorted(seen)]), encoding="utf-8")
    _count(llm.engine.runner, compiled, f"{target}.0")
    leader.stop()
    place.leave()


def _count(runner: Runner, before: int, target: str) -> None:
    planned = sum(len(step.buckets) for step in runner.steps.values())
    Path(target).write_text(str(runner.num_compiled - before - planned), encoding="utf-8")
