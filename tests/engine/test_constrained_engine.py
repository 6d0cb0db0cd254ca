"""Constrained answers through the engine, over a runner whose logits are noise: steps, preemption, choices, endings."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from msds.constraints import Choice, JsonSchema, Regex
from msds.engine.sequence import RequestInfo
from msds.errors import ConstraintError, SamplingError
from msds.sampling import SamplingParams
from msds.text.reasoning import ReasoningParser, Start
from tests.constraints.kit import EOS_ID, byte_level
from tests.engine import test_engine
from tests.engine.test_engine import Case

TOKENIZER = byte_level()._tokenizer
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "你", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORM = JsonSchema(SCHEMA)
# whitespace is legal and endless; leaving it out keeps answers short
NO_SPACE = {id_: -100.0 for id_, piece in enumerate(byte_level().table.pieces) if piece and not piece.strip()}
PROMPTS = [[20, 21, 22, 23], [60, 70, 80, 90], [100, 110, 120, 130]]


@pytest.fixture(autouse=True)
def _noise_over_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner of the engine's tests, with the vocabulary of a tokenizer and one padding id, which would break."""
    monkeypatch.setattr(test_engine, "VOCAB", TOKENIZER.vocab_size + 1)


def make(num_blocks: int = 60, max_model_len: int = 60) -> Case:
    case = Case(num_blocks, max_model_len=max_model_len)
    model = case.runner.model
    model.config.vocab_size = TOKENIZER.vocab_size + 1
    model.tokenizer, model.grammars, model.allowed_vocab = TOKENIZER, byte_level(), TOKENIZER.vocab_size
    return case


def params(**more: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": 3, "constraint": FORM, "logit_bias": NO_SPACE, **more}


def test_noise_becomes_valid_json_and_ends_by_itself() -> None:
    case = make()
    for index in range(12):
        case.add(PROMPTS[index % 3], index, **params(seed=index, ignore_eos=bool(index % 2)))
    for output in case.run():
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), SCHEMA)
        assert EOS_ID not in output.token_ids  # nothing could follow: no step is spent on an end token
    case.assert_nothing_held()


def test_greedy() -> None:
    case = make()
    case.add(PROMPTS[0], **params(temperature=0))
    [output] = case.run()
    jsonschema.validate(json.loads(output.text), SCHEMA)


def test_choices_have_states_of_their_own() -> None:
    """Each of three choices is what it is alone: one state shared by all would take the tokens of all."""
    case = make()
    case.add(PROMPTS[0], **params(n=3))
    outputs = case.run()
    assert len({output.text for output in outputs}) == 3
    for output in outputs:
        jsonschema.validate(json.loads(output.text), SCHEMA)
    alone = make()
    alone.add(PROMPTS[0], **params())
    assert alone.run()[0].token_ids == outputs[0].token_ids


def test_preemption_does_not_replay_the_state() -> None:
    form = Regex("[a-c]{10}-[d-f]{5}")
    case = make(9)
    for index, prompt in enumerate(PROMPTS):
        case.add(prompt, index, **params(constraint=form, logprobs=1, max_tokens=16))
    outputs = case.run()
    assert case.engine.stats.preemptions > 0
    for got, prompt in zip(outputs, PROMPTS, strict=True):
        single = make()
        single.add(prompt, **params(constraint=form, logprobs=1, max_tokens=16))
        [want] = single.run()
        assert (got.token_ids, got.logprobs, got.text) == (want.token_ids, want.logprobs, want.text)
        assert got.finish_reason == "stop"
    case.assert_nothing_held()


def test_company_without_a_constraint_is_not_constrained() -> None:
    case = make()
    free = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    case.add(PROMPTS[0], 0, **params())
    case.add(PROMPTS[1], 1, **free)
    outputs = case.run()
    alone = make()
    alone.add(PROMPTS[1], **free)
    assert outputs[1].token_ids == alone.run()[0].token_ids


def test_running_out_of_tokens_leaves_a_part() -> None:
    case = make()
    case.add(PROMPTS[0], **params(max_tokens=4))
    [output] = case.run()
    assert output.finish_reason == "length"
    assert output.text.startswith('{"')
    assert len(output.token_ids) == 4


def test_the_last_token_of_the_budget_may_complete_it() -> None:
    case = make()
    case.add(PROMPTS[0], **params(constraint=Choice(["abc"]), max_tokens=3))
    [output] = case.run()
    assert (output.text, output.finish_reason) == ("abc", "stop")


def test_a_stop_string_cuts_a_constrained_text_too() -> None:
    case = make()
    case.add(PROMPTS[0], **params(constraint=Choice(["abc"]), stop="b"))
    [output] = case.run()
    assert (output.text, output.finish_reason) == ("a", "stop")


def test_an_end_token_ends_what_may_go_on() -> None:
    case = make()
    case.add(PROMPTS[0], **params(constraint=Regex("a+"), logit_bias={EOS_ID: 100}))
    [output] = case.run()
    assert (output.text, output.finish_reason, output.token_ids[-1]) == ("a", "stop", EOS_ID)


def test_min_tokens_and_a_text_that_can_only_end() -> None:
    case = make()
    case.add(PROMPTS[0], 0, **params(constraint=Choice(["ab"]), min_tokens=8))
    case.add(PROMPTS[0], 1, **params(constraint=Regex("a+"), min_tokens=8, logit_bias={EOS_ID: 100}))
    short, long = case.run()
    assert (short.text, short.finish_reason) == ("ab", "stop")
    assert (long.text, long.finish_reason) == ("a" * 8, "stop")


@pytest.mark.parametrize("start", [Start.OPEN, Start.MODEL])
def test_thinking_comes_first_where_the_prompt_says_so(start: Start) -> None:
    end = TOKENIZER.control_ids["</think>"]
    case = make(max_model_len=200)
    sampling = SamplingParams(**params(logit_bias={**NO_SPACE, end: 5.0}))
    thought = 0
    for index in range(6):
        info = RequestInfo(prompt_index=index, start=start)
        case.engine.add(PROMPTS[index % 3] + [index + 30], sampling, case.listen, info)
    for output in case.run():
        parser = ReasoningParser(start)
        pieces = [parser.push(output.text), parser.finish()]
        thought += bool(pieces[0].reasoning)
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads("".join(piece.content for piece in pieces)), SCHEMA)
    assert thought > 0 or start is Start.MODEL


def test_a_constraint_that_gets_stuck_ends_its_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make()
    [stuck] = case.add(PROMPTS[0], 0, **params())
    case.add(PROMPTS[1], 1, **params())
    case.engine.step()
    constraint = stuck.state._constraint
    assert constraint is not None
    constraint.accept(EOS_ID)  # what no grammar takes
    failed, well = case.run()
    assert failed.finish_reason == "error"
    assert "constraint" in str(failed.error)
    jsonschema.validate(json.loads(well.text), SCHEMA)
    case.assert_nothing_held()


def test_refused_before_anything_runs() -> None:
    case = make()
    with pytest.raises(ConstraintError, match="not"):
        case.add(PROMPTS[0], **params(constraint=JsonSchema({"not": {}})))
    assert not case.engine.has_work
    bare = Case(20, max_model_len=28)
    bare.runner.model.grammars = None
    with pytest.raises(SamplingError, match="tokenizer"):
        bare.add([5, 6], constraint=FORM)
    assert not bare.engine.has_work
