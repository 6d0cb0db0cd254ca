"""A constraint among the other sampling parameters: its place in the order, and that a token is always left."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.constraints import Choice, Constraint, Regex
from msds.constraints.grammars import GrammarCompiler
from msds.engine.sampler import Sampled, SequenceState, sample
from msds.sampling import SamplingParams
from msds.text.tokenizer import Tokenizer
from tests.constraints.kit import EOS_ID, byte_level, walk
from tests.engine.test_sampler import parameters
from tests.text import tiny

SIZE = byte_level()._tokenizer.vocab_size
LETTERS = {text: byte_level()._tokenizer.encode_plain(text)[0] for text in "abcxyz"}


def state_of(constraint: Constraint, output: str = "", **params: object) -> SequenceState:
    given_params = SamplingParams(constraint=constraint, **params)  # type: ignore[arg-type]
    state = SequenceState(
        given_params,
        seed=5,
        choice=0,
        prompt_ids=[4, 7],
        end_ids=() if given_params.ignore_eos else (EOS_ID,),
        vocab_size=SIZE,
        constraint=byte_level().compile(constraint).start(),
    )
    for letter in output:
        state.observe(LETTERS[letter])
    return state


def draw(state: SequenceState, **logits: float) -> Sampled:
    """One draw from logits that are 0 but for these letters and `end`."""
    row = np.zeros((1, SIZE), np.float32)
    for name, value in logits.items():
        row[0, EOS_ID if name == "end" else LETTERS[name]] = value
    return sample(row, [state])[0]


@given(params=parameters(), noise=st.integers(0, 2**32 - 1), output=st.sampled_from(["", "a", "ab"]))
def test_whatever_the_parameters_the_token_is_allowed(params: SamplingParams, noise: int, output: str) -> None:
    params = dataclasses.replace(params, constraint=Regex("[a-z]{3,5}"), logprobs=3)
    state = state_of(params.constraint, output)  # type: ignore[arg-type]
    state = SequenceState(
        params,
        seed=noise,
        choice=0,
        prompt_ids=[5, 6],
        end_ids=[EOS_ID],
        vocab_size=SIZE,
        constraint=state._constraint,
    )
    logits = np.random.default_rng(noise).standard_normal((1, SIZE)).astype(np.float32) * 5
    [chosen] = sample(logits, [state])
    assert chosen.error is None
    assert state._constraint is not None
    assert state._constraint.mask[chosen.token_id]
    assert chosen.logprobs is not None
    assert all(math.isfinite(value) for _, value in chosen.logprobs.top)
    assert math.isfinite(chosen.logprobs.logprob)


def test_greedy_takes_the_best_allowed_and_the_lowest_of_equals() -> None:
    state = state_of(Choice(["a", "b", "c"]), temperature=0)
    assert not state.is_plain_greedy
    assert draw(state, x=9, b=2, a=1).token_id == LETTERS["b"]
    assert draw(state, x=9).token_id == LETTERS["a"]


def test_bias_does_not_open_what_the_constraint_closes() -> None:
    state = state_of(Choice(["a", "b"]), logit_bias={LETTERS["x"]: 100, LETTERS["b"]: 100}, temperature=0)
    assert draw(state, a=50).token_id == LETTERS["b"]
    assert draw(state_of(Choice(["a"]), logit_bias={LETTERS["a"]: -100}), x=9).token_id == LETTERS["a"]


def test_penalties_act_before_it() -> None:
    state = state_of(Regex("[ab]+"), "a", presence_penalty=2, temperature=0)
    assert draw(state, a=1, x=9, end=-9).token_id == LETTERS["b"]


def test_top_k_and_top_p_choose_among_what_is_allowed() -> None:
    """Applied before the mask, either would keep `x` alone and nothing would be left."""
    for params in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        assert draw(state_of(Choice(["a", "b"]), **params), x=99, b=3).token_id == LETTERS["b"]


def test_log_probabilities_are_the_models_own() -> None:
    chosen = draw(state_of(Choice(["a"]), logprobs=1), x=4)
    assert chosen.logprobs is not None
    assert chosen.logprobs.top[0][0] == LETTERS["x"]
    want = -math.log(math.exp(4) + SIZE - 1)
    assert chosen.logprobs.logprob == pytest.approx(want)


def test_end_tokens_where_the_text_may_end() -> None:
    assert draw(state_of(Regex("a+"), temperature=0), end=9).token_id == LETTERS["a"]
    assert draw(state_of(Regex("a+"), "a", temperature=0), end=9).token_id == EOS_ID
    assert draw(state_of(Regex("a+"), "a", temperature=0, ignore_eos=True), end=9).token_id == LETTERS["a"]


def test_min_tokens_suppresses_the_end_while_there_is_something_else() -> None:
    later = {"min_tokens": 5, "temperature": 0}
    assert draw(state_of(Regex("a+"), "a", **later), end=9).token_id == LETTERS["a"]
    full = state_of(Regex("a"), "a", **later)
    assert full.must_end  # the answer ends although min_tokens asks for more
    stop_at_b = state_of(Choice(["ab"]), "a", stop_token_ids=[LETTERS["b"]], **later)
    assert draw(stop_at_b).token_id == LETTERS["b"]  # the only token there is


def test_stop_tokens_of_the_request_stop_where_they_are_text_and_where_the_text_may_end() -> None:
    x, b = LETTERS["x"], LETTERS["b"]
    assert draw(state_of(Choice(["ab", "ac"]), "a", stop_token_ids=[b], temperature=0), b=2).token_id == b
    assert draw(state_of(Regex("a+"), "a", stop_token_ids=[x], temperature=0), x=2).token_id == x
    assert draw(state_of(Regex("aa+"), "a", stop_token_ids=[x], temperature=0), x=2).token_id == LETTERS["a"]


def test_an_end_token_is_no_part_of_the_text() -> None:
    state = state_of(Regex("a+"), "a")
    state.observe(EOS_ID)
    assert state._constraint is not None
    assert state._constraint.may_end


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    state = state_of(Regex("a+"), temperature=0)
    row = np.zeros((1, SIZE + 40), np.float32)
    row[0, SIZE:] = 9
    assert sample(row, [state])[0].token_id == LETTERS["a"]


def test_a_vocabulary_that_ends_before_the_tokenizer() -> None:
    """A model with fewer ids than its tokenizer (a cut embedding) is masked by what it has."""
    state = state_of(Regex("a+"), temperature=0)
    row = np.zeros((1, LETTERS["a"] + 1), np.float32)
    assert sample(row, [state])[0].token_id == LETTERS["a"]


def test_one_that_is_stuck_fails_alone() -> None:
    """Without a token for `z` the text cannot go on after `a`: its row fails, the others are served."""
    content = tiny.byte_level_json()
    content["model"]["vocab"]["spare"] = content["model"]["vocab"].pop("z")
    compiler = GrammarCompiler(Tokenizer(content, tiny.byte_level_config()))
    constraint = Choice(["az"])
    stuck = SequenceState(
        SamplingParams(constraint=constraint),
        seed=0,
        choice=0,
        prompt_ids=[3],
        end_ids=[EOS_ID],
        vocab_size=SIZE,
        constraint=compiler.compile(constraint).start(),
    )
    stuck.observe(LETTERS["a"])
    assert not stuck.must_end
    other = state_of(Choice(["b"]))
    failed, served = sample(np.zeros((2, SIZE), np.float32), [stuck, other])
    assert failed.token_id == -1
    assert failed.error is not None
    assert "no text from here on" in failed.error
    assert served.token_id == LETTERS["b"]


def test_a_seed_gives_the_same_answer() -> None:
    for noise in range(3):
        one, two = (walk(byte_level(), Regex("[a-z]{6}"), noise=noise) for _ in range(2))
        assert one == two
