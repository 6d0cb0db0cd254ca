"""response_format, structured_outputs and forced tool calls over a real engine with a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from httpx import Client

from msds.constraints.grammars import GrammarCompiler, TokenTable
from msds.errors import ConstraintError
from msds.text.chat import ChatTemplate
from msds.text.chat_format import ChatFormat
from msds.text.tokenizer import Tokenizer, read_tokenizer_config
from msds.text.tools import LAYOUTS
from msds_serve.service import Service
from tests.serve.test_service import CHAT, COMPLETIONS, USER, chat, events, wait_until_idle
from tests.text.tiny import added

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "天": {"enum": ["x", None, 3]}},
    "required": ["ok", "天"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "go", "description": "No parameters."}},
]
TEMPLATES = {
    "deepseek_v31": "<｜tool▁call▁begin｜><｜tool▁sep｜>",
    "deepseek_v3": "<｜tool▁call▁begin｜><｜tool▁sep｜>```json",
    "qwen": '<tool_call>"arguments"',
}
CLOSED = (
    "{#- LAYOUT -#}{{ bos_token }}{% if tools %}{{ tools | length }}{% endif %}{% for message in messages %}"
    "<｜User｜>{{ message.content or message.tool_calls[0].function | string }}{% endfor %}<｜Assistant｜></think>"
)


def formatted(strict: bool = True, schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": strict, "schema": schema}}


@pytest.fixture
def bias(folder: Path) -> dict[str, float]:
    """The thinking, which every chat of this model begins with, ends at once; no whitespace, which is endless."""
    tokenizer = Tokenizer.open(folder)
    pieces = GrammarCompiler(tokenizer).table.pieces
    spaces = [id_ for id_, piece in enumerate(pieces) if piece and not piece.strip()]
    return {str(tokenizer.control_ids["</think>"]): 100} | {str(id_): -100 for id_ in spaces}


@pytest.fixture(params=TEMPLATES)
def tools_template(request: pytest.FixtureRequest, service: Service, monkeypatch: pytest.MonkeyPatch) -> str:
    """The model with a template that closes the thinking and teaches a layout of calls, whose markers are tokens."""
    model, layout = service.llm.model, LAYOUTS[request.param]
    content = json.loads((model.folder / "tokenizer.json").read_text(encoding="utf-8"))
    markers = dict.fromkeys([layout.opening, layout.begin, "<｜tool▁sep｜>", layout.end, layout.closing])
    for number, marker in enumerate(filter(None, markers), start=service.tokenizer.vocab_size):
        content["added_tokens"].append(added(number, marker, special=False))
    tokenizer = Tokenizer(content, read_tokenizer_config(model.folder))
    source = CLOSED.replace("LAYOUT", TEMPLATES[request.param])
    monkeypatch.setattr(model, "tokenizer", tokenizer)
    monkeypatch.setattr(model, "grammars", GrammarCompiler(tokenizer))
    monkeypatch.setattr(service, "_chat", ChatFormat(ChatTemplate({"default": source}, tokenizer), tokenizer))
    assert service.chat.layout is layout
    return layout.name


def message(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]  # type: ignore[no-any-return]


def joined(chunks: list[Any], index: int = 0) -> tuple[str, list[tuple[str, str]], str | None]:
    """(content, [(name, arguments)], finish_reason) of one choice of a stream."""
    content, calls, reason = "", [list[str]() for _ in range(0)], None
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or ():
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"].get("arguments", "")
        reason = reason or choice["finish_reason"]
    return content, [(name, text) for name, text in calls], reason


class TestFormats:
    @pytest.mark.parametrize("strict", [True, False])
    def test_a_schema_after_the_reasoning(self, client: Client, bias: dict[str, float], strict: bool) -> None:
        fields = {"response_format": formatted(strict), "max_tokens": 90, "logit_bias": bias, "temperature": 1}
        whole = chat(client, **fields, n=2, seed=4).json()
        assert len({choice["message"]["content"] for choice in whole["choices"]}) == 2
        for choice in whole["choices"]:
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["reasoning_content"] is not None
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        body = {"model": "tiny", "messages": USER, "n": 2, "seed": 4, **fields}
        chunks = events(client, CHAT, body)
        for choice in whole["choices"]:
            assert joined(chunks, choice["index"])[::2] == (choice["message"]["content"], "stop")

    def test_the_reasoning_is_not_masked(self, client: Client) -> None:
        """Without help the thinking goes on to the end of the budget, in any text."""
        same = chat(client, max_tokens=12, ignore_eos=True).json()
        constrained = chat(client, max_tokens=12, ignore_eos=True, response_format={"type": "json_object"}).json()
        (choice,) = constrained["choices"]
        assert choice["message"] == same["choices"][0]["message"]
        assert choice["message"]["content"] == ""
        assert choice["finish_reason"] == "length"

    @pytest.mark.parametrize(
        ("outputs", "texts"),
        [
            ({"choice": ["yes", "no"]}, {"yes", "no"}),
            ({"regex": "[ab]c"}, {"ac", "bc"}),
            ({"grammar": 'start: "x" | "y" "z"'}, {"x", "yz"}),
            ({"json": {"type": "boolean"}}, {"true", "false"}),
        ],
    )
    def test_structured_outputs(
        self, client: Client, bias: dict[str, float], outputs: dict[str, Any], texts: set[str]
    ) -> None:
        assert message(chat(client, structured_outputs=outputs, logit_bias=bias, max_tokens=60))["content"] in texts
        body = {"model": "tiny", "prompt": ["one", "two"], "structured_outputs": outputs, "seed": 1, "logprobs": 2}
        choices = client.post(COMPLETIONS, json=body).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
        assert {choice["text"] for choice in choices} <= texts
        for choice in choices:
            assert all(value > -1e5 for value in choice["logprobs"]["token_logprobs"])

    def test_running_out_of_tokens(self, client: Client, bias: dict[str, float]) -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "response_format": formatted(), "logit_bias": bias}
        (choice,) = client.post(COMPLETIONS, json=body).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["text"].startswith('{"')


def test_at_once_where_thinking_is_off(client: Client, tools_template: str, bias: dict[str, float]) -> None:
    response = chat(client, response_format=formatted(), max_tokens=60, logit_bias=bias)
    answer = message(response)
    assert answer.get("reasoning_content") is None
    jsonschema.validate(json.loads(answer["content"]), SCHEMA)


class TestCalls:
    def test_required(self, client: Client, tools_template: str, bias: dict[str, float]) -> None:
        fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": bias}
        names = set()
        for seed in range(4):
            answer = chat(client, **fields, temperature=1, seed=seed, max_tokens=110).json()["choices"][0]
            assert answer["finish_reason"] == "tool_calls"
            assert not answer["message"]["content"]
            (call,) = answer["message"]["tool_calls"]
            names.add(call["function"]["name"])
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "look":
                jsonschema.validate(arguments, SCHEMA)
            else:
                assert arguments == {}
        assert names <= {"look", "go"}

    def test_named_streamed_and_whole(self, client: Client, tools_template: str, bias: dict[str, float]) -> None:
        choice = {"type": "function", "function": {"name": "look"}}
        fields = {"tools": TOOLS, "tool_choice": choice, "logit_bias": bias, "max_tokens": 110}
        whole = chat(client, **fields).json()["choices"][0]
        (call,) = whole["message"]["tool_calls"]
        assert call["function"]["name"] == "look"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        chunks = events(client, CHAT, {"model": "tiny", "messages": USER, "temperature": 0, **fields})
        content, calls, reason = joined(chunks)
        assert (content, calls) == ("", [("look", call["function"]["arguments"])])
        assert reason == whole["finish_reason"] == "tool_calls"

    def test_a_cut_call(self, client: Client, tools_template: str, bias: dict[str, float]) -> None:
        fields = {"tools": TOOLS, "tool_choice": "required", "logit_bias": bias, "max_tokens": 10}
        assert chat(client, **fields).json()["choices"][0]["finish_reason"] == "length"

    def test_a_format_beside_tools(self, client: Client, tools_template: str, bias: dict[str, float]) -> None:
        """The answer is a call or in the format, each whole."""
        fields = {"tools": TOOLS, "response_format": formatted(), "logit_bias": bias, "max_tokens": 110}
        for seed in range(4):
            answer = chat(client, **fields, parallel_tool_calls=False, temperature=1, seed=seed).json()["choices"][0]
            if answer["finish_reason"] == "stop":
                jsonschema.validate(json.loads(answer["message"]["content"]), SCHEMA)
            else:
                assert answer["finish_reason"] == "tool_calls"
                assert not answer["message"]["content"]

    def test_strict_functions_constrain_a_free_choice_and_others_do_not(
        self, client: Client, tools_template: str, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []
        add = service.llm.engine.add
        monkeypatch.setattr(service.llm.engine, "add", lambda *args: seen.append(args[1].constraint) or add(*args))
        strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
        assert chat(client, tools=TOOLS, max_tokens=4).status_code == 200
        assert chat(client, tools=strict, max_tokens=4).status_code == 200
        assert chat(client, tools=strict, tool_choice="none", max_tokens=4).status_code == 200
        assert [constraint is not None for constraint in seen] == [False, True, False]


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param", "names"),
        [
            ({"response_format": formatted(schema={"not": {}})}, "response_format", ["#", "not"]),
            (
                {"response_format": formatted(schema={"type": "object", "required": ["x"], "properties": {}})},
                "response_format",
                ["'x'"],
            ),
            ({"structured_outputs": {"json": {"items": {"contains": {}}}}}, "structured_outputs", ["#/items"]),
            ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", ["look-around"]),
            ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs", ["b"]),
            ({"response_format": {"type": "xml"}}, "response_format", ["xml"]),
        ],
    )
    def test_before_anything_runs(self, client: Client, fields: Any, param: str, names: list[str]) -> None:
        for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": ["a", "b"]})):
            for stream in (False, True):
                response = client.post(path, json={"model": "tiny", "stream": stream, **body, **fields})
                error = response.json()["error"]
                assert response.status_code == 400, error
                assert error["param"] == param
                for name in names:
                    assert name in error["message"]
        wait_until_idle(client)

    def test_tools(self, client: Client, tools_template: str) -> None:
        bad = [
            TOOLS[1],
            {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}},
        ]
        error = chat(client, tools=bad, tool_choice="required").json()["error"]
        assert error["param"] == "tools"
        assert "tools[1].function.parameters" in error["message"]
        assert "#/properties/x" in error["message"]
        bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
        error = chat(client, tools=bad, tool_choice="required").json()["error"]
        assert error["param"] == "tools"
        unknown = {"type": "function", "function": {"name": "fly"}}
        response = chat(client, tools=TOOLS, tool_choice=unknown)
        assert response.status_code == 400
        assert "fly" in response.json()["error"]["message"]

    def test_a_template_without_calls(self, client: Client) -> None:
        response = chat(client, tools=TOOLS, tool_choice="required")
        assert response.status_code == 400
        assert "tools" in response.json()["error"]["message"]


def test_a_stuck_constraint_fails_its_request_alone(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "tiny", "prompt": "a", "structured_outputs": {"choice": ["stuck here"]}}

    def fail(table: TokenTable, matcher: Any) -> Any:
        raise ConstraintError("the constraint cannot be followed: too complex")

    assert client.post(COMPLETIONS, json=body).status_code == 200  # compiled
    with monkeypatch.context() as patch:
        patch.setattr(TokenTable, "allowed_by", fail)
        response = client.post(COMPLETIONS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs")
    assert "too complex" in response.json()["error"]["message"]
    assert client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "stuck here"
    assert service.engine.stats.referenced_blocks == 0
