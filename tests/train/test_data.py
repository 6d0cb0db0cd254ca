"""Batches: what counts, what is padding, and that their order is a function of seed and number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msds.errors import TrainingError
from msds.text.chat import ChatTemplate
from msds.text.chat_format import ChatFormat
from msds.text.tokenizer import Tokenizer
from msds.train.data import (
    Batches,
    Conversation,
    Example,
    build_batch,
    digest,
    encode_conversation,
    read_conversations,
    split_batch,
)
from msds.train.tiny_r1.tokenizer import write_tokenizer
from tests.train.conftest import random_examples

EXAMPLES = random_examples(60, seed=3)


def test_only_the_answer_counts_and_the_weights_sum_to_one() -> None:
    batch = build_batch([Example((5, 6, 7, 8, 9), 3), Example((4, 5), 1)], (4, 8))
    assert batch["tokens"].tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [4, 5, 0, 0, 0, 0, 0, 0]]
    assert (batch["weights"] > 0).tolist() == [
        [False] * 3 + [True] * 2 + [False] * 3,
        [False, True] + [False] * 6,
    ]
    assert batch["weights"].sum() == pytest.approx(1)
    assert batch["query_lens"].tolist() == [5, 2]
    assert build_batch([Example((4, 5), 0)], (4, 8))["weights"][0].tolist() == [0, 1, 0, 0]


def test_every_text_comes_once_per_pass_in_an_order_of_the_seed() -> None:
    batches = Batches(EXAMPLES, sequences=8, lengths=(8, 12), seed=1)
    assert batches.batches_per_pass == 7
    first = [batches[index] for index in range(7)]
    rows = [
        tuple(row[:length]) for batch in first for row, length in zip(batch["tokens"], batch["query_lens"], strict=True)
    ]
    assert len(set(rows)) == 56
    assert set(rows) <= {example.token_ids for example in EXAMPLES}
    again = Batches(EXAMPLES, sequences=8, lengths=(8, 12), seed=1)
    for index in (9, 2, 13, 0):  # any order of asking, across passes
        np.testing.assert_array_equal(again[index]["tokens"], batches[index]["tokens"])
    other = Batches(EXAMPLES, sequences=8, lengths=(8, 12), seed=2)
    assert any(not np.array_equal(other[index]["tokens"], first[index]["tokens"]) for index in range(7))
    assert {batch["tokens"].shape[1] for batch in first} == {8, 12}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"x.jsonl, line 3 has 12 tokens, but the longest training length is 11"):
        Batches([Example(tuple(range(12)), 1, "x.jsonl, line 3")] * 8, sequences=8, lengths=(11,), seed=0)
    with pytest.raises(TrainingError, match="3 texts do not fill a batch of 8"):
        Batches(EXAMPLES[:3], sequences=8, lengths=(12,), seed=0)
    with pytest.raises(TrainingError, match="8 texts does not divide into 3"):
        split_batch(build_batch(EXAMPLES[:8], (12,)), 3)


def test_micro_batches_keep_the_normalisation() -> None:
    batch = build_batch(EXAMPLES[:8], (12,))
    parts = split_batch(batch, 4)
    assert [len(part["query_lens"]) for part in parts] == [2, 2, 2, 2]
    assert sum(float(part["weights"].sum()) for part in parts) == pytest.approx(1)


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ChatFormat]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, ["What is 1 + 2?", "答案是 3。"])
    tokenizer = Tokenizer.open(folder)
    return tokenizer, ChatFormat.open(folder, tokenizer)


def test_a_conversation_continues_the_think_block_that_the_prompt_opens(voice: Any) -> None:
    tokenizer, chat = voice
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "<think>\n1+2=3\n</think>\n\n3"},
    ]
    example = encode_conversation(Conversation(messages), tokenizer, chat)
    assert list(example.token_ids[: example.num_prompt]) == chat.encode(messages[:1])
    text = tokenizer.decode(example.token_ids, skip_special_tokens=False)
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    assert text == f"{begin}<｜User｜>What is 1 + 2?<｜Assistant｜><think>\n1+2=3\n</think>\n\n3{end}"
    assert example.token_ids.count(tokenizer.control_ids["</think>"]) == 1
    assert example.token_ids[-1] == tokenizer.eos_id


BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


@pytest.mark.parametrize(
    "last",
    [
        {"content": "3", "reasoning_content": "1+2=3"},
        {"content": "<think>1+2=3\n</think>\n\n3"},
        {"content": "1+2=3\n</think>\n\n3"},
        {"content": f"<think>\n1+2=3\n</think>\n\n3{END}"},
    ],
)
def test_every_way_to_write_a_thought_is_learned_alike(voice: Any, last: dict[str, str]) -> None:
    tokenizer, chat = voice
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", **last}]
    example = encode_conversation(Conversation(messages), tokenizer, chat)
    text = tokenizer.decode(example.token_ids, skip_special_tokens=False)
    assert text == f"{BEGIN}<｜User｜>?<｜Assistant｜><think>\n1+2=3\n</think>\n\n3{END}"


def test_an_answer_without_a_thought_is_not_learned_as_one(voice: Any, tmp_path: Path) -> None:
    tokenizer, chat = voice
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "3"}]
    with pytest.raises(TrainingError, match=r"x.jsonl, line 7: .*ends inside its thinking.*reasoning_content"):
        encode_conversation(Conversation(messages, where="x.jsonl, line 7"), tokenizer, chat)
    empty = encode_conversation(Conversation([messages[0], messages[1] | {"reasoning_content": ""}]), tokenizer, chat)
    text = tokenizer.decode(empty.token_ids, skip_special_tokens=False)
    assert text.endswith(f"<think>\n\n</think>\n\n3{END}")
    plain = ChatFormat(ChatTemplate({"default": PLAIN}, tokenizer), tokenizer)
    text = tokenizer.decode(
        encode_conversation(Conversation(messages), tokenizer, plain).token_ids, skip_special_tokens=False
    )
    assert text == f"{BEGIN}user: ?\nassistant: 3{END}"
    thought = [messages[0], messages[1] | {"reasoning_content": "1+2"}]
    with pytest.raises(TrainingError, match="leaves no place for it"):
        encode_conversation(Conversation(thought), tokenizer, plain)


def test_what_the_template_cannot_show_is_named_with_its_line(voice: Any) -> None:
    tokenizer, chat = voice
    messages = [{"role": "usr", "content": "?"}, {"role": "assistant", "content": "</think>3"}]
    with pytest.raises(TrainingError, match=r"x.jsonl, line 2: .*usr"):
        encode_conversation(Conversation(messages, where="x.jsonl, line 2"), tokenizer, chat)


def test_digests_tell_texts_apart() -> None:
    texts = [[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[1, 2]]
    assert len({digest(one) for one in texts}) == 4
    assert digest(iter([(1, 2), (3,)])) == digest(texts[0])


def test_each_digit_is_a_token(voice: Any) -> None:
    tokenizer, _ = voice
    assert len(tokenizer.encode_plain("123456")) == 6


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c"
    line = json.dumps({"messages": [{"role": "assistant", "content": text}]}, ensure_ascii=False)
    path = tmp_path / "data.jsonl"
    path.write_text(f"{line}\r\n{line}\n", "utf-8")
    read = read_conversations(path)
    assert [one.messages[-1]["content"] for one in read] == [text, text]
    assert [one.where for one in read] == [f"{path}, line 1", f"{path}, line 2"]


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [{"role": "assistant", "content": null}]}',
        '{"messages": []}',
        '{"messages": [{"role": "user", "content": "?"}]}',
        "3",
        "{",
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, line: str) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]})
    path = tmp_path / "data.jsonl"
    path.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(TrainingError, match="line 3"):
        read_conversations(path)
    path.write_text(f"{good}\n")
    assert len(read_conversations(path)) == 1
