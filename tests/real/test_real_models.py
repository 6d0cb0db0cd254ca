"""Published weights: the same prompts, text and numbers as transformers, in English and Chinese."""

from __future__ import annotations

import numpy as np

from tests.real.pairs import MAX_TOKENS, PROMPTS, Pair

TOLERANCE = 1e-4
"""Of the largest logit: float32 sums in another order, through 24 or 30 layers."""


def test_chat_template_gives_the_ids_of_transformers(pair: Pair) -> None:
    assert [answer.prompt_ids for answer in pair.ours] == [answer.prompt_ids for answer in pair.reference]


def test_greedy_text_is_that_of_transformers(pair: Pair) -> None:
    for prompt, ours, theirs in zip(PROMPTS, pair.ours, pair.reference, strict=True):
        assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids), prompt


def test_logits_are_those_of_transformers(pair: Pair) -> None:
    for prompt, ours, theirs in zip(PROMPTS, pair.ours, pair.reference, strict=True):
        error = np.abs(ours.logits - theirs.logits).max() / np.abs(theirs.logits).max()
        assert error < TOLERANCE, f"{prompt}: {error:.1e} of the largest logit"


def test_served_logprobs_are_those_of_transformers(pair: Pair) -> None:
    """What chunked prefill and batched, padded decode over the paged cache computed, token by token."""
    for prompt, ours, theirs in zip(PROMPTS, pair.ours, pair.reference, strict=True):
        error = np.abs(ours.logprobs - theirs.logprobs).max() / np.abs(theirs.logits).max()
        assert error < TOLERANCE, f"{prompt}: {error:.1e} of the largest logit"


def test_answers_as_the_model_does_without_our_conversion(pair: Pair) -> None:
    """The reference above reads our converted folder; these ids came from transformers' own GGUF import."""
    assert pair.ours[0].token_ids == pair.model.capital


def test_prompts_reach_both_ends(pair: Pair) -> None:
    """Some answers end by themselves, some are cut, and some are neither short nor alike."""
    lengths = [len(answer.token_ids) for answer in pair.ours]
    assert min(lengths) < MAX_TOKENS == max(lengths)
    assert len({answer.text for answer in pair.ours}) == len(PROMPTS)
