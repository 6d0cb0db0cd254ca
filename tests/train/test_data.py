"""Batches: what counts, what is padding, and that their order is a function of seed and number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msds.errors import TrainingError
from msds.text.chat_format import ChatFormat
from msds.text.tokenizer import Tokenizer
from msds.train.data import Batches, Example, build_batch, encode_conversation, read_conversations, split_batch
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
    with pytest.raises(TrainingError, match=r"has 12 tokens, but the longest training length is 11"):
        Batches([Example(tuple(range(12)), 1)] * 8, sequences=8, lengths=(11,), seed=0)
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
    example = encode_conversation(messages, tokenizer, chat)
    assert list(example.token_ids[: example.num_prompt]) == chat.encode(messages[:1])
    text = tokenizer.decode(example.token_ids, skip_special_tokens=False)
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    assert text == f"{begin}<｜User｜>What is 1 + 2?<｜Assistant｜><think>\n1+2=3\n</think>\n\n3{end}"
    assert example.token_ids.count(tokenizer.control_ids["</think>"]) == 1
    assert example.token_ids[-1] == tokenizer.eos_id


def test_each_digit_is_a_token(voice: Any) -> None:
    tokenizer, _ = voice
    assert len(tokenizer.encode_plain("123456")) == 6


@pytest.mark.parametrize("line", ['{"messages": []}', '{"messages": [{"role": "user", "content": "?"}]}', "3", "{"])
def test_a_bad_conversation_is_named(tmp_path: Path, line: str) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]})
    path = tmp_path / "data.jsonl"
    path.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(TrainingError, match="line 3"):
        read_conversations(path)
    path.write_text(f"{good}\n")
    assert len(read_conversations(path)) == 1
