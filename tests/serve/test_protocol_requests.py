"""Requests: what is accepted means what it says, everything else is a 400 that names the field."""

import math

import pytest

from msds.config import GenerationConfig
from msds.constraints import Choice, Grammar, JsonObject, JsonSchema, Regex
from msds.sampling import SamplingParams
from msds_serve.protocol.errors import ApiError
from msds_serve.protocol.fields import Limits, chat_table, completion_table, detokenize_table, tokenize_table
from msds_serve.protocol.requests import (
    StreamOptions,
    parse_chat,
    parse_completion,
)
from msds_serve.protocol.tools import ToolChoice

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields):
    return parse_chat({"model": "m", "messages": USER} | fields)


def complete(**fields):
    return parse_completion({"model": "m", "prompt": "Hi"} | fields)


def refused(call, **fields):
    """(param, message) of the 400 that these fields bring."""
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    assert len(caught.value.message) < 700
    return caught.value.param, caught.value.message


def test_a_plain_chat_has_the_defaults():
    request = chat()
    assert request.params == SamplingParams()
    assert request.params.max_tokens is None  # the rest of the context
    assert request.messages == tuple(USER)
    assert request.stream is None
    assert request.tool_choice == ToolChoice("none")
    assert request.include_reasoning
    assert request.parallel_tool_calls


def test_defaults_come_from_the_checkpoint():
    generation = GenerationConfig(temperature=0.6, top_p=0.95)
    body = {"model": "m", "messages": USER}
    assert parse_chat(body, generation=generation).params.temperature == 0.6
    params = parse_chat(body | {"temperature": 0, "top_p": None}, generation=generation).params
    assert (params.temperature, params.top_p) == (0.0, 0.95)


def test_every_sampling_field_arrives():
    fields = {
        "n": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "seed": -5,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logit_bias": {"5": -100, "6": 1.5},
        "prompt_logprobs": 3,
        "skip_special_tokens": False,
    }
    want = SamplingParams(**fields | {"max_tokens": 9, "logit_bias": {5: -100.0, 6: 1.5}})
    assert chat(**fields, max_tokens=9).params == want
    assert complete(**fields, max_tokens=9).params == want
    assert set(fields) | {"max_tokens", "logprobs", "constraint"} == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1", [], {}, 2**2000])
def test_counts_are_whole_numbers_from_one(name, value):
    assert refused(chat, **{name: value})[0] == name
    if name != "max_completion_tokens":
        assert refused(complete, **{name: value})[0] == name


def test_json_has_one_type_of_number():
    assert chat(max_tokens=5.0).params.max_tokens == 5
    assert chat(temperature=1).params.temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"top_k": 10**30}, "top_k"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"n": 129}, "n"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"guided_json": {}}, "guided_json"),
        ({"temprature": 1}, "temprature"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"user": 3}, "user"),
    ],
)
def test_refused_by_both_endpoints(fields, param):
    for call in (chat, complete):
        got, message = refused(call, **fields)
        assert got == param
        assert param.split(".")[0].split("[")[0] in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]}, "messages"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"prompt": "x"}, "prompt"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].custom"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [TOOL]}, "tool_choice.allowed_tools"),
        ({"tool_choice": "required", "tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "grammar", "grammar": "start: A"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": True}}, "structured_outputs.json"),
        ({"structured_outputs": {"ebnf": "x"}}, "structured_outputs.ebnf"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"tool_choice": "required", "tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_refused_in_chat(fields, param):
    assert refused(chat, **fields)[0] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 1024, "n": 128}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"messages": USER}, "messages"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"tools": [TOOL]}, "tools"),
    ],
)
def test_refused_in_completions(fields, param):
    assert refused(complete, **fields)[0] == param


def test_what_asks_for_nothing_is_no_fault():
    nothing = {
        "best_of": 1,
        "suffix": None,
        "use_beam_search": False,
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
    }
    assert complete(**nothing) == complete()
    more = {"modalities": ["text"], "functions": [], "echo": False, "service_tier": "auto", "prediction": {}}
    assert (
        chat(**nothing, **more, tools=[], tool_choice=None, logit_bias=None, response_format={"type": "text"}) == chat()
    )
    assert chat(max_tokens=4, max_completion_tokens=4).params.max_tokens == 4


def test_an_answer_can_be_sent_back():
    answer = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "audio": None,
        "annotations": [],
        "function_call": None,
    }
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *(answer | {"reasoning_content": "hm"}, parts),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]
    assert chat(messages=messages).messages == tuple(messages)


def test_logprobs():
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert chat(logprobs=False).params.logprobs is None
    assert complete(logprobs=0).params.logprobs == 0
    scored = parse_completion(  # as lm-eval sends it
        {
            "model": "m",
            "prompt": [[1, 2], [3]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
    )
    assert scored.prompts == ((1, 2), (3,))
    assert scored.params.prompt_logprobs == 1
    assert not scored.show_prompt_logprobs
    assert complete(prompt_logprobs=2).show_prompt_logprobs


def test_prompts_in_all_forms():
    for prompt, want in [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([1.0], ((1,),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ]:
        assert complete(prompt=prompt).prompts == want
    assert complete().params.max_tokens == 16


def test_streams():
    assert chat(stream=True).stream == StreamOptions()
    guidellm = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=guidellm).stream == StreamOptions(True, True)
    assert (
        chat(stream=True, stream_options={"include_obfuscation": False, "include_usage": None}).stream
        == StreamOptions()
    )


def test_tools_and_choices():
    assert chat(tools=[TOOL]).tool_choice == ToolChoice("auto")
    assert chat(tools=[TOOL]).tools == (TOOL,)
    assert chat(tools=[TOOL], tool_choice="none").tool_choice.kind == "none"
    assert chat(tool_choice="none").tool_choice.kind == "none"
    named = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}).tool_choice
    assert named == ToolChoice("function", "f")
    assert named.forces_call
    assert not chat(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls


def test_response_formats_and_structured_outputs():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for fields, want in [
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        ({"response_format": wanted}, JsonSchema(schema)),
        ({"structured_outputs": {"json": schema, "regex": None}}, JsonSchema(schema)),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar('start: "a"')),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, Regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Choice(["a", "b"])),
    ]:
        for call in (chat, complete):
            request = call(**fields)
            assert request.params.constraint == want
            assert request.places.constraint == next(iter(fields))
    assert chat(response_format={"type": "text"}).places.constraint is None


def test_a_typing_error_gets_a_hint():
    assert "did you mean temperature?" in refused(chat, temprature=1)[1]


def test_messages_stay_short_whatever_was_sent():
    for value in ["x" * 10**6, [1] * 10**5, {"k" * 10**6: 1}, 10**5000]:
        for fields in (
            {"temperature": value},
            {"messages": value},
            {"tools": [value]},
            {"logit_bias": {"9" * 10**6: 1}},
        ):
            refused(chat, **fields)
    param, _ = refused(chat, **{"z" * 10**6: 1})
    assert len(param) <= 200


def test_every_field_of_the_official_client_has_a_place():
    pytest.importorskip("openai")
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for params, table in [
        (chat_create_params.CompletionCreateParamsBase, chat_table(Limits())),
        (completion_create_params.CompletionCreateParamsBase, completion_table(Limits())),
    ]:
        known = {*table.supported, *table.ignored, *table.refused}
        assert set(params.__annotations__) - known == set()


def test_no_field_stands_in_two_columns():
    for table in (chat_table(Limits()), completion_table(Limits()), tokenize_table(), detokenize_table(Limits())):
        names = [*table.supported, *table.ignored, *table.refused]
        assert len(names) == len(set(names))
