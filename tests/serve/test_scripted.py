"""Scripted answers through socket, service and engine: what each says, and that a stream says the same, however cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from msds_serve.client import CHAT, Server
from tests.serve.conftest import Rigged
from tests.serve.rigged import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR, byte_tokens

USER = [{"role": "user", "content": "what?"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("get", "put")]
HARD = '{"a": {"b": [1, "}"]}, "说": "你\\n\\"x\\" ```"}'


def v3(*calls: tuple[str, str]) -> str:
    blocks = [f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{json}\n```{CALL_END}" for name, json in calls]
    return CALLS_BEGIN + "\n".join(blocks) + CALLS_END


def v31(*calls: tuple[str, str]) -> str:
    return CALLS_BEGIN + "".join(f"{CALL_BEGIN}{name}{SEPARATOR}{json}{CALL_END}" for name, json in calls) + CALLS_END


def qwen(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {json}}}\n</tool_call>' for name, json in calls)


LAYOUTS = {"deepseek_v3": v3, "deepseek_v31": v31, "qwen": qwen}


@dataclass(frozen=True)
class Case:
    """What the model writes, what the request adds, and what the answer is."""

    output: str | bytes
    says: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    layout: str = "deepseek_v3"
    thinks: bool = False


CASES = {
    "text": Case("Hello", {"content": "Hello"}),
    "nothing": Case("", {}),
    "a family of emoji": Case("a👩‍🚀b", {"content": "a👩‍🚀b"}),
    "a character that the model cuts": Case(b"a\xe4\xbd", {"content": "a\ufffd"}),
    "a character that max_tokens cuts": Case(
        "a你", {"content": "a\ufffd", "finish_reason": "length"}, {"max_tokens": 3}
    ),
    "a real U+FFFD": Case("a\ufffdb", {"content": "a\ufffdb"}),
    "bytes that are no text": Case(b"a\xff\xfeb", {"content": "a\ufffd\ufffdb"}),
    "a stop across tokens": Case("one two three", {"content": "one "}, {"stop": ["two"]}),
    "the stop that ends first": Case("abcdef", {"content": "ab"}, {"stop": ["cde", "cd"]}),
    "a stop that nearly was": Case("aab aab", {"content": "aab aab"}, {"stop": "aaa"}),
    "a stop that is kept": Case("one two", {"content": "one t"}, {"stop": "t", "include_stop_str_in_output": True}),
    "a stop inside a character": Case("a你b", {"content": "a"}, {"stop": "你"}),
    "reasoning": Case("hm\n</think>\n\n4", {"reasoning": "hm", "content": "4"}, thinks=True),
    "reasoning that is cut": Case(
        "hm and so on", {"reasoning": "hm an", "finish_reason": "length"}, {"max_tokens": 5}, thinks=True
    ),
    "two ends of reasoning": Case("a</think>b</think>c", {"reasoning": "a", "content": "b</think>c"}, thinks=True),
    "no thinking": Case("4", {"content": "4"}),
    "a stop in the reasoning": Case("one two", {"reasoning": "one"}, {"stop": "two"}, thinks=True),
}
for name, write in LAYOUTS.items():
    called = {"finish_reason": "tool_calls"}
    CASES |= {
        f"{name}: a call": Case(
            write(("get", "{}")), {"tool_calls": [["get", "{}"]], **called}, {"tools": TOOLS}, name
        ),
        f"{name}: hard arguments": Case(
            "Look. " + write(("get", HARD), ("put", '{"x": 1}')),
            {"content": "Look.", "tool_calls": [["get", HARD], ["put", '{"x": 1}']], **called},
            {"tools": TOOLS},
            name,
        ),
        f"{name}: one call at a time": Case(
            write(("get", "{}"), ("put", "{}")),
            {"tool_calls": [["get", "{}"]], **called},
            {"tools": TOOLS, "parallel_tool_calls": False},
            name,
        ),
        f"{name}: think, then call": Case(
            "hm</think>" + write(("get", "{}")),
            {"reasoning": "hm", "tool_calls": [["get", "{}"]], **called},
            {"tools": TOOLS},
            name,
            thinks=True,
        ),
        f"{name}: no tools offered": Case(write(("get", "{}")), {"content": write(("get", "{}"))}, {}, name),
        f"{name}: tools, and none wanted": Case(
            write(("get", "{}")), {"content": write(("get", "{}"))}, {"tools": TOOLS, "tool_choice": "none"}, name
        ),
    }


@pytest.mark.parametrize("pieces", ["bytes", "tokens"])
@pytest.mark.parametrize("name", CASES)
def test_streamed_and_whole(rig: Callable[..., Rigged], name: str, pieces: str) -> None:
    case = CASES[name]
    rigged = rig(case.layout, thinks=case.thinks)
    model = rigged.service.llm.model
    data = case.output if isinstance(case.output, bytes) else case.output.encode()
    assert model.tokenizer is not None
    if pieces == "bytes" or "max_tokens" in case.fields:
        ids = byte_tokens(model, data)
    elif isinstance(case.output, bytes):
        pytest.skip("not text: no other tokens")
    else:
        ids = model.tokenizer.encode_plain(case.output)
    offered = case.fields.get("tools") if case.fields.get("tool_choice") != "none" else None
    rigged.runner.script(rigged.service.chat.encode(USER, tools=offered), ids)

    server = Server.at(rigged.url, timeout=20)
    asked = {"model": "tiny", "messages": USER, "temperature": 0, **case.fields}
    whole = server.ask(CHAT, asked)
    streamed = server.ask(CHAT, asked | {"stream": True, "stream_options": {"include_usage": True}})
    assert whole.error is None
    assert streamed.error is None
    (choice,) = whole.answer.choices
    assert choice == {"index": 0, "finish_reason": "stop"} | case.says
    assert streamed.answer.choices == whole.answer.choices
    assert whole.answer.usage is not None
    assert streamed.answer.usage is not None
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
    assert [streamed.answer.usage[key] for key in counts] == [whole.answer.usage[key] for key in counts]
    assert whole.answer.usage["completion_tokens"] <= len(ids) + 1
