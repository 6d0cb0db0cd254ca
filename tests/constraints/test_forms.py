"""The other forms, and what compiling keeps and shares."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.constraints import AnyText, Choice, Constraint, Grammar, JsonObject, JsonSchema, Regex
from msds.constraints.forms import MAX_LINES
from msds.constraints.grammars import MAX_KEPT, GrammarCompiler
from msds.errors import ConstraintError, SamplingError
from msds.sampling import SamplingParams
from tests.constraints.kit import allowed, byte_level, feed, started, walk
from tests.text import tiny


@given(
    options=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5),
    noise=st.integers(0, 2**32 - 1),
)
def test_a_choice_is_one_of_its_texts(options: list[str], noise: int) -> None:
    answer = walk(byte_level(), Choice(options), noise=noise)
    assert answer.reason == "stop"
    assert answer.text in options


def test_a_choice_that_begins_another_may_end_or_go_on() -> None:
    state = feed(byte_level(), started(byte_level(), Choice(["no", "nope"])), "no")
    assert state.may_end
    assert not state.must_end
    assert allowed(byte_level(), state) == {b"p"}
    assert {walk(byte_level(), Choice(["no", "nope"]), noise=noise).text for noise in range(20)} == {"no", "nope"}


@pytest.mark.parametrize("pattern", [r"[a-c]+/\d{1,3}", r'"\n*x?', "你|好{2,3}", r"(?i)yes|no"])
def test_a_regular_expression_matches_the_whole(pattern: str) -> None:
    for noise in range(8):
        answer = walk(byte_level(), Regex(pattern), noise=noise)
        assert answer.reason == "stop"
        assert re.fullmatch(pattern, answer.text)


def test_a_grammar() -> None:
    sums = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9]/'
    for noise in range(8):
        answer = walk(byte_level(), Grammar(sums), noise=noise)
        if answer.reason == "stop":
            eval(answer.text, {})


def test_a_grammar_may_name_control_tokens_and_hold_a_schema() -> None:
    user = byte_level()._tokenizer.control_ids[tiny.USER]
    grammar = Grammar(f'start: "a" <[{user}]> %json {{"type": "boolean"}}')
    state = feed(byte_level(), started(byte_level(), grammar), f"a{tiny.USER}tr")
    assert b"u" in allowed(byte_level(), state)


def test_any_text_holds_no_control_token() -> None:
    state = started(byte_level(), AnyText())
    assert state.may_end
    tokenizer = byte_level()._tokenizer
    assert not any(state.mask[id_] for id_ in tokenizer.control_ids.values())
    assert allowed(byte_level(), state) > {bytes([byte]) for byte in range(128)} | {"你".encode(), b"hello"}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Grammar("start: other"), "other"),
        (Grammar("nothing"), "Expected"),
        (Grammar('start: ""'), "no text"),
        (Grammar('start: x "c"\nx[stop="b"]: /a*/'), "stop"),
        (Grammar("start: x\nx[max_tokens=3]: /a*/"), "max_tokens"),
        (Grammar('start: %json {"patternProperties": {}}'), "patternProperties"),
        (
            Grammar("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(MAX_LINES)) + f'\nr{MAX_LINES}: "a"'),
            "large",
        ),
        (Regex("(?=a)b"), "look-around"),
        (Regex("("), "regex"),
        (Regex("()"), "no text"),
    ],
)
def test_refused(form: Constraint, words: str) -> None:
    with pytest.raises(ConstraintError, match=words) as caught:
        byte_level().compile(form)
    assert len(str(caught.value)) < 700


def test_the_words_of_refused_options_may_stand_in_strings() -> None:
    assert walk(byte_level(), Grammar('start: "stop=max_tokens="')).text == "stop=max_tokens="


@pytest.mark.parametrize("make", [Grammar, Regex, lambda value: Choice([value])])
@pytest.mark.parametrize("value", ["", None, 3, b"x", "\ud800"])
def test_texts_are_checked_when_a_form_is_made(make: Any, value: Any) -> None:
    with pytest.raises(SamplingError):
        make(value)


@pytest.mark.parametrize("options", ["ab", [], None, {"a": 1}])
def test_a_choice_is_a_list(options: Any) -> None:
    with pytest.raises(SamplingError, match="list"):
        Choice(options)


def test_equal_forms_share_one_grammar_and_others_do_not() -> None:
    compiler = GrammarCompiler(tiny.byte_level())
    held = compiler.compile(JsonSchema({"type": "null"}))
    assert compiler.compile(JsonSchema({"type": "null"})) is held
    assert compiler.compile(JsonSchema({"type": "boolean"})) is not held
    assert compiler.compile(Regex("null")) is not held
    assert JsonObject() == JsonObject() != JsonSchema({"type": "object"})


def test_few_grammars_are_kept_and_what_is_held_stays() -> None:
    compiler = GrammarCompiler(tiny.byte_level())
    held, dropped = compiler.compile(Regex("held")), weakref.ref(compiler.compile(Regex("dropped")))
    for number in range(MAX_KEPT):
        compiler.compile(Regex(f"n{number}"))
    gc.collect()
    assert dropped() is None
    assert compiler.compile(Regex("held")) is held


def test_threads_that_compile_the_same_share_it() -> None:
    compiler = GrammarCompiler(tiny.byte_level())
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(JsonObject()))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_parameters_take_forms_and_nothing_else() -> None:
    assert SamplingParams(constraint=JsonObject()) == SamplingParams(constraint=JsonObject())
    hash(SamplingParams(constraint=Choice(["a"])))
    for wrong in ({"type": "object"}, "json", JsonObject):
        with pytest.raises(SamplingError, match="constraint"):
            SamplingParams(constraint=wrong)


def test_forms_are_free_until_one_is_compiled() -> None:
    code = "import sys, msds.sampling, msds.constraints.grammars; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
