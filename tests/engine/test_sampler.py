"""The sampler against a plain reference, its laws, its edges, and its independence of the batch."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from msds.engine.sampler import NEVER, SequenceState, _invert, sample, token_logprobs
from msds.errors import SamplingError
from msds.sampling import SamplingParams
from msds_ops.random import uniform

EOS = 1


def state_of(params, prompt=(), output=(), *, seed=3, choice=0, vocab=10**6):
    ignored = () if params.ignore_eos else (EOS,)
    state = SequenceState(params, seed=seed, choice=choice, prompt_ids=prompt, end_ids=ignored, vocab_size=vocab)
    for token in output:
        state.observe(token)
    return state


def choose(logits, params, prompt=(), output=(), **kwargs):
    [result] = sample(np.asarray([logits], np.float32), [state_of(params, prompt, output, **kwargs)])
    assert result.error is None
    return result.token_id


def plain_scores(logits, params, prompt, output):
    """Logits after penalties, bias and min_tokens, token by token in float32."""
    f32 = np.float32
    scores = [f32(x) for x in logits]
    if params.repetition_penalty != 1:
        r = f32(params.repetition_penalty)
        for token in set(prompt) | set(output):
            scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    if params.presence_penalty or params.frequency_penalty:
        for token in set(output):
            often = f32(list(output).count(token)) * f32(params.frequency_penalty)
            scores[token] -= often + f32(params.presence_penalty)
    for token, bias in params.logit_bias.items():
        scores[token] += f32(bias)
    if len(output) < params.min_tokens:
        for token in {EOS, *params.stop_token_ids}:
            scores[token] = -math.inf
    return [float(score) for score in scores]


def plain_distribution(scores, params):
    """Token id -> probability, over Python lists; no vectorising, no shortcuts.

    Also whether a sum or a weight is so near a limit that rounding decides what is kept.
    """
    if params.temperature == 0:
        return {scores.index(max(scores)): 1.0}, False
    peak = max(scores)
    weights = [math.exp((score - peak) / params.temperature) for score in scores]
    best_first = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.top_k > 0:
        best_first = best_first[: params.top_k]
    needed = params.top_p * sum(weights[token] for token in best_first)
    kept, mass, on_edge = [], 0.0, False
    for token in best_first:
        if kept and params.top_p < 1:
            on_edge |= abs(mass - needed) < 1e-9 * needed
            if mass >= needed:
                break
        kept.append(token)
        mass += weights[token]
    if params.min_p > 0:
        on_edge |= any(abs(weights[token] - params.min_p) < 1e-12 for token in kept if weights[token] != 1)
        kept = [token for token in kept if weights[token] >= params.min_p]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in sorted(kept)}, on_edge


def plain_choice(distribution, number):
    """(token, how far `number` is from the nearest edge between two tokens)"""
    edges = np.cumsum(list(distribution.values()))[:-1]  # the last one is 1 but for rounding
    index = int(np.searchsorted(edges, number, side="right"))
    return list(distribution)[index], float(np.abs(edges - number).min(initial=1.0))


@st.composite
def parameters(draw):
    maybe = lambda values, off: draw(st.one_of(st.just(off), values))  # noqa: E731 - a word of its own
    return SamplingParams(
        temperature=maybe(st.floats(0.05, 5), 0.0),
        top_k=maybe(st.integers(1, 40), -1),
        top_p=maybe(st.floats(0, 1), 1.0),
        min_p=maybe(st.floats(0, 0.5), 0.0),
        repetition_penalty=maybe(st.floats(0.5, 2), 1.0),
        presence_penalty=maybe(st.floats(-2, 2), 0.0),
        frequency_penalty=maybe(st.floats(-2, 2), 0.0),
        min_tokens=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.lists(st.integers(0, 20), max_size=2)),
        logit_bias=draw(st.dictionaries(st.integers(0, 20), st.floats(-100, 100), max_size=3)),
    )


@settings(deadline=None, max_examples=300)
@given(
    params=parameters(),
    # sizes below and above the block that the search for the largest works in, and uneven ones
    size=st.sampled_from([23, 127, 128, 700, 12_345]),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
    rounded=st.booleans(),
    noise=st.integers(0, 2**32 - 1),
    prompt=st.lists(st.integers(0, 22), max_size=6),
    output=st.lists(st.integers(0, 22), max_size=6),
)
def test_equals_the_plain_reference(params, size, scale, rounded, noise, prompt, output):
    logits = np.random.default_rng(noise).standard_normal(size).astype(np.float32) * np.float32(scale)
    if rounded:
        logits = np.round(logits)  # many ties
    scores = plain_scores(logits, params, prompt, output)
    expected, on_edge = plain_distribution(scores, params)
    assume(not on_edge)
    number = uniform(3, 0, len(prompt) + len(output))
    token, distance = plain_choice(expected, number)
    chosen = choose(logits, params, prompt, output)
    assert chosen == token or (distance < 1e-9 and chosen in expected)


def test_draw_follows_the_law():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    for params, law in [
        (SamplingParams(), [0.4, 0.3, 0.2, 0.1]),
        (SamplingParams(temperature=0.5), np.array([16, 9, 4, 1]) / 30),
        (SamplingParams(top_k=2), [4 / 7, 3 / 7]),
        (SamplingParams(top_p=0.75), [4 / 9, 3 / 9, 2 / 9]),
        (SamplingParams(min_p=0.6), [4 / 7, 3 / 7]),
    ]:
        states = [state_of(params, prompt=range(position)) for position in range(4000)]
        results = sample(np.tile(logits, (len(states), 1)), states)
        counts = np.bincount([result.token_id for result in results], minlength=4)
        assert counts[len(law) :].sum() == 0
        assert stats.chisquare(counts[: len(law)], np.array(law) * len(states)).pvalue > 1e-4


def test_temperature_zero_takes_the_best_and_the_lowest_of_equals():
    assert choose([0, 5, 5, 1], SamplingParams(temperature=0)) == 1
    assert choose([0, 5, 5, 1], SamplingParams(temperature=0, logprobs=2)) == 1
    assert choose([0, 5, 5, 1], SamplingParams(temperature=1e-300)) in (1, 2)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1e-12),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-6),
        SamplingParams(top_k=1, top_p=1e-9, min_p=1.0, temperature=100.0),
    ],
)
def test_at_least_the_best_token_is_kept(params):
    logits = np.random.default_rng(0).standard_normal(1000)
    for seed in range(20):
        assert choose(logits, params, seed=seed) == int(logits.argmax())


def test_ties_at_the_edge_keep_the_lowest_ids():
    logits = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0]
    for params in (SamplingParams(top_k=3, temperature=9.0), SamplingParams(top_p=0.75)):
        chosen = {choose(logits, params, seed=seed) for seed in range(200)}
        assert chosen == {1, 2, 3}


def test_top_p_that_is_reached_exactly_keeps_no_more():
    halves = SamplingParams(temperature=1 / math.log(2), top_p=0.5)  # one logit less, half as likely, exactly
    for logits, kept in [([0, 0, 0, 0], {0, 1}), ([-1, 0, -1, 0, -1, -1], {1, 3}), ([0, -1, -2, -2], {0})]:
        assert {choose(logits, halves, seed=seed) for seed in range(100)} == kept


def test_a_long_tail_belongs_to_top_p():
    # 20,000 tokens of 1e-7 each hold 0.2 %: top_p 0.999 needs half of them, those of the lowest ids
    logits = np.full(20_001, math.log(1e-7))
    logits[7] = 0
    chosen = {choose(logits, SamplingParams(top_p=0.999), seed=seed) for seed in range(3000)}
    assert len(chosen) > 1
    assert max(chosen) < 10_100


def test_a_number_between_two_roundings_of_one_sum_stays_inside():
    """The running sum of a block may end just below the sum of that block: the last token takes the gap."""
    rng = np.random.default_rng(0)
    gaps = 0
    for _ in range(200):
        weights = rng.random(256)
        block = np.add.reduceat(weights, [0, 128])
        number = np.nextafter(block[0], 0) / block.sum()
        if np.cumsum(weights[:128])[-1] <= number * block.sum() < block[0]:
            gaps += 1
            assert _invert(weights, number) == 127
    assert gaps > 10


def test_min_p_counts_from_the_best_token():
    logits = np.log(np.array([0.5, 0.26, 0.24]))
    assert {choose(logits, SamplingParams(min_p=0.5), seed=s) for s in range(100)} == {0, 1}


def test_number_zero_skips_tokens_without_probability(monkeypatch):
    monkeypatch.setattr(SequenceState, "uniform", lambda self: 0.0)
    assert choose([-math.inf, -math.inf, 0.0, 1.0], SamplingParams()) == 2
    assert choose([-math.inf] * 300 + [0.0], SamplingParams()) == 300
    monkeypatch.setattr(SequenceState, "uniform", lambda self: 1 - 2**-24)
    assert choose([0.0, 1.0, -math.inf, -math.inf], SamplingParams()) == 1


def test_repetition_penalty_covers_prompt_and_output_and_knows_the_sign():
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert choose([3.0, 2.0, 1.0], params, prompt=[0]) == 1  # 3 / 2 < 2
    assert choose([3.0, 2.0, 1.0], params, output=[0]) == 1
    assert choose([-1.0, -1.5, -9.0], params, output=[0]) == 1  # -1 * 2 < -1.5
    assert choose([3.0, 1.4, 1.0], params, prompt=[0, 0, 0]) == 0  # once, however often it came


def test_presence_and_frequency_penalties_see_the_output_only():
    presence = SamplingParams(temperature=0, presence_penalty=1.0)
    frequency = SamplingParams(temperature=0, frequency_penalty=1.0)
    for params in (presence, frequency):
        assert choose([2.0, 1.5], params, prompt=[0, 0, 0]) == 0
        assert choose([2.0, 1.5], params, output=[0]) == 1
    assert choose([3.5, 1.0], presence, output=[0, 0, 0]) == 0
    assert choose([3.5, 1.0], frequency, output=[0, 0, 0]) == 1


def test_penalties_of_many_tokens_equal_a_recount():
    params = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    rng = np.random.default_rng(2)
    output = rng.integers(0, 200, 500).tolist()  # more distinct ids than the first allocation holds
    prompt = rng.integers(0, 200, 50).tolist()
    logits = rng.standard_normal(200).astype(np.float32)
    expected = logits.astype(np.float64)
    for token in set(prompt + output):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(output):
        expected[token] -= 0.5 + 0.25 * output.count(token)
    np.testing.assert_allclose(state_of(params, prompt, output).adjusted(logits), expected, rtol=1e-5)


def test_the_order_is_penalties_then_temperature():
    # (4 - 1) / 2 leaves a gap of 1 to 0.5; penalties after the temperature would leave 4 / 2 - 1 - 0.5
    params = SamplingParams(temperature=2.0, presence_penalty=1.0)
    counts = np.bincount([choose([4.0, 1.0], params, output=[0], seed=s) for s in range(2000)], minlength=2)
    assert abs(counts[0] / 2000 - 1 / (1 + math.exp(-1.0))) < 0.04


def test_min_tokens_suppresses_every_end():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[2])
    logits = [0.0, 9.0, 8.0, 7.0]
    assert [choose(logits, params, output=[0] * length) for length in range(3)] == [3, 3, EOS]
    going_on = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[2], ignore_eos=True)
    assert choose(logits, going_on) == EOS


def test_logit_bias_bans_and_forces():
    assert choose([5.0, 4.0, 0.0], SamplingParams(temperature=0, logit_bias={0: -100})) == 1
    assert choose([5.0, 4.0, 0.0], SamplingParams(temperature=0, logit_bias={2: 100})) == 2
    with pytest.raises(SamplingError, match="logit_bias names token 9; the model has the tokens 0 to 7"):
        state_of(SamplingParams(logit_bias={9: 1.0}), vocab=8)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2)])
def test_ids_without_a_token_are_never_chosen(params):
    logits = np.array([[0.0, 1.0, 0.5, 99.0]], np.float32)
    for seed in range(30):
        [result] = sample(logits, [state_of(params, seed=seed)], allowed_vocab=3)
        assert result.token_id < 3


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_fails_alone(greedy, broken):
    params = SamplingParams(temperature=0 if greedy else 1)
    logits = np.zeros((3, 5), np.float32)
    logits[1, 4] = broken
    results = sample(logits, [state_of(params)] * 3)
    assert results[1].token_id == -1
    assert str(broken) in results[1].error
    assert [results[0].error, results[2].error] == [None, None]


def test_nothing_left_to_choose_is_an_error_of_the_row():
    params = SamplingParams(min_tokens=1, stop_token_ids=[0])
    [result] = sample(np.zeros((1, 2), np.float32), [state_of(params)])
    assert (result.token_id, "no token is left" in result.error) == (-1, True)
    [result] = sample(np.full((1, 2), -np.inf, np.float32), [state_of(SamplingParams(temperature=0))])
    assert (result.token_id, "every logit is -inf" in result.error) == (-1, True)


def test_rows_and_states_must_match():
    with pytest.raises(ValueError, match=r"2 states need logits \[2, V\], not \[1, 5\]"):
        sample(np.zeros((1, 5), np.float32), [state_of(SamplingParams())] * 2)


@settings(deadline=None, max_examples=40)
@given(order=st.permutations(range(5)), size=st.integers(1, 5))
def test_a_row_does_not_depend_on_its_batch(order, size):
    logits = np.random.default_rng(4).standard_normal((5, 400)).astype(np.float32) * 3
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.8, logprobs=2),
        SamplingParams(top_k=7, presence_penalty=1.0),
        SamplingParams(temperature=0, repetition_penalty=1.5),
    ]
    states = [state_of(params, output=[5, 9], seed=row) for row, params in enumerate(kinds)]
    alone = [sample(logits[row : row + 1], [states[row]])[0] for row in range(5)]
    some = order[:size]
    assert sample(logits[list(some)], [states[row] for row in some]) == [alone[row] for row in some]


def test_seed_choice_and_position_decide_and_nothing_else():
    logits = np.zeros(1000, np.float32)  # the draw is then the random number itself

    def text(seed, choice, prompt=(7, 7)):
        state = state_of(SamplingParams(), prompt, seed=seed, choice=choice)
        tokens = []
        for _ in range(8):
            [result] = sample(logits[None], [state])
            tokens.append(result.token_id)
            state.observe(result.token_id)
        return tokens

    first = text(1, 0)
    assert first == [int(uniform(1, 0, 2 + step) * 1000) for step in range(8)]
    assert first == text(1, 0)
    assert len({tuple(text(*key)) for key in [(1, 0), (1, 1), (2, 0), (2, 1)]}) == 4
    # a preempted sequence is rebuilt from its prompt and the tokens so far
    resumed = state_of(SamplingParams(), (7, 7), first[:5], seed=1)
    assert sample(logits[None], [resumed])[0].token_id == first[5]


def test_logprobs_are_of_the_raw_logits():
    logits = np.random.default_rng(1).standard_normal(500).astype(np.float32) * 4
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    params = SamplingParams(temperature=0.3, top_k=5, logprobs=4, presence_penalty=2.0)
    [result] = sample(logits[None], [state_of(params, output=[int(logits.argmax())])])
    got = result.logprobs
    assert got.token_id == result.token_id
    assert got.logprob == pytest.approx(expected[result.token_id], abs=1e-12)
    best = np.argsort(-expected, kind="stable")
    assert [id_ for id_, _ in got.top] == best[:4].tolist()
    assert [value for _, value in got.top] == pytest.approx(expected[best[:4]], abs=1e-12)
    assert got.rank == 1 + best.tolist().index(result.token_id)


def test_logprobs_of_the_whole_vocabulary_sum_to_one():
    logits = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    values = token_logprobs(logits, 0, 300)
    assert sum(math.exp(value) for _, value in values.top) == pytest.approx(1, abs=1e-12)
    assert len(values.top) == 300
    assert token_logprobs(logits, 0, 10**6) == values


def test_top_logprobs_break_ties_by_lowest_id():
    logits = np.array([1.0, 2.0, 1.0, 2.0, 1.0], np.float32)
    assert [id_ for id_, _ in token_logprobs(logits, 4, 4).top] == [1, 3, 0, 2]
    assert token_logprobs(logits, 4, 0).top == ()
    assert token_logprobs(logits, 4, 0).rank == 3


def test_logprobs_are_finite_numbers():
    values = token_logprobs(np.array([0.0, -np.inf], np.float32), 1, 2)
    assert values.logprob == NEVER
    assert values.top == ((0, 0.0), (1, NEVER))


def test_greedy_choice_is_the_first_of_the_top():
    logits = np.array([[1.0, 7.0, 7.0, 0.0]], np.float32)
    [result] = sample(logits, [state_of(SamplingParams(temperature=0, logprobs=2))])
    assert result.logprobs.top[0][0] == result.token_id == 1
    assert result.logprobs.rank == 1
