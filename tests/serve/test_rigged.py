"""The rig itself: it says its script through the real engine, whatever the chunks, the blocks and the neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import msds
from tests.serve.rigged import rigged_llm

Tiny = Callable[..., Path]


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 16, "block_size": 4}], ids=["whole", "chunks"])
def test_scripts_are_said(tiny: Tiny, options: dict[str, int]) -> None:
    llm, rig = rigged_llm(tiny("llama_base", tokenizer=True), max_model_len=128, **options)
    prompts = [[5 + index] * (3 + 13 * index) for index in range(5)]
    outputs = [[40 + index, 7, 8, 9 + index] * 3 for index in range(5)]
    for prompt, output in zip(prompts, outputs, strict=True):
        rig.script(prompt, output)
    sampling = msds.SamplingParams(temperature=1.5, seed=3)
    answers = llm.generate(prompts, sampling)
    end = min(llm.model.eos_token_ids)
    assert [list(answer.token_ids) for answer in answers] == [[*output, end] for output in outputs]
    again = llm.generate(prompts, sampling)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
    assert llm.engine.stats.prefix_tokens_hit > 0


def test_noise_is_a_function_of_the_text(tiny: Tiny) -> None:
    llm, _ = rigged_llm(tiny("llama_base", tokenizer=True), max_model_len=128, block_size=4)
    sampling = msds.SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    first = llm.generate([[5, 6, 7], [5, 6, 8]], sampling)
    assert first[0].token_ids != first[1].token_ids
    assert llm.generate([[5, 6, 7]], sampling)[0].token_ids == first[0].token_ids
