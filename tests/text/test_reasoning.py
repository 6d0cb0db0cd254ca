"""Reasoning split from the answer, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.text.chat import ChatTemplate
from msds.text.reasoning import ReasoningParser, ReasoningTokens, Start, start_after
from msds.text.tokenizer import Tokenizer
from tests.text import tiny

# (start, text, reasoning, content)
CASES = [
    (Start.OPEN, "step</think>\n\n4", "step", "4"),
    (Start.OPEN, "\nstep\n</think>4", "step", "4"),
    (Start.OPEN, "step one\n\nstep two </think> 4\n", "step one\n\nstep two", "4\n"),
    (Start.OPEN, "a</think>b</think>c", "a", "b</think>c"),
    (Start.OPEN, "</think>4", "", "4"),
    (Start.OPEN, "<think>\nstep</think>4", "step", "4"),  # R1 repeats the prompt's marker at times
    (Start.OPEN, "a <think> b</think>4", "a <think> b", "4"),
    (Start.OPEN, "never ends \n", "never ends", ""),
    (Start.OPEN, "cut in the marker </thi", "cut in the marker </thi", ""),
    (Start.OPEN, "a < b </ thinking </think", "a < b </ thinking </think", ""),
    (Start.OPEN, "", "", ""),
    (Start.OPEN, " <thi", "<thi", ""),
    (Start.OPEN, "你好</think>世界", "你好", "世界"),
    (Start.CLOSED, "4", "", "4"),
    (Start.CLOSED, "\n\n4 </think> <think>", "", "\n\n4 </think> <think>"),
    (Start.MODEL, "<think>\nhm\n</think>\n\nYo", "hm", "Yo"),
    (Start.MODEL, "\n <think>hm", "hm", ""),
    (Start.MODEL, " plain <think>", "", " plain <think>"),
    (Start.MODEL, "\n<thi", "", "\n<thi"),
    (Start.MODEL, "\n", "", "\n"),
]


def split(start, pieces):
    parser = ReasoningParser(start)
    deltas = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
def test_whole_and_cut_anywhere(start, text, reasoning, content):
    assert split(start, [text]) == (reasoning, content)
    assert split(start, list(text)) == (reasoning, content)
    for cut in range(len(text)):
        assert split(start, [text[:cut], text[cut:]]) == (reasoning, content), cut


@given(
    st.sampled_from(list(Start)),
    st.lists(st.sampled_from(["<think>", "</think>", "</", "<", "think>", " ", "\n", "a", "é"]), max_size=12),
)
def test_pieces_do_not_matter(start, pieces):
    assert split(start, pieces) == split(start, ["".join(pieces)])


def test_text_is_sent_as_soon_as_it_is_sure():
    parser = ReasoningParser(Start.OPEN)
    assert parser.push("a b").reasoning == "a b"
    assert parser.push(" </thin").reasoning == ""
    assert parser.push("g").reasoning == " </thing"
    assert parser.in_reasoning
    assert parser.push("</think>\n").content == ""
    assert not parser.in_reasoning
    assert parser.push("4").content == "4"


def test_has_reasoning_tells_null_from_empty():
    parser = ReasoningParser(Start.MODEL)
    assert parser.is_undecided
    assert not parser.has_reasoning
    parser.push("<think></think>x")
    assert parser.has_reasoning
    assert not ReasoningParser(Start.CLOSED).has_reasoning


@pytest.mark.parametrize(
    ("start", "tokens", "count"),
    [
        (Start.OPEN, ["step", "</think>", "\n\n", "4"], 2),
        (Start.OPEN, ["step", "</", "thi", "nk>\n", "4"], 4),
        (Start.OPEN, ["a", "b", ""], 3),
        (Start.CLOSED, ["a", "</think>"], 0),
        (Start.MODEL, ["\n", "<think>", "a", "</think>", "4", "</think>"], 4),
        (Start.MODEL, ["<", "thi", "s"], 0),
        (Start.MODEL, ["<", "think", ">", "a"], 4),
        (Start.OPEN, ["\xc3", "\xa9", "</think>", "x"], 3),  # half a character each
    ],
)
def test_reasoning_tokens(start, tokens, count):
    counter = ReasoningTokens(start)
    for token in tokens:
        counter.observe(token.encode("latin-1"))
    assert counter.count == count


def test_starts_from_the_real_prompts():
    user = [{"role": "user", "content": "Is <think> a tag?"}]
    for name, kwargs, want in [
        ("deepseek-r1", {}, Start.OPEN),
        ("deepseek-r1-distill-qwen-7b", {}, Start.OPEN),
        ("deepseek-v3", {}, Start.CLOSED),
        ("deepseek-v3.1", {}, Start.CLOSED),
        ("deepseek-v3.1", {"thinking": True}, Start.OPEN),
    ]:
        folder = tiny.real_folder(name)
        tokenizer = tiny.real(name)
        template = ChatTemplate.open(folder, tokenizer)
        ids = template.encode(user, template_kwargs=kwargs)
        assert start_after(ids, tokenizer, template.sources["default"]) is want, (name, kwargs)


def test_start_where_a_user_types_markers():
    tokenizer = tiny.byte_level()
    source = "{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}<｜Assistant｜>"
    typed = [{"role": "user", "content": "<think>"}]
    for suffix, want in [("", Start.CLOSED), ("{# <think> #}", Start.MODEL), ("<think>\nWell,", Start.OPEN)]:
        template = ChatTemplate({"default": source + suffix}, tokenizer)
        assert start_after(template.encode(typed), tokenizer, source + suffix) is want
    for earlier in ("<think>", "</think>"):  # cut, or left in the history: only the open turn counts
        ids = tokenizer.encode(f"<｜Assistant｜>{earlier}a<｜User｜>b<｜Assistant｜>")
        assert start_after(ids, tokenizer, "<think>") is Start.MODEL
    assert start_after(tokenizer.encode("<think>\n\n</think>\n\n"), tokenizer, "") is Start.CLOSED
    assert start_after([], tokenizer, "") is Start.CLOSED


def test_start_where_markers_are_plain_text():
    parts = tiny.byte_level_json()
    parts["added_tokens"] = [token for token in parts["added_tokens"] if "think" not in token["content"]][:-2]
    tokenizer = Tokenizer(parts, tiny.byte_level_config(pad_token=None))
    assert "<think>" not in tokenizer.control_ids
    for prompt, want in [
        ("<｜User｜>a<think><｜Assistant｜>", Start.MODEL),
        ("<｜User｜>a<｜Assistant｜><think>\n", Start.OPEN),
        ("<｜User｜>a<｜Assistant｜><think>\n\n</think>\n\n", Start.CLOSED),
    ]:
        assert start_after(tokenizer.encode(prompt), tokenizer, "{{ '<think>' }}") is want
