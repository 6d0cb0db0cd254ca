"""What else runs does not change an answer: not at all where that is asked for, within a bound otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import msds
from msds import SamplingParams
from msds.errors import OptionError

RNG = np.random.default_rng(26)
PROMPT = RNG.integers(3, 300, 21).tolist()
OTHERS = [RNG.integers(3, 300, length).tolist() for length in (1, 40, 9, 33, 2, 17, 26)]
GREEDY = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=0)
GAP = 1e-4
"""Of log-probabilities, in the default mode; README states it."""


def numbers(output: Any) -> tuple[list[int], list[float]]:
    return list(output.token_ids), [one.logprob for one in output.logprobs]


def answers(llm: msds.LLM, size: int) -> list[tuple[list[int], list[float]]]:
    """The prompt's answer at each row of a batch of `size`."""
    found = []
    for row in range(size):
        batch = OTHERS[: size - 1]
        outputs = llm.generate([*batch[:row], PROMPT, *batch[row:]], GREEDY)
        found.append(numbers(outputs[row]))
    return found


@pytest.fixture(scope="module", params=["llama_base", "v3_base", "v2_lite"])
def folder(request: Any, tiny: Any) -> Any:
    return tiny(request.param, tokenizer=True)


def make(folder: Any, **options: Any) -> msds.LLM:
    return msds.LLM(folder, progress=False, max_model_len=96, max_num_seqs=8, block_size=8, **options)


def test_the_deterministic_mode_is_exact(folder: Any) -> None:
    llm = make(folder, deterministic=True, prefill_chunk=16)
    alone = numbers(llm.generate([PROMPT], GREEDY)[0])
    assert len(alone[0]) == 50
    for size in (1, 2, 5, 8):
        for answer in answers(llm, size):
            assert answer == alone
    sampled = SamplingParams(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True, logprobs=0)
    first = numbers(llm.generate([PROMPT], sampled)[0])
    assert numbers(llm.generate([*OTHERS, PROMPT], sampled)[-1]) == first
    assert len(llm.engine.runner.steps["decode"].buckets) == len(llm.engine.runner.steps["prefill"].buckets) == 1


def test_the_default_mode_keeps_to_its_tolerance(folder: Any) -> None:
    """Prefix misses at first, then hits."""
    llm = make(folder)
    ids, logprobs = numbers(llm.generate([PROMPT], GREEDY)[0])
    for size in (1, 4, 8):
        for other_ids, others in answers(llm, size):
            assert other_ids == ids
            assert np.abs(np.subtract(others, logprobs)).max() < GAP
    assert llm.engine.stats.prefix_tokens_hit > 0


def test_what_the_mode_excludes_is_named(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="num_speculative_tokens 1 exclude each other"):
        make(tiny("v3_base", tokenizer=True), deterministic=True, num_speculative_tokens=1)
    with pytest.raises(OptionError, match="deterministic is 1: it must be True or False"):
        make(tiny("v3_base", tokenizer=True), deterministic=1)
    monkeypatch.setattr("msds.llm.free_memory_bytes", lambda: 6 << 20)
    with pytest.raises(OptionError, match=r"deterministic needs the cache of max_num_seqs 4000 texts.*to \d+ or"):
        msds.LLM(tiny("llama_base"), progress=False, max_model_len=96, max_num_seqs=4000, deterministic=True)
