"""When a constraint is in force: thinking that is open, closed or up to the model, in every cut of the markers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msds.constraints import Choice, JsonSchema, Regex
from msds.constraints.grammars import GrammarCompiler
from msds.constraints.state import MAX_SPACES
from msds.errors import ConstraintError
from msds.text.reasoning import ReasoningParser, Start
from tests.constraints.kit import EOS_ID, allowed, byte_level, feed, plain_think, started, walk

A = JsonSchema(
    {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"], "additionalProperties": False}
)
COMPILERS = {"control": byte_level, "plain": plain_think}


@pytest.fixture(params=COMPILERS, ids=list(COMPILERS))
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    return COMPILERS[request.param]()


def test_at_once_without_thinking(compiler: GrammarCompiler) -> None:
    state = started(compiler, A)
    assert allowed(compiler, state) <= {b"{"}
    assert not state.may_end
    feed(compiler, state, '{"a": 1}')
    assert state.may_end
    assert state.must_end
    assert not state.mask.any()


def test_open_thinking_is_free_until_its_end(compiler: GrammarCompiler) -> None:
    """The end in one token, or cut at every character."""
    state = started(compiler, A, Start.OPEN)
    assert state.mask.all()
    feed(compiler, state, 'first {"b": then <think> you</thin')
    assert b"x" in allowed(compiler, state)
    assert not state.may_end
    feed(compiler, state, "k - no</think>")
    assert allowed(compiler, state) >= {b"{", b" ", b"\n"}
    assert b"x" not in allowed(compiler, state)
    feed(compiler, state, '\n\n{"a":')
    assert b'"' not in allowed(compiler, state)
    feed(compiler, state, "1}")
    assert state.must_end


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_marker_may_be_cut_anywhere(cut: int) -> None:
    compiler, tokenizer = plain_think(), plain_think()._tokenizer
    state = started(compiler, A, Start.OPEN)
    for part in ("x</think>"[: cut + 1], "</think>"[cut:]):
        for id_ in tokenizer.encode_plain(part):
            assert state.mask[id_]
            state.accept(id_)
    assert b"x" not in allowed(compiler, state)
    assert b"{" in allowed(compiler, state)


def test_a_token_does_not_close_the_thinking_and_begin_the_answer() -> None:
    """`>{` in one token would slip past the grammar, here or where the answer is no object. `>` and a newline may."""
    compiler = plain_think()
    state = started(compiler, A, Start.OPEN)
    assert {b">{", b'>"', b">\n"} <= allowed(compiler, state)
    feed(compiler, state, "so</think")
    assert {b">", b">\n"} <= allowed(compiler, state)
    assert not {b">{", b'>"'} & allowed(compiler, state)


def test_spaces_after_thinking_are_bounded_and_belong_to_the_layout(compiler: GrammarCompiler) -> None:
    state = feed(compiler, started(compiler, A, Start.OPEN), "x</think>")
    for _ in range(MAX_SPACES):
        feed(compiler, state, " ")
    assert allowed(compiler, state) <= {b"{"}


def test_a_grammar_that_wants_space_first_gets_it(compiler: GrammarCompiler) -> None:
    state = feed(compiler, started(compiler, Choice([" yes"]), Start.OPEN), "x</think> yes")
    assert state.must_end


def test_where_the_model_decides_both_are_open(compiler: GrammarCompiler) -> None:
    opener = b"<think>" if compiler is byte_level() else b"<"
    state = started(compiler, A, Start.MODEL)
    assert {b"{", opener} <= allowed(compiler, state)
    assert b"x" not in allowed(compiler, state)
    thinks = feed(compiler, state.copy(), "<think>no {")
    assert b"x" in allowed(compiler, thinks)
    feed(compiler, thinks, '</think> {"a":1}')
    assert thinks.must_end
    answers = feed(compiler, state, '{"a":1}')
    assert answers.must_end


def test_half_a_marker_that_is_an_answer_too() -> None:
    compiler = plain_think()
    state = feed(compiler, started(compiler, Regex("<th?x+"), Start.MODEL), "<th")
    assert {b"i", b"x"} <= allowed(compiler, state)
    assert b"y" not in allowed(compiler, state)
    answer = feed(compiler, state.copy(), "xx")
    assert answer.may_end
    assert not answer.must_end
    thinks = feed(compiler, state, "ink>y</think><tx")
    assert thinks.may_end


@settings(max_examples=60)
@given(start=st.sampled_from(Start), noise=st.integers(0, 2**32 - 1), plain=st.booleans())
def test_the_client_gets_valid_content_whatever_the_model_does(start: Start, noise: int, plain: bool) -> None:
    """The state and the parser that splits the client's text must agree: what is content is valid JSON."""
    compiler = plain_think() if plain else byte_level()
    answer = walk(compiler, A, start=start, noise=noise, likely=["</think>", "<think>", "{}"], steps=300)
    parser = ReasoningParser(start)
    content = parser.push(answer.text).content + parser.finish().content
    assert answer.reason in ("stop", "length")
    if answer.reason == "stop":
        assert json.loads(content)["a"] in (1, 23)


def test_no_end_token_inside_the_thinking(compiler: GrammarCompiler) -> None:
    for noise in range(5):
        answer = walk(compiler, A, start=Start.OPEN, noise=noise, steps=40, logit_bias={EOS_ID: 100})
        assert answer.reason == "length"
        assert EOS_ID not in answer.ids


def test_copies_are_independent(compiler: GrammarCompiler) -> None:
    for start, text in [(Start.CLOSED, '{"a'), (Start.OPEN, "hm</think"), (Start.MODEL, "<")]:
        if compiler is byte_level() and start is Start.MODEL:
            continue  # the marker is one token
        state = feed(compiler, started(compiler, A, start), text)
        before = allowed(compiler, state)
        feed(compiler, state.copy(), {"{": '":1}', "h": '> {"a":1}', "<": 'think>x</think> {"a":1}'}[text[0]])
        assert allowed(compiler, state) == before
        assert not state.may_end


def test_drafts_are_judged_token_by_token_and_change_nothing(compiler: GrammarCompiler) -> None:
    """The mask after j draft tokens is that of a state that took them, and a wrong one counts as the end."""
    encode = compiler._tokenizer.encode
    for start, text in [(Start.CLOSED, '{"a": 2'), (Start.OPEN, 'x</think> {"a": 23')]:
        state = started(compiler, A, start)
        good = encode(text, bos=False)
        bad = encode("7", bos=False)
        before = allowed(compiler, state)
        assert state.count_valid(good) == len(good)
        assert state.count_valid([*good, *bad]) == len(good)
        assert state.count_valid([]) == 0
        assert state.count_valid([compiler._tokenizer.vocab_size]) == 0  # padding of the model's vocabulary
        assert allowed(compiler, state) == before
        for count, id_ in enumerate(good):
            assert state.count_valid(good[count:]) == len(good) - count
            state.accept(id_)


def test_a_token_that_is_not_allowed_shows_at_the_next_mask() -> None:
    state = started(byte_level(), A)
    state.accept(byte_level()._tokenizer.encode_plain("x")[0])
    assert not state.may_end
    with pytest.raises(ConstraintError, match="followed"):
        _ = state.mask
