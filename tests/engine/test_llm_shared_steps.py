"""Real models whose short prompts share prefill steps: answers as one by one, and no request kind compiles anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import msds
from msds import SamplingParams
from msds.constraints import Regex
from msds.engine.batch import Row
from msds.engine.ladder import step_ladders
from msds_graphs.counter import count_compiles
from tests.engine.drafting import Always
from tests.models.compare import TOLERANCE, log_softmax
from tests.models.mutants import shortened

OPTIONS = {"max_model_len": 64, "block_size": 8, "max_num_seqs": 4, "prefill_chunk": 256}
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 300, length).tolist() for length in (7, 40, 2, 59, 33, 50, 1, 30)]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama_base", "v3_base"])
def llm(tiny: Any, tmp_path_factory: pytest.TempPathFactory, request: Any) -> msds.LLM:
    """One layer, and drafts where there is an MTP layer."""

    def widest(**sizes: Any) -> Any:  # one number of sequences to decode in place of two: fewer graphs
        prefill, decode = step_ladders(**sizes)
        return prefill, tuple(bucket for bucket in decode if bucket["S"] == sizes["max_num_seqs"])

    folder = shortened(tiny(request.param, tokenizer=True), tmp_path_factory.mktemp("short") / "one", 1)
    drafts = int(request.param == "v3_base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msds.llm.step_ladders", widest)
        llm = msds.LLM(folder, progress=False, num_speculative_tokens=drafts, **OPTIONS)
    llm.warm_up(progress=False)
    if drafts:
        llm.engine._speculation = Always(drafts)
    return llm


@pytest.fixture
def num_rows(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each prefill step has computed."""
    seen: list[int] = []
    prefill = llm.engine.runner.prefill

    def noted(rows: Any, **options: Any) -> Any:
        seen.append(len(rows))
        return prefill(rows, **options)

    monkeypatch.setattr(llm.engine.runner, "prefill", noted)
    return seen


def told(output: Any) -> tuple[Any, ...]:
    usage = output.usage
    return output.token_ids, output.text, output.finish_reason, usage.prompt_tokens, usage.completion_tokens


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=4, seed=3, n=2, ignore_eos=True)])
def test_prompts_that_share_steps_are_answered_as_alone(llm: Any, num_rows: list[int], params: SamplingParams) -> None:
    params = replace(params, logprobs=2, prompt_logprobs=1)
    together = llm.generate(PROMPTS, params)
    assert max(num_rows) == 4
    num_rows.clear()
    llm.engine.invalidate()  # nothing cached
    alone = [output for prompt in PROMPTS for output in llm.generate([prompt], replace(params, n=1))]
    assert set(num_rows) == {1}
    firsts = [output for output in together if output.choice_index == 0]
    for ours, theirs in zip(firsts, alone, strict=True):
        assert told(ours) == told(theirs)
        pairs = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
        pairs += zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < TOLERANCE


def test_prompt_logprobs_are_those_of_the_definition(llm: Any, num_rows: list[int]) -> None:
    """In one step that holds more tokens than one call of the head, and no multiple of it."""
    prompts = PROMPTS[:4]
    outputs = llm.generate(prompts, replace(GREEDY, max_tokens=1, prompt_logprobs=0))
    assert num_rows == [4]
    for prompt, output in zip(prompts, outputs, strict=True):
        want = log_softmax(llm.model.logits(prompt))
        got = [known.logprob for known in output.prompt_logprobs[1:]]
        np.testing.assert_allclose(got, [want[at, token] for at, token in enumerate(prompt[1:])], atol=TOLERANCE * 10)


def test_asking_for_prompt_logprobs_changes_no_number(llm: msds.LLM) -> None:
    """What the next token is sampled from is bit for bit the same, also for the shorter of two rows."""
    runner = llm.engine.runner
    rows = [Row(PROMPTS[1], 0, [1, 2, 3, 4, 5]), Row(PROMPTS[0], 0, [6])]
    plain, asked = runner.prefill(rows), runner.prefill(rows, all_logits=True)
    llm.engine.invalidate()
    assert asked.logits.shape == (2, 40, llm.model.config.vocab_size)
    np.testing.assert_array_equal(asked.logits[[0, 1], [39, 6]], plain.logits[:, 0])
    assert not asked.logits[1, 7:].any(), "padding"


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 4},
    "choices": {"temperature": 1.0, "n": 3},
    "logprobs": {"logprobs": 5},
    "echo": {"logprobs": 2, "prompt_logprobs": 2},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {7: 5.0}, "min_tokens": 2, "ignore_eos": False},
    "stop": {"stop": ("e", "a"), "ignore_eos": False},
    "constraint": {"constraint": Regex("[ab]{2,9}"), "ignore_eos": False},
}


def test_no_kind_of_request_compiles_after_warm_up(llm: Any) -> None:
    with count_compiles() as seen:
        for kind, params in KINDS.items():
            for prompts in (PROMPTS[:5], [PROMPTS[5] + [9]]):
                llm.generate(prompts, replace(GREEDY, **params))
            assert seen.count == 0, kind
        llm.generate(["the sea", "a text"], [replace(GREEDY, **KINDS["echo"]), GREEDY])
        assert seen.count == 0
