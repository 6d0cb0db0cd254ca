"""What a conversation says reaches the prompt, or the request is refused: nothing is left out in silence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msds.errors import PromptError
from msds.text.chat import ChatTemplate
from msds.text.chat_format import ChatFormat
from msds.text.tools.history import order_results
from tests.text import tiny
from tests.text.test_tool_templates import TEMPLATES, real_template

ALL = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
USERS_ONLY = "{% for m in messages if m.role in ('user', 'system') %}{{ m.content }}{% endfor %}"
USER = [{"role": "user", "content": "Hi"}]


def chat_format(source):
    tokenizer = tiny.byte_level()
    return ChatFormat(ChatTemplate({"default": source}, tokenizer), tokenizer)


def call(id_, name="f"):
    entry = {"type": "function", "function": {"name": name, "arguments": "{}"}}
    return entry if id_ is None else {"id": id_, **entry}


def calls(*ids):
    return {"role": "assistant", "content": None, "tool_calls": [call(id_) for id_ in ids]}


def result(id_, content="r"):
    return {"role": "tool", "content": content, **({} if id_ is None else {"tool_call_id": id_})}


def test_a_message_that_the_template_does_not_show_is_refused_by_place_and_role():
    said = [*USER, {"role": "assistant", "content": "Hi"}]
    with pytest.raises(PromptError, match=r"messages\[1\] would be lost.* role assistant"):
        chat_format(USERS_ONLY).encode(said)
    assert chat_format(ALL).encode(said)
    # the words are in the prompt, but in another message
    first_only = "{{ messages[0].content }}"
    with pytest.raises(PromptError, match=r"messages\[1\]"):
        chat_format(first_only).encode([*USER, *USER])


def test_content_that_is_cut_is_not_content_that_is_lost():
    cutting = "{% for m in messages %}{{ m.content.split('</think>')[-1].strip() }}{% endfor %}"
    said = [*USER, {"role": "assistant", "content": "<think>hm</think>\n"}, {"role": "user", "content": ""}]
    assert chat_format(cutting).encode(said)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert chat_format(cutting).encode(parts) == tiny.byte_level().encode("ab", bos=False)


def test_a_prefix_that_changes_nothing_is_refused():
    said = [*USER, {"role": "assistant", "content": "Yo", "prefix": True}]
    with pytest.raises(PromptError, match=r"messages\[1\]\.prefix is true, which changes nothing"):
        chat_format(ALL).encode(said)
    assert chat_format(ALL).encode([*USER, {"role": "assistant", "content": "Yo", "prefix": False}])
    reads = "{% for m in messages %}{{ m.content }}{% if not m.prefix %}.{% endif %}{% endfor %}"
    assert chat_format(reads).encode(said) == tiny.byte_level().encode("Hi.Yo", bos=False)
    with pytest.raises(PromptError, match=r"messages\[1\]\.prefix is true, but only the last message"):
        chat_format(reads).encode([*said, *USER])


def test_variables_that_the_template_does_not_read_are_refused():
    thinks = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}" + ALL
    assert chat_format(thinks).encode(USER, template_kwargs={"thinking": True}) != chat_format(thinks).encode(USER)
    with pytest.raises(PromptError, match=r"chat_template_kwargs\.enable_thinking .* reads thinking: leave it out"):
        chat_format(thinks).encode(USER, template_kwargs={"enable_thinking": True})
    for name in ("messages", "bos_token", "strftime_now", "thinking"):
        with pytest.raises(PromptError, match=f"{name} .* reads no variables"):
            chat_format(ALL).encode(USER, template_kwargs={name: 1})


@pytest.mark.parametrize("name", TEMPLATES)
def test_real_templates_lose_nothing(name):
    chat = chat_format(real_template(name))
    said = [{"role": "system", "content": "S"}, *USER, {"role": "assistant", "content": "Yo"}, *USER]
    assert chat.encode(said)
    if TEMPLATES[name] is not None:
        assert chat.encode([*USER, calls("a", "b"), result("b", "2"), result("a", "1"), *USER])
    else:
        with pytest.raises(PromptError, match="tool_calls"):
            chat.encode([*USER, calls("a"), result("a"), *USER])
    known = {"deepseek-v3.1": "thinking", "qwen-3": "enable_thinking"}.get(name)
    if known:
        assert chat.encode(USER, template_kwargs={known: False}) != chat.encode(USER, template_kwargs={known: True})
    with pytest.raises(PromptError, match="chat_template_kwargs"):
        chat.encode(USER, template_kwargs={"thinkin": True})


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(4)))
def test_results_come_in_the_order_of_their_calls(order):
    ids = ["a", "b", "c", "d"]
    results = [result(ids[place], str(place)) for place in order]
    ordered = order_results([*USER, calls(*ids), *results, *USER])
    assert [message["content"] for message in ordered[2:-1]] == ["0", "1", "2", "3"]
    assert (ordered[0], ordered[-1]) == (USER[0], USER[0])


def test_results_without_ids_are_in_order():
    said = [*USER, calls(None, None), result(None, "1"), result(None, "2"), calls("x"), result("x"), *USER]
    assert order_results(said) == said
    assert order_results([*USER, calls("a")]) == [*USER, calls("a")]  # not yet answered


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([*USER, result("a")], r"messages\[1\] has role tool, but no assistant message with tool_calls"),
        ([*USER, calls("a"), *USER, result("a")], r"messages\[3\] has role tool"),
        ([calls("a"), result("b")], r"messages\[1\]\.tool_call_id is 'b'; each of 'a' is to be there once"),
        ([calls("a", "b"), result("a"), result("a")], r"messages\[2\]\.tool_call_id is 'a'"),
        ([calls("a", "b"), result("b")], r"messages\[0\]\.tool_calls: 'a' has no tool message"),
        ([calls("a", "b"), result("a"), result(None)], r"messages\[2\]\.tool_call_id is None"),
        ([calls("a", "a"), result("a"), result("a")], r"messages\[1\]\.tool_call_id is 'a'"),
        ([calls("a", "b"), result(None)], r"tool_calls are 2, and 1 tool messages without tool_call_id follow"),
    ],
)
def test_results_that_belong_to_no_call(messages, fault):
    with pytest.raises(PromptError, match=fault):
        order_results(messages)
