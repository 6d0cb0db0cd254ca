"""The loop over a runner that is no model: it watches that every step is legal and answers by the tokens it cached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.engine.batch import build_batch
from msds.engine.engine import Engine
from msds.engine.runner import StepResult
from msds.errors import OptionError, PromptError
from msds.sampling import SamplingParams

VOCAB, EOS, BLOCK_SIZE, CHUNK, MAX_SEQS = 32, 1, 4, 6, 3


def logits_after(tokens: list[int]) -> np.ndarray[Any, Any]:
    """What the model of these tests says after a text: a function of all of its tokens and their order."""
    seed = [len(tokens), *tokens]
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3


class FakeRunner:
    """A cache of token ids. A row whose context was not cached by earlier steps of the same text fails the test."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.block_size = num_blocks, BLOCK_SIZE
        self.prefill_buckets = ({"S": 1, "Q": CHUNK, "B": num_blocks}, {"S": 1, "Q": 2, "B": num_blocks})
        config = SimpleNamespace(vocab_size=VOCAB)
        self.model = SimpleNamespace(config=config, eos_token_ids=frozenset({EOS}), tokenizer=None, allowed_vocab=VOCAB)
        self.slots = np.full(num_blocks * BLOCK_SIZE, -1)
        self.kinds: list[str] = []

    def prefill(self, rows: Any, *, all_logits: bool = False) -> StepResult:
        assert len(rows) == 1
        assert len(rows[0].tokens) <= CHUNK
        self.kinds.append("prefill")
        return self._step(rows, all_logits)

    def decode(self, rows: Any) -> StepResult:
        assert 1 <= len(rows) <= MAX_SEQS
        assert all(len(row.tokens) == 1 for row in rows)
        self.kinds.append("decode")
        return self._step(rows, False)

    def _step(self, rows: Any, all_logits: bool) -> StepResult:
        batch = build_batch(rows, block_size=BLOCK_SIZE, num_cache_blocks=self.num_blocks, vocab_size=VOCAB)
        owners = [block for row in rows for block in row.block_table]
        assert len(set(owners)) == len(owners), "two sequences share a block"
        out = []
        for index, row in enumerate(rows):
            self.slots[batch["slot_mapping"][index, : len(row.tokens)]] = row.tokens
            table = batch["block_tables"][index]
            context = [
                int(self.slots[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE]) for p in range(row.context_len)
            ]
            first = row.start + 1 if all_logits else row.context_len
            out.append(np.stack([logits_after(context[:end]) for end in range(first, row.context_len + 1)]))
        return StepResult(np.stack(out), np.array([row.tokens[-1] != VOCAB - 1 for row in rows]))


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy answer by definition."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(logits_after(tokens).argmax()))
        if tokens[-1] in (EOS, VOCAB - 1):
            break
    return tokens[len(prompt) :]


def run(engine: Engine) -> list[Any]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(2, VOCAB - 2), min_size=1, max_size=20), st.integers(1, 8)), min_size=1, max_size=6
)


@given(requests=PROMPTS, spare=st.integers(0, 20))
def test_any_requests_in_any_cache_that_can_hold_the_largest(requests: Any, spare: int) -> None:
    """Each answer is that of its prompt alone, whoever shares the steps; in the end every block is free."""
    largest = max(-(-(len(prompt) + max_tokens) // BLOCK_SIZE) for prompt, max_tokens in requests)
    engine = Engine(FakeRunner(1 + largest + spare), max_model_len=28, max_num_seqs=MAX_SEQS)  # type: ignore[arg-type]
    for index, (prompt, max_tokens) in enumerate(requests):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=max_tokens), prompt_index=index)
    outputs = {output.prompt_index: output for output in run(engine)}
    assert len(outputs) == len(requests)
    for index, (prompt, max_tokens) in enumerate(requests):
        want = expected(prompt, max_tokens)
        got = outputs[index]
        assert list(got.token_ids) == want
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(prompt), len(want))
        broken = want[-1] == VOCAB - 1 and len(want) < max_tokens
        assert got.finish_reason == ("stop" if want[-1] == EOS else "error" if broken else "length")
    assert engine.pool.num_free == engine.pool.num_usable


def test_a_broken_sequence_ends_alone() -> None:
    """Token 31 makes this model's hidden state overflow."""
    engine = Engine(FakeRunner(20), max_model_len=28, max_num_seqs=MAX_SEQS)  # type: ignore[arg-type]
    engine.add([5, VOCAB - 1], SamplingParams(temperature=0, max_tokens=4), prompt_index=0)
    engine.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=4), prompt_index=1)
    broken, well = sorted(run(engine), key=lambda output: output.prompt_index)
    assert (broken.finish_reason, broken.token_ids) == ("error", ())
    assert "not finite" in broken.error
    assert list(well.token_ids) == expected([5, 6, 7], 4)
    assert engine.pool.num_free == engine.pool.num_usable


def test_prefill_and_decode_take_turns() -> None:
    """A long prompt that arrives does not stop those who are being answered."""
    runner = FakeRunner(40)
    engine = Engine(runner, max_model_len=60, max_num_seqs=MAX_SEQS)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add([2, 3], params, prompt_index=0)
    engine.step()
    engine.add(list(range(2, 30)), params, prompt_index=1)
    for _ in range(8):
        engine.step()
    assert all(pair != ("prefill", "prefill") for pair in zip(runner.kinds[1:], runner.kinds[2:], strict=False))


class TestRefusals:
    @pytest.fixture
    def engine(self) -> Engine:
        return Engine(FakeRunner(6), max_model_len=100, max_num_seqs=MAX_SEQS)  # type: ignore[arg-type]

    def test_a_prompt_that_fills_the_context(self, engine: Engine) -> None:
        with pytest.raises(PromptError, match=r"prompt 3 has 100 tokens.*max_model_len is 100"):
            engine.add([2] * 100, SamplingParams(), prompt_index=3)

    def test_prompt_and_answer_beyond_the_context(self, engine: Engine) -> None:
        with pytest.raises(PromptError, match=r"90 tokens and max_tokens is 11.*lower max_tokens to 10"):
            engine.add([2] * 90, SamplingParams(max_tokens=11), prompt_index=0)

    def test_more_blocks_than_there_are(self, engine: Engine) -> None:
        with pytest.raises(OptionError, match=r"needs 6 cache blocks.*has 5"):
            engine.add([2] * 20, SamplingParams(max_tokens=1), prompt_index=0)
        assert not engine.has_work
        engine.add([2] * 19, SamplingParams(temperature=0, max_tokens=1), prompt_index=0)  # needs exactly all
        assert len(run(engine)) == 1

    def test_abort_frees_everything(self, engine: Engine) -> None:
        for index in range(4):
            engine.add([2, 3, 4], SamplingParams(max_tokens=5, ignore_eos=True), prompt_index=index)
        for _ in range(3):
            engine.step()
        engine.abort()
        assert not engine.has_work
        assert engine.pool.num_free == engine.pool.num_usable
