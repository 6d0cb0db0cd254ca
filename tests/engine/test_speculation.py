"""Speculation is lossless: whatever is drafted, every answer is what it is without, in all that a client hears.

The drafts of most tests are those of the answer without speculation, some of them spoilt, so that accepted, rejected
and half-accepted rounds all occur under any sampling parameters.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msds.constraints import JsonSchema
from msds.engine.sampler import SequenceState, sample
from msds.engine.sequence import Delta, GenerationSequence
from msds.sampling import SamplingParams
from tests.constraints.kit import byte_level
from tests.engine import test_engine
from tests.engine.drafting import Always, DraftingCase, DraftingRunner, told
from tests.engine.test_engine import BLOCK_SIZE, EOS, VOCAB, Case, expected, logits_after

Request = tuple[list[int], dict[str, Any]]
TOKENIZER = byte_level()._tokenizer


def plain(requests: list[Request], *, max_model_len: int = 60, num_blocks: int = 200) -> list[Any]:
    """The answers without speculation, in a cache that is large enough."""
    case = Case(num_blocks, max_model_len=max_model_len)
    return answers(case, requests)


def answers(case: Case, requests: list[Request]) -> list[Any]:
    for index, (prompt, params) in enumerate(requests):
        case.add(prompt, index, **params)
    outputs = case.run()
    case.assert_nothing_held()
    return outputs


def texts_of(requests: list[Request], outputs: list[Any]) -> list[list[int]]:
    return [[*requests[output.prompt_index][0], *output.token_ids] for output in outputs]


def drafting(
    requests: list[Request],
    outputs: list[Any],
    *,
    k: int,
    wrong: float,
    num_blocks: int = 200,
    max_model_len: int = 60,
    num_replicas: int = 1,
) -> DraftingCase:
    runner = DraftingRunner(num_blocks, k, texts_of(requests, outputs), wrong, num_replicas)
    return DraftingCase(runner, max_model_len=max_model_len)


def check(requests: list[Request], *, k: int, wrong: float, **options: Any) -> DraftingCase:
    """Every answer with speculation is the one without; the case, to look at."""
    want = plain(requests)
    case = drafting(requests, want, k=k, wrong=wrong, **options)
    assert [told(output) for output in answers(case, requests)] == [told(output) for output in want]
    return case


def accepted_share(case: DraftingCase) -> float:
    stats = case.engine.speculation
    assert stats is not None
    return sum(stats.accepted) / max(1, sum(stats.drafted))


PROMPT = st.lists(st.integers(2, 4) | st.integers(2, VOCAB - 2), min_size=1, max_size=14)
PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 1.5]),
        "seed": st.integers(0, 9),
        "n": st.integers(1, 2),
        "top_k": st.integers(0, 5),
        "top_p": st.sampled_from([0.5, 1.0]),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.just(0),
        "repetition_penalty": st.sampled_from([1.0, 1.8]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 1.0]),
        "min_tokens": st.integers(0, 5),
        "stop_token_ids": st.lists(st.integers(2, VOCAB - 1), max_size=4),
        "logit_bias": st.dictionaries(st.integers(1, VOCAB - 2), st.sampled_from([-3.0, 4.0]), max_size=3),
        "ignore_eos": st.booleans(),
    },
)


def seeded(params: dict[str, Any]) -> dict[str, Any]:
    """A seed where none was drawn, or no two runs would be the same; min_tokens that can be kept."""
    return {"seed": 5, **params, "min_tokens": min(params.get("min_tokens", 0), params["max_tokens"])}


@settings(max_examples=120)
@given(
    requests=st.lists(st.tuples(PROMPT, PARAMS.map(seeded)), min_size=1, max_size=5),
    k=st.integers(1, 4),
    wrong=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    spare=st.integers(0, 12),
    restarts=st.sets(st.integers(0, 25), max_size=2),
    aborted=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 4)),
    num_replicas=st.sampled_from([1, 1, 2]),
)
def test_any_requests_any_drafts_any_cache(
    requests: list[Request],
    k: int,
    wrong: float,
    spare: int,
    restarts: set[int],
    aborted: tuple[int, int] | None,
    num_replicas: int,
) -> None:
    """All at once: sampling, penalties, ends, choices, company, prefix hits, chunks, preemption, recomputation after
    new weights, and an answer that is given up under way, which is then a beginning of the whole one."""
    want = plain(requests)
    largest = max(-(-(len(prompt) + params["max_tokens"]) // BLOCK_SIZE) for prompt, params in requests)
    case = drafting(requests, want, k=k, wrong=wrong, num_blocks=1 + largest + spare, num_replicas=num_replicas)
    sequences = [one for i, (prompt, params) in enumerate(requests) for one in case.add(prompt, i, **params)]
    steps = 0
    while case.engine.step():
        if steps in restarts:
            case.engine.invalidate()
        if aborted is not None and steps == aborted[0]:
            case.engine.abort(sequences[aborted[1] % len(sequences)])
        steps += 1
    case.assert_nothing_held()
    for got, whole in zip(case.run(), want, strict=True):
        if got.finish_reason == "abort":
            assert got.token_ids == whole.token_ids[: len(got.token_ids)]
        else:
            assert told(got) == told(whole)
    stats = case.engine.speculation
    assert stats is not None
    assert all(0 <= kept <= made for kept, made in zip(stats.accepted, stats.drafted, strict=True))
    assert sum(stats.accepted) <= sum(len(output.token_ids) for output in want)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_right_drafts_save_steps_and_wrong_ones_change_nothing(k: int) -> None:
    request = ([2, 3, 4], {"max_tokens": 24, "ignore_eos": True, "logit_bias": {VOCAB - 1: -100}})
    right = check([request], k=k, wrong=0.0)
    assert accepted_share(right) == 1
    rounds = right.runner.kinds.count("decode")
    assert rounds == -(-23 // (k + 1))  # the first token comes with the prompt
    wrong = check([request], k=k, wrong=1.0)
    assert accepted_share(wrong) == 0
    assert wrong.runner.kinds.count("decode") == 23


def test_drafts_are_counted_by_place() -> None:
    """k = 3, ten tokens after the first: rounds of 4, 4 and 2, for which the budget leaves one draft."""
    request = ([2, 3, 4], {"max_tokens": 11, "ignore_eos": True, "logit_bias": {VOCAB - 1: -100}})
    stats = check([request], k=3, wrong=0.0).engine.speculation
    assert stats is not None
    assert (stats.drafted, stats.accepted) == ((3, 2, 2), (3, 2, 2))


@pytest.mark.parametrize("k", [1, 3])
def test_drafts_after_the_end_count_for_nothing(k: int) -> None:
    """The end token, a stop token and the budget within an accepted block: nothing after them is told or counted."""
    prompts = [[2, 3, 4], [5, 6], [7, 8, 9, 10]]
    requests: list[Request] = []
    for prompt in prompts:
        answer = expected(prompt, 12)
        requests += [(prompt, {"max_tokens": count}) for count in range(1, 12)]
        requests += [(prompt, {"max_tokens": 12, "stop_token_ids": [token]}) for token in answer]
    for request in requests:
        case = check([request], k=k, wrong=0.0)
        stats = case.engine.speculation
        assert stats is not None
        assert sum(stats.accepted) < len(case.outputs[0].token_ids) or not sum(stats.accepted)


def test_a_draft_that_breaks_the_numbers_breaks_nothing_unless_it_is_right() -> None:
    """Token 31 overflows in this model. As a rejected draft it is nothing; as the next token it ends the answer."""
    runner = DraftingRunner(60, 2)
    runner._drafts = lambda text: [VOCAB - 1, VOCAB - 1]  # type: ignore[method-assign]
    case = DraftingCase(runner, max_model_len=60)
    request = ([2, 3, 4], {"max_tokens": 12, "ignore_eos": True, "logit_bias": {VOCAB - 1: -100}})
    assert [told(output) for output in answers(case, [request])] == [told(output) for output in plain([request])]
    broken = check([([2, 3, 4], {"max_tokens": 12, "ignore_eos": True, "logit_bias": {VOCAB - 1: 100}})], k=2, wrong=0)
    assert broken.outputs[0].finish_reason == "error"


def test_a_shared_prefix_costs_at_most_a_draft() -> None:
    """The second answer does not know the state before its first own token, and is the same all the same."""
    request = (list(range(2, 15)), {"max_tokens": 8, "ignore_eos": True, "logit_bias": {VOCAB - 1: -100}})
    [want] = plain([request])
    case = drafting([request], [want], k=2, wrong=0.0)
    (first,) = answers(case, [request])
    case.outputs.clear()
    (again,) = answers(case, [request])
    assert again.usage.cached_tokens == 12
    assert told(first) == told(again) == told(want)
    assert accepted_share(case) == 1


def test_a_listener_that_gives_up_within_a_block() -> None:
    """What it has heard is a beginning of the answer; the rest of the block is not told, its neighbour goes on."""
    requests: list[Request] = [
        (prompt, {"max_tokens": 16, "ignore_eos": True, "logit_bias": {VOCAB - 1: -100}}) for prompt in ([2, 3], [5, 6])
    ]
    want = plain(requests)
    case = drafting(requests, want, k=3, wrong=0.0)
    heard: list[int] = []

    def listen(sequence: GenerationSequence, delta: Delta) -> None:
        heard.extend(delta.token_ids)
        if len(heard) == 3:  # the first came with the prompt, then a block of four
            case.engine.abort(sequence)

    case.engine.add(requests[0][0], SamplingParams(temperature=0, **requests[0][1]), listen)
    case.add(requests[1][0], 1, **requests[1][1])
    [other] = case.run()
    assert tuple(heard) == want[0].token_ids[:3]
    assert told(other) == told(want[1])
    case.assert_nothing_held()


def test_the_law_of_sampled_tokens() -> None:
    """Two tokens after one prompt over 2000 seeds, drafts always the likeliest: chi-square against the exact law.

    13 cells or fewer of 16 have weight; the limit is the 99.99 % quantile for 15 degrees of freedom.
    """
    params = {"max_tokens": 3, "top_k": 4, "temperature": 3.0, "ignore_eos": True, "logit_bias": {VOCAB - 1: -100}}
    prompt = [4, 5]
    runner = DraftingRunner(400, 2)
    runner._drafts = lambda text: [int(logits_after(text)[:-1].argmax())] * 2  # type: ignore[method-assign]
    case = DraftingCase(runner, max_model_len=60)
    for seed in range(2000):
        case.add(prompt, seed, **params, seed=seed)
    seen = Counter(output.token_ids[1:] for output in case.run() if output.token_ids[0] == most_likely(prompt))
    total, text, chi_square = sum(seen.values()), [*prompt, most_likely(prompt)], 0.0
    for one, first in law(text).items():
        for two, second in law([*text, one]).items():
            want = total * first * second
            chi_square += (seen.pop((one, two), 0) - want) ** 2 / want
    assert not seen
    assert total > 500
    assert chi_square < 44.3


def most_likely(text: list[int]) -> int:
    return int(logits_after(text)[:-1].argmax())


def law(text: list[int]) -> dict[int, float]:
    """The four tokens that may come, and how likely each is at temperature 3."""
    logits = logits_after(text).astype(np.float64)[:-1]
    best = np.argsort(-logits)[:4]
    weights = np.exp(logits[best] / 3.0)
    return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))


class TestText:
    """With a tokenizer: stop strings and constraints over noise."""

    @pytest.fixture(autouse=True)
    def _noise_over_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(test_engine, "VOCAB", TOKENIZER.vocab_size + 1)

    def dress(self, case: Any) -> Any:
        model = case.runner.model
        model.config.vocab_size = TOKENIZER.vocab_size + 1
        model.tokenizer, model.grammars, model.allowed_vocab = TOKENIZER, byte_level(), TOKENIZER.vocab_size
        return case

    def compare(self, requests: list[Request], *, k: int, wrong: float) -> DraftingCase:
        want = answers(self.dress(Case(200, max_model_len=60)), requests)
        case: DraftingCase = self.dress(drafting(requests, want, k=k, wrong=wrong))
        assert [told(output) for output in answers(case, requests)] == [told(output) for output in want]
        return case

    @pytest.mark.parametrize("wrong", [0.0, 0.3])
    def test_stop_strings_across_accepted_drafts(self, wrong: float) -> None:
        base: Request = ([20, 21, 22], {"max_tokens": 14, "ignore_eos": True, "seed": 4, "temperature": 1.0})
        [whole] = answers(self.dress(Case(200, max_model_len=60)), [base])
        stops = [whole.text[at : at + size] for at in range(2, len(whole.text) - 3) for size in (1, 2, 3)]
        for stop in stops[::3]:
            for more in ({}, {"include_stop_str_in_output": True}, {"min_tokens": 6}):
                case = self.compare([(base[0], {**base[1], "stop": stop, "logprobs": 1, **more})], k=3, wrong=wrong)
        assert accepted_share(case) > 0.2

    @pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
    def test_json_with_three_drafts(self, wrong: float) -> None:
        """Forbidden drafts are cut off before they are verified; what is told is what it is without."""
        no_space = {id_: -100.0 for id_, piece in enumerate(byte_level().table.pieces) if piece and not piece.strip()}
        form = JsonSchema(
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "你", None]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        )
        params = {"temperature": 1.0, "constraint": form, "logit_bias": no_space, "logprobs": 0, "n": 2}
        case = self.compare([([20 + i, 30], {**params, "seed": i}) for i in range(4)], k=3, wrong=wrong)
        if wrong == 0:
            assert accepted_share(case) > 0.4
        if wrong == 1:
            stats = case.engine.speculation
            assert stats is not None
            assert stats.drafted[0] < len(case.runner.num_rows)  # nearly all are forbidden, and cost no computing

    def test_a_constraint_that_is_stuck_drafts_nothing(self) -> None:
        state = SequenceState(
            SamplingParams(), seed=0, choice=0, prompt_ids=[1], end_ids=(), vocab_size=300,
            constraint=byte_level().compile(JsonSchema({"type": "object"})).start(hidden=()),
        )  # fmt: skip
        assert state.count_valid([ord("x")]) == 0
        assert state._constraint is not None
        state._constraint.accept(ord("x"))
        assert state.count_valid([5, 6]) == 0


def test_positions_and_keys_do_not_move() -> None:
    """What the engine samples at a place is what `sample` gives there by itself, with the logits of the text so far."""
    request = ([2, 3, 4], {"max_tokens": 10, "temperature": 1.3, "seed": 9, "ignore_eos": True, "stop_token_ids": [31]})
    case = check([request], k=3, wrong=0.2)
    params = SamplingParams(temperature=1.3, seed=9)
    state = SequenceState(params, seed=9, choice=0, prompt_ids=request[0], end_ids=(), vocab_size=VOCAB)
    text = list(request[0])
    for token in case.outputs[0].token_ids:
        [sampled] = sample(logits_after(text)[None], [state], allowed_vocab=VOCAB)
        assert sampled.token_id == token
        state.observe(token)
        text.append(token)
    assert EOS != VOCAB - 1
    assert isinstance(case.engine._speculation, Always)
