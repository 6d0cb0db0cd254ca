"""Tool calls read from streamed text: every layout, every cut, and back through the real templates."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.text.detokenizer import Detokenizer
from msds.text.reasoning import ReasoningParser, Start
from msds.text.tools import (
    LAYOUTS,
    ToolCallParser,
)
from msds.text.tools.json_scan import JsonScanner, Scan
from tests.text import tiny

V3, V31, QWEN = LAYOUTS["deepseek_v3"], LAYOUTS["deepseek_v31"], LAYOUTS["qwen"]
OBJECTS = [
    {},
    {"city": "Paris"},
    {"a": {"b": [{"c": "}"}, "]}", {}], "d": None}, "e": -1.5e3, "f": True},
    {"text": 'quote " brace } fence ``` and <｜tool▁call▁end｜> </tool_call> <tool_call>'},
    {"城市": "北京", "code": "def f():\n\treturn '\\n'\n"},
]


def write(layout, calls, before="", after=""):
    """The text in which a model writes the calls: (name, JSON text) each."""
    if layout is V3:
        blocks = (f"function<｜tool▁sep｜>{name}\n```json\n{text}\n```" for name, text in calls)
    elif layout is V31:
        blocks = (f"{name}<｜tool▁sep｜>{text}" for name, text in calls)
    else:
        blocks = (f'\n{{"name": "{name}", "arguments": {text}}}\n' for name, text in calls)
    joined = ("" if layout is V31 else "\n").join(layout.begin + block + layout.end for block in blocks)
    return before + layout.opening + joined + layout.closing + after


def read(layout, pieces, **options):
    """(content, calls as (id, name, arguments), is_open), with the form of the deltas checked."""
    parser = ToolCallParser(layout, lambda index: f"call_{index}", **options)
    content, calls = "", []
    for delta in [*map(parser.push, pieces), parser.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.id, call.name, ""])
            else:
                assert call.name is None
                assert call.index == len(calls) - 1
                assert call.arguments
            calls[call.index][2] += call.arguments
    return content, [tuple(call) for call in calls], parser.is_open


def check_all_cuts(layout, text, want, **options):
    assert read(layout, [text], **options) == want
    assert read(layout, list(text), **options) == want
    for cut in range(len(text)):
        assert read(layout, [text[:cut], text[cut:]], **options) == want, (text[:cut], text[cut:])


@pytest.mark.parametrize("layout", [V3, V31, QWEN], ids=lambda layout: layout.name)
@pytest.mark.parametrize("value", OBJECTS, ids=range(len(OBJECTS)))
def test_one_and_two_calls_at_every_cut(layout, value):
    arguments = [json.dumps(value, ensure_ascii=False), json.dumps(value, indent=1)]
    for count in (1, 2):
        calls = [(f"get_{number}", arguments[number]) for number in range(count)]
        want = [(f"call_{number}", name, text) for number, (name, text) in enumerate(calls)]
        check_all_cuts(layout, write(layout, calls, before="Let me look.\n\n"), ("Let me look.", want, False))


@pytest.mark.parametrize("layout", [V3, V31, QWEN], ids=lambda layout: layout.name)
def test_text_around_calls(layout):
    calls, want = [("f", "{}")], [("call_0", "f", "{}")]
    check_all_cuts(layout, write(layout, calls, "\n\n", "\n"), ("", want, False))
    check_all_cuts(layout, write(layout, calls, "a < b", "\nDone. "), ("a < bDone. ", want, False))
    check_all_cuts(layout, " no call <｜tool <tool_ca\n ", (" no call <｜tool <tool_ca\n ", [], False))
    check_all_cuts(layout, " \n", (" \n", [], False))


@pytest.mark.parametrize("layout", [V3, V31], ids=lambda layout: layout.name)
def test_markers_around_all_calls_may_be_missing(layout):
    text = write(layout, [("f", "{}"), ("g", '{"a": 1}')])
    want = ("", [("call_0", "f", "{}"), ("call_1", "g", '{"a": 1}')], False)
    check_all_cuts(layout, text.removeprefix(layout.opening), want)
    check_all_cuts(layout, text.removesuffix(layout.closing), want)


MALFORMED = [
    (V3, "<｜tool▁call▁begin｜>function\nget\n```json\n{}\n```<｜tool▁call▁end｜>"),
    (V3, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{bad}\n```<｜tool▁call▁end｜>"),
    (V3, '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n{"a": 1}<｜tool▁call▁end｜>'),
    (V3, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n[1]\n```<｜tool▁call▁end｜>"),
    (V3, "<｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),  # V3.1's layout
    (V31, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{}\n```<｜tool▁call▁end｜>"),  # V3's
    (V31, "<｜tool▁call▁begin｜>get{}<｜tool▁call▁end｜>"),
    (V31, "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    (V31, "<｜tool▁call▁begin｜>" + "x" * 300 + "<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    (QWEN, "<tool_call>\nget(1)\n</tool_call>"),
    (QWEN, '<tool_call>\n{"name": "get", "arguments": [1]}\n</tool_call>'),
    (QWEN, '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>'),
    (QWEN, '<tool_call>\n{"name": "get", "arguments": "no"}\n</tool_call>'),
    (QWEN, '<tool_call>\n{"name": "\\ud8zz", "arguments": {}}\n</tool_call>'),
]


@pytest.mark.parametrize(("layout", "block"), MALFORMED)
def test_a_malformed_block_is_content(layout, block):
    check_all_cuts(layout, f"A {block} B", (f"A {block} B", [], False))
    around = f"A {layout.opening}{block}{layout.closing} B"
    check_all_cuts(layout, around, (around, [], False))
    good = write(layout, [("f", "{}")]).removeprefix(layout.opening)
    assert read(layout, list(f"{block} {good}")) == (block, [("call_0", "f", "{}")], False)


@pytest.mark.parametrize("layout", [V3, V31, QWEN], ids=lambda layout: layout.name)
def test_cut_at_max_tokens(layout):
    text = write(layout, [("get", '{"a": "b c", "d": [1]}')], before="Hm.")
    start = text.index('{"a') + 2  # the first two characters show that the call is one
    for end in range(len("Hm."), len(text)):
        content, calls, is_open = read(layout, [text[:end]])
        assert read(layout, list(text[:end])) == (content, calls, is_open)
        if end < start:  # a header without arguments is no call
            assert (content, calls, is_open) == (text[:end], [], False)
        else:
            arguments = text[start - 2 : min(end, text.index("[1]}") + 4)]
            assert (content, calls) == ("Hm.", [("call_0", "get", arguments)])
            assert is_open == (not arguments.endswith("}"))


def test_arguments_that_stop_being_json_arrive_as_written():
    broken = '{"a": "line\nbreak", "b": ``1`}'
    for layout in (V3, V31):
        text = write(layout, [("f", broken), ("g", "{}")])
        check_all_cuts(layout, text, ("", [("call_0", "f", broken), ("call_1", "g", "{}")], False))
    cut = write(V3, [("f", '{"a": oops ``` and')]).partition("\n```<")[0]
    check_all_cuts(V3, cut, ("", [("call_0", "f", '{"a": oops ``` and')], True))


def test_what_stands_instead_of_the_end_is_content():
    text = write(V31, [("f", '{"a": 1}')]).replace("}<", "} oops<")
    content, calls, _ = read(V31, list(text))
    assert calls == [("call_0", "f", '{"a": 1}')]
    assert content == "oops<｜tool▁call▁end｜>"


def test_qwen_objects_in_another_order_or_form():
    for call in [
        '{"arguments": {"a": "}"}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"}\\"}"}',
        '{"name": "f", "id": 1, "arguments": {"a": "}"}}',
    ]:
        check_all_cuts(QWEN, f"<tool_call>{call}</tool_call>", ("", [("call_0", "f", '{"a": "}"}')], False))
    check_all_cuts(QWEN, '<tool_call>{"name": "f"}</tool_call>', ("", [("call_0", "f", "{}")], False))


def test_arguments_stream_while_they_are_written():
    parser = ToolCallParser(V31, str)
    parser.push('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "')
    assert parser.is_open
    assert [delta.arguments for delta in parser.push("one ").calls] == ["one "]
    assert parser.push("text stays").content == ""


def test_no_more_calls_than_asked_for():
    parser = ToolCallParser(V3, str, max_calls=1)
    delta = parser.push(write(V3, [("f", "{}"), ("g", "{}")], after="more"))
    assert [call.name for call in delta.calls if call.name] == ["f"]
    assert parser.is_done
    assert delta.content == parser.push("x").content == parser.finish().content == ""


@given(
    st.sampled_from([V3, V31, QWEN]),
    st.lists(
        st.sampled_from(
            [
                *(V3.opening, V3.closing, V3.begin, V3.end, QWEN.begin, QWEN.end, "<｜tool▁sep｜>", "function", "f"),
                *("```json", "```", "`", '{"', '": ', '"a', "}", "{", "1", " ", "\n", "<"),
                *('"name"', '"arguments"', ":", ",", '"'),
            ]
        ),
        max_size=25,
    ),
)
def test_pieces_do_not_matter(layout, pieces):
    text = "".join(pieces)
    assert read(layout, pieces) == read(layout, [text]) == read(layout, list(text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), st.text('{}[]",:\\ \n1eE.-tu', max_size=6))
def test_scanner_ends_where_json_does(value, ascii_only, rest):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert JsonScanner().feed(text + rest) == (len(text), Scan.DONE)
    assert JsonScanner().feed(text[:-1]) == (len(text) - 1, Scan.MORE)


@given(st.text('{}[]",:\\ \n1eE.-+0trufalsn/b', max_size=12))
def test_scanner_agrees_with_the_json_module(tail):
    text = '{"a": [' + tail
    taken, scan = JsonScanner().feed(text)
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        assert (taken, scan) == (end, Scan.DONE)
    except ValueError:
        assert scan is not Scan.DONE


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a\n', 3),
        ('{"\\x', 3),
        ('{"\\u12g', 6),
        ('{"a" 1', 5),
        ('{"a": tru}', 9),
        ('{"a": 01}', 8),
        ('{"a": 1.}', 8),
        ('{"a": --1}', 9),
        ('{"a": 1,}', 8),
        ('{"a": [1,]', 9),
        ('{"a": [}', 7),
        ('{"a": NaN', 6),
        ("{,", 1),
        ("{'a'", 1),
        ("[", 0),
        (" {", 0),
    ],
)
def test_scanner_says_where_json_breaks(text, taken):
    assert JsonScanner().feed(text) == (taken, Scan.BROKEN)


def test_think_then_call():
    text = "Let me call <｜tool▁calls▁begin｜> later</think>\n\n" + write(V31, [("f", "{}")])
    for pieces in ([text], list(text)):
        reasoning, tools = ReasoningParser(Start.OPEN), ToolCallParser(V31, str)
        deltas = [reasoning.push(piece) for piece in pieces] + [reasoning.finish()]
        calls = [tools.push(delta.content) for delta in deltas] + [tools.finish()]
        assert "".join(delta.reasoning for delta in deltas) == "Let me call <｜tool▁calls▁begin｜> later"
        assert "".join(delta.content for delta in calls) == ""
        assert [call.name for delta in calls for call in delta.calls if call.name] == ["f"]


@pytest.mark.parametrize("layout", [V3, V31, QWEN], ids=lambda layout: layout.name)
def test_every_byte_and_every_token(layout):
    arguments = json.dumps(OBJECTS[4], ensure_ascii=False)
    text = write(layout, [("f", arguments), ("g", "{}")], before="你好 ")
    want = ("你好", [("call_0", "f", arguments), ("call_1", "g", "{}")], False)
    real = tiny.real("deepseek-r1")
    small = tiny.byte_level()
    by_bytes = {small.token_bytes(id_): id_ for id_ in range(small.vocab_size)}
    for tokenizer, ids in [
        (small, [by_bytes[bytes([byte])] for byte in text.encode()]),
        (real, real.encode(text, bos=False)),
    ]:
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push((id_,)) for id_ in ids] + [detokenizer.finish()]
        assert read(layout, pieces) == want
