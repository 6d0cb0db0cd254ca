"""Log-probabilities in both shapes, and text completions, streamed and whole."""

from dataclasses import replace

import pytest

from msds.engine.sampler import TokenLogprobs
from msds_serve.protocol.logprobs import FLOOR, LegacyLogprobs, chat_entry, finite, prompt_entries
from msds_serve.protocol.requests import StreamOptions
from msds_serve.protocol.responses import chat_completion, join_legacy, response_id, usage
from msds_serve.protocol.streaming import CompletionStream
from tests.serve.test_protocol_answers import HEAD, LAST_USAGE, scored, token_bytes

TEXT_HEAD = replace(HEAD, id=response_id("completion", "r1"))


def test_chat_logprobs():
    entry = chat_entry(TokenLogprobs(0xE4, float("-inf"), 9, ((65, -0.25), (300, float("nan")))), token_bytes, 2)
    assert entry == {
        "token": "\\xe4",
        "logprob": FLOOR,
        "bytes": [0xE4],
        "top_logprobs": [
            {"token": "A", "logprob": -0.25, "bytes": [65]},
            {"token": "token_id:300", "logprob": FLOOR, "bytes": []},
        ],
    }
    assert chat_entry(scored(65), token_bytes, 0)["top_logprobs"] == []
    assert finite(1e-9) == 0.0


def test_legacy_logprobs():
    builder = LegacyLogprobs(token_bytes, 1, hidden={1})
    prompt = builder.push([1, 0xE4], [None, scored(0xE4)])
    answer = builder.push([0xBD, 0xA0, 65], [scored(0xBD), scored(0xA0), TokenLogprobs(65, -3.0, 2, ((66, -0.1),))])
    assert join_legacy([prompt, answer]) == {
        "tokens": ["\x01", "bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0", "A"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -3.0],
        "top_logprobs": [
            None,
            {"bytes:\\xe4": -0.5},
            {"bytes:\\xbd": -0.5},
            {"bytes:\\xa0": -0.5},
            {"B": -0.1, "A": -3.0},
        ],
        "text_offset": [0, 0, 0, 0, 1],
    }
    same = LegacyLogprobs(lambda token_id: b"A", 2).push([1], [TokenLogprobs(1, -2.0, 2, ((2, -0.2), (1, -2.0)))])
    assert same["top_logprobs"] == [{"A": -0.2}]  # two tokens that read the same: the likelier
    with pytest.raises(ValueError, match="1 tokens have 0 entries"):
        builder.push([1], [])


def test_prompt_logprobs():
    entries = prompt_entries([None, TokenLogprobs(65, -2.0, 7, ((66, -0.5),))], token_bytes)
    assert entries == [
        None,
        {
            "65": {"logprob": -2.0, "rank": 7, "decoded_token": "A"},
            "66": {"logprob": -0.5, "rank": 1, "decoded_token": "B"},
        },
    ]
    body = chat_completion(HEAD, [], usage(1, 0), prompt_logprobs=[None], token_bytes=token_bytes)
    assert body["prompt_logprobs"] == [None]


# completions


def stream_text(texts, *, logprobs=True, echo=False, stream=LAST_USAGE):
    builders = [LegacyLogprobs(token_bytes, 2) for _ in texts] if logprobs else None
    run = CompletionStream(TEXT_HEAD, stream, num_choices=len(texts), prompt_tokens=2, logprobs=builders)
    chunks = []
    for choice in range(len(texts) if echo else 0):
        chunks += run.echo(choice, "Hi", [72, 105], [None, scored(105)] if logprobs else None)
    for choice, text in enumerate(texts):
        for character in text:
            *held, last = character.encode()
            for id_ in held:
                chunks += run.push(choice, "", [id_], [scored(id_)] if logprobs else None)
            chunks += run.push(choice, character, [last], [scored(last)] if logprobs else None)
        chunks += run.finish(choice, "length")
    return chunks + run.close()


@pytest.mark.parametrize("echo", [False, True])
def test_completion_streams(echo):
    chunks = stream_text(["a你", ""], echo=echo)
    *chunks, last = chunks
    assert last["usage"] == usage(2, 4)
    texts, pieces, ends = ["", ""], [[], []], [[], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        pieces[choice["index"]] += [choice["logprobs"]] if choice["logprobs"] else []
        ends[choice["index"]].append(choice["finish_reason"])
    before = "Hi" if echo else ""
    assert texts == [before + "a你", before]
    for reasons in ends:
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) <= {None}
    whole = LegacyLogprobs(token_bytes, 2)
    ids = list("Hia你".encode() if echo else "a你".encode())
    entries = [scored(id_) for id_ in ids]
    assert join_legacy(pieces[0]) == whole.push(ids, [None, *entries[1:]] if echo else entries)


def test_completion_streams_without_logprobs():
    chunks = stream_text(["ab"], logprobs=False, stream=StreamOptions())
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert all(chunk["choices"][0]["logprobs"] is None and "usage" not in chunk for chunk in chunks)
