"""Responses and streams in OpenAI's shapes, read back by OpenAI's own client; streamed equals whole."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.engine.sampler import TokenLogprobs
from msds.text.reasoning import Start
from msds.text.tools import LAYOUTS
from msds_serve.protocol.answers import AnswerOptions, call_id, make_readers
from msds_serve.protocol.errors import ApiError
from msds_serve.protocol.requests import StreamOptions
from msds_serve.protocol.responses import (
    Head,
    chat_choice,
    chat_completion,
    completion_choice,
    response_id,
    usage,
)
from msds_serve.protocol.streaming import ChatStream

HEAD = Head(id=response_id("chat", "r1"), created=1700000000, model="m", system_fingerprint="fp_1", call_seed="r1")
NO_USAGE, LAST_USAGE = StreamOptions(), StreamOptions(include_usage=True)
V31 = LAYOUTS["deepseek_v31"]
CALLS = V31.opening + "".join(
    f"{V31.begin}{name}<｜tool▁sep｜>{arguments}{V31.end}"
    for name, arguments in [("get", '{"city": "北京 }"}'), ("put", "{}")]
) + V31.closing  # fmt: skip


def token_bytes(token_id):
    """A vocabulary of single bytes, ids 256 and above have no token."""
    return bytes([token_id]) if token_id < 256 else b""


def scored(token_id, *, top=2):
    other = ((token_id + 1) % 256, -1.5)
    return TokenLogprobs(token_id, -0.5, 1, ((token_id, -0.5), other, (3, float("-inf")))[:top])


def pieces_of(text):
    """(text that is final, ids of its bytes) per character: several tokens at once, as speculation brings them."""
    return [(character, list(character.encode())) for character in text]


def options(**changes):
    return AnswerOptions(token_bytes=token_bytes, **{"start": Start.OPEN, "layout": V31, "top_logprobs": 2} | changes)


def whole_chat(answers, texts, reason="stop", *, one_push=False):
    readers = make_readers(answers, HEAD.call_seed, len(texts))
    choices = []
    for index, (reader, text) in enumerate(zip(readers, texts, strict=True)):
        pieces = [(text, list(text.encode()))] if one_push else pieces_of(text)
        deltas = [reader.push(piece, ids, [scored(id_) for id_ in ids]) for piece, ids in pieces]
        deltas.append(reader.finish())
        include, logprobs = answers.include_reasoning, answers.top_logprobs is not None
        choices.append(chat_choice(index, reader, deltas, reason, include_reasoning=include, with_logprobs=logprobs))
    counts = usage(
        7,
        sum(reader.completion_tokens for reader in readers),
        cached_tokens=4,
        reasoning_tokens=sum(reader.reasoning_tokens for reader in readers),
    )
    return chat_completion(HEAD, choices, counts)


def stream_chat(answers, texts, reason="stop", *, stream=NO_USAGE):
    """All chunks, with the choices interleaved."""
    chat = ChatStream(HEAD, answers, stream, num_choices=len(texts), prompt_tokens=7)
    for tokens in (4, 2):
        chat.cached_tokens.saw(0, tokens)
    chunks = []
    for round_ in itertools.zip_longest(*map(pieces_of, texts)):
        for choice, piece in enumerate(round_):
            if piece is not None:
                text, ids = piece
                chunks += chat.push(choice, text, ids, [scored(id_) for id_ in ids])
    for choice in range(len(texts)):
        chunks += chat.finish(choice, reason)
    return chunks + chat.close()


def joined(chunks, *, include_reasoning=True):
    """The choices that a client makes of the chunks; checks the framing on the way."""
    choices = {}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for part in chunk["choices"]:
            first = part["index"] not in choices
            choice = choices.setdefault(
                part["index"],
                {"reasoning": [], "content": "", "calls": [], "logprobs": [], "finish_reason": None},
            )
            delta = part["delta"]
            assert ("role" in delta) == first
            assert choice["finish_reason"] is None, "nothing follows a finish reason"
            assert include_reasoning or "reasoning_content" not in delta
            choice["reasoning"].append(delta.get("reasoning_content", ""))
            choice["content"] += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(choice["calls"])
                    assert call["type"] == "function"
                    choice["calls"].append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    assert "name" not in call["function"]
                    choice["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {}).get("content", [])
            choice["finish_reason"] = part["finish_reason"]
    return choices


def check_same(answers, texts, reason="stop"):
    whole = whole_chat(answers, texts, reason)
    assert whole == whole_chat(answers, texts, reason, one_push=True)
    chunks = stream_chat(answers, texts, reason, stream=StreamOptions(include_usage=True))
    assert chunks[-1]["usage"] == whole["usage"]
    streamed = joined(chunks, include_reasoning=answers.include_reasoning)
    for choice in whole["choices"]:
        message, other = choice["message"], streamed[choice["index"]]
        assert other["content"] == (message["content"] or "")
        if answers.include_reasoning:
            assert "".join(other["reasoning"]) == (message["reasoning_content"] or "")
        assert other["calls"] == message.get("tool_calls", [])
        assert other["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"] is not None:
            assert other["logprobs"] == choice["logprobs"]["content"]
    return whole


TEXTS = [
    "step</think>\n\n4",
    "no end of thinking",
    f"call it</think>\n\nLet me look. {CALLS}",
    f"</think>{CALLS[:-40]}",
    "",
    "</think>你好",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("start", list(Start))
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_streamed_equals_whole(text, start, reason):
    check_same(options(start=start), [text], reason)
    check_same(options(start=start, top_logprobs=None, include_reasoning=False), [text], reason)


def test_choices_interleave():
    whole = check_same(options(), TEXTS)
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"].get("tool_calls", ())]
    assert len(ids) == len(set(ids)) == 3  # two whole ones, and one that was cut


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "a", "\n", "é", V31.begin, V31.end, "<｜tool▁sep｜>", "{}"]),
        max_size=10,
    )
)
def test_streamed_equals_whole_for_any_text(parts):
    check_same(options(start=Start.MODEL), ["".join(parts)])
    check_same(options(start=Start.MODEL, include_reasoning=False), ["".join(parts)])


def test_the_message():
    choice = whole_chat(options(), ["step</think>\n\n4"])["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "4", "refusal": None, "reasoning_content": "step"}
    assert choice["finish_reason"] == "stop"
    cut = whole_chat(options(), ["all of it"], "length")["choices"][0]
    assert (cut["message"]["content"], cut["message"]["reasoning_content"]) == ("", "all of it")
    assert cut["finish_reason"] == "length"
    plain = whole_chat(options(start=Start.CLOSED), ["4"])["choices"][0]["message"]
    assert (plain["content"], plain["reasoning_content"]) == ("4", None)
    hidden = whole_chat(options(include_reasoning=False), ["step</think>4"])["choices"][0]
    assert "reasoning_content" not in hidden["message"]
    assert [entry["token"] for entry in hidden["logprobs"]["content"]] == ["4"]  # nor do its tokens show


def test_calls():
    choice = whole_chat(options(), [f"</think>{CALLS}"])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get", "put"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "北京 }"}
    assert calls[0]["id"] == call_id(f"{HEAD.call_seed}.0", 0)
    cut = whole_chat(options(), [f"</think>{CALLS[:75]}"], "length")["choices"][0]
    assert cut["finish_reason"] == "length"
    none = whole_chat(options(layout=None), [f"</think>{CALLS}"])["choices"][0]
    assert (none["finish_reason"], none["message"]["content"]) == ("stop", CALLS)


def test_one_call_ends_the_answer_where_asked():
    chat = ChatStream(HEAD, options(parallel_tool_calls=False), StreamOptions(), num_choices=1, prompt_tokens=1)
    done = []
    for text, ids in pieces_of(f"</think>{CALLS}"):
        chat.push(0, text, ids)
        done.append(chat.readers[0].is_done)
    assert done.index(True) == len("</think>") + CALLS.index(V31.end) + len(V31.end) - 1
    assert chat.finish(0, "stop")[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_reasoning_tokens():
    counts = whole_chat(options(), ["ab</think>c", "abc"], "length")["usage"]
    assert counts == {
        "prompt_tokens": 7,
        "completion_tokens": 14,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 13},
    }


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "stream", [StreamOptions(), StreamOptions(include_usage=True), StreamOptions(True, True)], ids=["no", "last", "all"]
)
def test_usage_in_streams(count, stream):
    chunks = stream_chat(options(), ["a</think>b"] * count, stream=stream)
    if not stream.include_usage:
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
        return
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole_chat(options(), ["a</think>b"] * count)["usage"]
    assert all(chunk["choices"] for chunk in others)
    if stream.continuous_usage_stats:
        totals = [chunk["usage"]["completion_tokens"] for chunk in others]
        assert totals == sorted(totals)
        assert totals[-1] == last["usage"]["completion_tokens"]
    else:
        assert all(chunk["usage"] is None for chunk in others)


def test_an_empty_answer_still_has_role_and_finish_reason():
    chunks = stream_chat(options(start=Start.CLOSED), [""])
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


def test_a_choice_that_breaks_fails_the_request():
    chat = ChatStream(HEAD, options(), StreamOptions(), num_choices=1, prompt_tokens=1)
    chat.push(0, "a", [97], [scored(97)])
    with pytest.raises(ApiError, match="numbers of this answer broke") as caught:
        chat.finish(0, "error")
    assert caught.value.status == 500
    with pytest.raises(RuntimeError, match="not finished"):
        chat.close()
    with pytest.raises(ApiError):
        completion_choice(0, "a", "error")


def test_chunks_after_the_end_are_a_bug():
    chat = ChatStream(HEAD, options(), StreamOptions(), num_choices=1, prompt_tokens=1)
    chat.finish(0, "stop")
    for call in (lambda: chat.push(0, "a"), lambda: chat.finish(0, "stop"), lambda: chat.push(1, "a")):
        with pytest.raises(RuntimeError, match="finished or does not exist"):
            call()
