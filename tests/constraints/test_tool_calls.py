"""Forced calls: in every layout what comes out is read back as calls of the functions, with arguments that fit."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest

from msds.constraints import AnyText, Function, JsonSchema, ToolCalls
from msds.constraints.grammars import GrammarCompiler
from msds.errors import ConstraintError
from msds.text.reasoning import ReasoningParser, Start
from msds.text.tokenizer import Tokenizer
from msds.text.tools import LAYOUTS, Layout, ToolCallParser
from tests.constraints.kit import Walk, allowed, byte_level, feed, started, walk
from tests.text import tiny

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "北京", '`}"', "```"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "get_weather", "parameters": WEATHER},
    {"name": "get"},
    {"name": "stop-it", "parameters": {"maxProperties": 0}},
]
FUNCTIONS = tuple(Function.read(tool, f"tools[{number}].function") for number, tool in enumerate(TOOLS))


@functools.cache
def marked() -> GrammarCompiler:
    """The markers of every layout are control tokens, as in the vocabularies of V3, V3.1 and Qwen."""
    content = tiny.byte_level_json()
    size = 1 + max(token["id"] for token in content["added_tokens"])
    names = {text for layout in LAYOUTS.values() for text in (layout.opening, layout.begin, layout.end, layout.closing)}
    names |= {"<｜tool▁sep｜>"}
    for number, name in enumerate(sorted(filter(None, names))):
        content["added_tokens"].append(tiny.added(size + number, name, special=False))
    return GrammarCompiler(Tokenizer(content, tiny.byte_level_config()))


COMPILERS = pytest.mark.parametrize("compiler", [marked(), byte_level()], ids=["control", "plain"])
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
LIKELY = ["}"]  # so that answers are short


def read(layout: Layout, text: str, start: Start = Start.CLOSED) -> tuple[str, list[tuple[str, Any]], bool]:
    """(content, [(name, arguments)], whether a call is open), as the client gets them."""
    reasoning, parser = ReasoningParser(start), ToolCallParser(layout, str)
    content, calls = "", [list[str]() for _ in range(0)]
    for piece in [reasoning.push(text).content, reasoning.finish().content, None]:
        delta = parser.finish() if piece is None else parser.push(piece)
        content += delta.content
        for call in delta.calls:
            if call.id is not None:
                calls.append([call.name or "", ""])
            calls[call.index][1] += call.arguments
    is_open = parser.is_open
    return content, [(name, text if is_open else json.loads(text)) for name, text in calls], is_open


def check(answer: Walk, layout: Layout, start: Start = Start.CLOSED) -> list[tuple[str, Any]]:
    """The calls of an answer that is nothing else."""
    assert answer.reason == "stop"
    content, calls, is_open = read(layout, answer.text, start)
    assert not content
    assert not is_open
    assert calls
    schemas = {function.name: function.parameters.schema for function in FUNCTIONS}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name], jsonschema.Draft202012Validator)
    return calls


@COMPILERS
@EVERY_LAYOUT
def test_forced_calls(compiler: GrammarCompiler, layout: Layout) -> None:
    one, more = ToolCalls(layout, FUNCTIONS, is_single=True), ToolCalls(layout, FUNCTIONS)
    counts, names = set(), set()
    for noise in range(16):
        [(name, _)] = check(walk(compiler, one, noise=noise, likely=LIKELY), layout)
        names.add(name)
        answer = walk(compiler, more, noise=noise, likely=LIKELY, steps=900)
        if answer.reason == "stop":
            counts.add(len(check(answer, layout)))
    assert names == {"get_weather", "get", "stop-it"}
    assert {1, 2} <= counts


@COMPILERS
@EVERY_LAYOUT
def test_calls_after_thinking(compiler: GrammarCompiler, layout: Layout) -> None:
    for noise in range(6):
        answer = walk(
            compiler,
            ToolCalls(layout, FUNCTIONS[1:2], is_single=True),
            start=Start.OPEN,
            noise=noise,
            likely=["</think>"],
        )
        if answer.reason == "stop":
            assert check(answer, layout, Start.OPEN) == [("get", {})]


@EVERY_LAYOUT
def test_what_is_forced_is_what_the_model_is_told_to_write(layout: Layout) -> None:
    """The example in the prompt, with a name and arguments, is allowed token by token; and so are two calls."""
    call = layout.call.replace("NAME", "get").replace("ARGUMENTS", "{}")
    for text in (call, call + layout.between + call):
        state = started(marked(), ToolCalls(layout, FUNCTIONS))
        feed(marked(), state, layout.opening + text + layout.closing)
        assert state.may_end
    assert layout.example.count(layout.call) == 1


@EVERY_LAYOUT
def test_markers_are_control_tokens_where_the_vocabulary_has_them(layout: Layout) -> None:
    state = started(marked(), ToolCalls(layout, FUNCTIONS))
    assert allowed(marked(), state) == {(layout.opening or layout.begin).encode()}


@COMPILERS
@EVERY_LAYOUT
def test_text_or_calls(compiler: GrammarCompiler, layout: Layout) -> None:
    """With strict functions and a free choice: any text, and once a call begins it must be one."""
    free = ToolCalls(layout, FUNCTIONS, otherwise=AnyText())
    state = feed(compiler, started(compiler, free), "well <")
    assert state.may_end
    call = layout.call.replace("NAME", "get").replace("ARGUMENTS", "{}")
    text = "well < " + layout.opening + call
    state = feed(compiler, started(compiler, free), text)
    assert read(layout, state._table.tokenizer.decode(marked_ids(compiler, text)))[1] == [("get", {})]
    wrong = layout.opening + layout.call.replace("NAME", "gut")
    ids = marked_ids(compiler, wrong)
    assert started(compiler, free).count_valid(ids) < len(ids)


def marked_ids(compiler: GrammarCompiler, text: str) -> list[int]:
    return compiler._tokenizer.encode(text, bos=False)


@COMPILERS
@EVERY_LAYOUT
def test_a_format_or_calls(compiler: GrammarCompiler, layout: Layout) -> None:
    either = ToolCalls(layout, FUNCTIONS, otherwise=JsonSchema({"type": "boolean"}))
    seen = set()
    for noise in range(12):
        answer = walk(compiler, either, noise=noise, likely=LIKELY, steps=900)
        if answer.text in ("true", "false"):
            seen.add("format")
        elif answer.reason == "stop":
            check(answer, layout)
            seen.add("calls")
    assert seen == {"format", "calls"}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ({"name": "f", "parameters": {"type": "array"}}, ["tools[7].function.parameters", "array"]),
        ({"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}, ["parameters: ", "#/properties/x", "not"]),
        ({"name": "a b"}, ["tools[7].function.name", "a b"]),
    ],
)
def test_refused_by_tool(function: dict[str, Any], words: list[str]) -> None:
    def compile_one() -> None:
        read_one = Function.read(function, "tools[7].function")
        byte_level().compile(ToolCalls(LAYOUTS["qwen"], (read_one,)))

    with pytest.raises(ConstraintError) as caught:
        compile_one()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek-v3.1"])
def test_a_real_vocabulary(name: str) -> None:
    """129,280 ids: calls in DeepSeek's own tokens, and a schema, from noise."""
    compiler = GrammarCompiler(tiny.real(name))
    layout = LAYOUTS["deepseek_v31"]
    markers = [layout.opening, layout.begin, layout.closing, "</think>"]
    assert all(marker in compiler._tokenizer.control_ids for marker in markers)
    answer = walk(compiler, ToolCalls(layout, FUNCTIONS), steps=200, likely=['"}}', *markers])
    check(answer, layout)
    answer = walk(
        compiler, JsonSchema(WEATHER), start=Start.OPEN, steps=200, likely=["</think>", '"}', ": "], min_p=0.1
    )
    parser = ReasoningParser(Start.OPEN)
    jsonschema.validate(json.loads(parser.push(answer.text).content + parser.finish().content), WEATHER)
    state = started(compiler, JsonSchema(WEATHER))
    ids = compiler._tokenizer.encode_plain('{"city": "北京", "days": 3}')
    assert state.count_valid(ids) == len(ids)
