"""SamplingParams refuses what it cannot mean, naming field, value and legal range."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from msds.errors import SamplingError
from msds.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED = [
    ("n", 0, "an integer >= 1"),
    ("n", True, "an integer >= 1"),
    ("n", 1.0, "an integer >= 1"),
    ("temperature", -0.1, "a number >= 0"),
    ("temperature", NAN, "a number >= 0"),
    ("temperature", INF, "a number >= 0"),
    ("temperature", True, "a number >= 0"),
    ("temperature", "1", "a number >= 0"),
    ("temperature", None, "a number >= 0"),
    ("top_k", -2, "an integer >= -1"),
    ("top_k", 5.0, "an integer >= -1"),
    ("top_p", 1.5, "a number from 0 to 1"),
    ("top_p", -0.1, "a number from 0 to 1"),
    ("top_p", NAN, "a number from 0 to 1"),
    ("min_p", 1.01, "a number from 0 to 1"),
    ("repetition_penalty", 0.0, "a number from 0.01 to 100"),
    ("repetition_penalty", -1, "a number from 0.01 to 100"),
    ("repetition_penalty", INF, "a number from 0.01 to 100"),
    ("presence_penalty", 2.5, "a number from -2 to 2"),
    ("frequency_penalty", -2.5, "a number from -2 to 2"),
    ("seed", 1.5, "an integer or None"),
    ("seed", True, "an integer or None"),
    ("max_tokens", 0, "an integer >= 1 or None"),
    ("max_tokens", -1, "an integer >= 1 or None"),
    ("max_tokens", 1.5, "an integer >= 1 or None"),
    ("max_tokens", True, "an integer >= 1 or None"),
    ("min_tokens", -1, "an integer >= 0"),
    ("stop", "", "a non-empty string or a list of them"),
    ("stop", ["a", ""], "a non-empty string or a list of them"),
    ("stop", ["a", 1], "a non-empty string or a list of them"),
    ("stop_token_ids", [-1], "token ids"),
    ("stop_token_ids", [1.0], "token ids"),
    ("stop_token_ids", 5, "token ids"),
    ("logprobs", -1, "an integer >= 0 or None"),
    ("logprobs", True, "an integer >= 0 or None"),
    ("prompt_logprobs", 0.5, "an integer >= 0 or None"),
    ("logit_bias", {1: 101}, "from -100 to 100"),
    ("logit_bias", {1: NAN}, "from -100 to 100"),
    ("logit_bias", {"1": 1}, "token ids"),
    ("logit_bias", [1], "token ids"),
    ("ignore_eos", 1, "True or False"),
    ("include_stop_str_in_output", "yes", "True or False"),
    ("skip_special_tokens", None, "True or False"),
]


@pytest.mark.parametrize(("name", "value", "legal"), REFUSED)
def test_refusals_name_field_value_and_range(name, value, legal):
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is {value!r}; it must be ")
    assert legal in message


def test_min_tokens_above_max_tokens_is_a_contradiction():
    with pytest.raises(SamplingError, match="min_tokens is 5, more than max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_values_are_stored_in_their_final_type():
    params = SamplingParams(
        n=np.int64(2),
        temperature=1,
        top_k=np.int32(4),
        stop="END",
        stop_token_ids=[np.int64(3)],
        logit_bias={np.int64(7): -100},
        seed=-(2**63),
    )
    assert (params.n, type(params.n)) == (2, int)
    assert (params.temperature, type(params.temperature)) == (1.0, float)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3,)
    assert type(params.stop_token_ids[0]) is int
    assert params.logit_bias == {7: -100.0}
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_edge_values_are_legal():
    SamplingParams(temperature=0, top_k=-1, top_p=0, min_p=1, presence_penalty=-2, max_tokens=1, logprobs=0)


def test_parameters_are_frozen_and_hashable():
    params = SamplingParams(logit_bias={1: 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert hash(params) == hash(SamplingParams(logit_bias={1: 1.0}))


def file_defaults(**values):
    none = dict.fromkeys(("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"))
    return SimpleNamespace(**none | values)


def test_explicit_values_beat_the_file_and_the_file_beats_the_defaults():
    generation = file_defaults(do_sample=True, temperature=0.6, top_p=0.95, repetition_penalty=1.1)
    params = SamplingParams.from_generation_config(generation, temperature=0.2, max_tokens=7)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.2, 0.95, 1.1)
    assert (params.top_k, params.max_tokens) == (0, 7)
    assert SamplingParams.from_generation_config(file_defaults()) == SamplingParams()


def test_do_sample_false_means_greedy_unless_asked_otherwise():
    generation = file_defaults(do_sample=False, temperature=0.6)
    assert SamplingParams.from_generation_config(generation).temperature == 0.0
    assert SamplingParams.from_generation_config(generation, temperature=0.5).temperature == 0.5
