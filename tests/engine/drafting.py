"""A runner that drafts, and is no model: it watches what it is told of hidden states and what its MTP cache holds."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import numpy as np

from msds.engine.batch import build_batch, draft_slots
from msds.engine.engine import Engine
from msds.engine.runner import StepResult
from msds.engine.schedule_types import SchedulerPolicy
from msds.engine.sequence import Output
from msds.engine.speculation import Speculation
from tests.engine import test_engine
from tests.engine.test_engine import BLOCK_SIZE, CHUNK, MAX_SEQS, SHARED, Case, FakeRunner, check_prefill

STALE = -1.0


def state_of(tokens: list[int]) -> float:
    """The hidden state of the last token of a text: a number that no other text has."""
    return float(1 + zlib.crc32(str(tokens).encode()) % (1 << 23))  # exact in float32


class Always(Speculation):
    """Drafts in every round, whatever the clock says."""

    def wants(self, shape: Any) -> bool:
        return True

    def measure(self, shape: Any, **values: Any) -> None:
        pass


class DraftingRunner(FakeRunner):
    """Drafts what comes next in one of `texts`, and something else with probability `wrong`.

    Per slot `entries` holds the state that the MTP entry of its token was made with; 0 where it was not known.
    """

    def __init__(
        self,
        num_blocks: int,
        num_drafts: int,
        texts: list[list[int]] | None = None,
        wrong: float = 0,
        num_replicas: int = 1,
    ) -> None:
        super().__init__(num_blocks, num_replicas)
        self.num_drafts, self.texts, self.wrong = num_drafts, texts or [], wrong
        self.entries = np.full(len(self.slots), STALE)
        self.num_rows: list[int] = []

    def prefill(self, rows: Any, *, all_logits: bool = False) -> StepResult:
        check_prefill(rows)
        self._write_entries(rows)
        return self._with_states(rows, super().prefill(rows, all_logits=all_logits))

    def decode(self, rows: Any) -> StepResult:
        """As a model would: every row of logits sees the tokens up to its own, drafts included."""
        assert 1 <= max(Counter(row.replica for row in rows).values()) <= MAX_SEQS
        assert all(len(row.tokens) <= 1 + self.num_drafts for row in rows)
        self.kinds.append("decode")
        vocab = test_engine.VOCAB
        batch = build_batch(rows, block_size=BLOCK_SIZE, num_cache_blocks=self.num_blocks, vocab_size=vocab)
        self._check_writes(rows, batch)
        self._write_entries(rows)
        most = max(len(row.tokens) for row in rows)
        logits = np.full((len(rows), most, vocab), np.nan, np.float32)  # what is padding must not be looked at
        is_finite = np.ones((len(rows), most), np.bool_)
        for index, row in enumerate(rows):
            result = self._step([row], True)
            logits[index, : len(row.tokens)], is_finite[index, : len(row.tokens)] = (
                result.logits[0],
                result.is_finite[0],
            )
        shared = StepResult(logits, np.zeros((len(rows), most, 1), np.float32), is_finite)
        return self._with_states(rows, shared)

    def draft(self, rows: Any) -> np.ndarray[Any, Any]:
        self.num_rows.append(len(rows))
        out = np.zeros((len(rows), self.num_drafts), np.int32)
        for index, row in enumerate(rows):
            assert len(row.tokens) == 1
            assert row.prev_hidden is not None
            text = [*self._context(row), row.tokens[0]]
            self._check_state(row, text)
            slots = self._slots(row, row.start)
            for place in range(1, row.start):  # what attention reads of the tokens before
                assert self.entries[slots[place]] in (0.0, state_of(text[:place])), "a stale MTP entry is read"
            base = row.replica * self.num_blocks * BLOCK_SIZE
            self.entries[base + draft_slots([row], self.num_drafts, BLOCK_SIZE)[0]] = STALE
            out[index] = self._drafts(text)
        return out

    def _drafts(self, text: list[int]) -> list[int]:
        known = next((one[len(text) :] for one in self.texts if one[: len(text)] == text), [])
        rng = np.random.default_rng([len(text), *text])
        drafts = [*known[: self.num_drafts], *rng.integers(0, test_engine.VOCAB, self.num_drafts).tolist()]
        wrong = rng.random(self.num_drafts) < self.wrong
        return [(token + bad) % test_engine.VOCAB for token, bad in zip(drafts, wrong.tolist(), strict=False)]

    def _write_entries(self, rows: Any) -> None:
        for row in rows:
            text = self._context(row)
            self._check_state(row, text)
            slots = self._slots(row, row.context_len)
            state = 0.0 if row.prev_hidden is None else float(row.prev_hidden[0])
            for place, token in enumerate(row.tokens, start=row.start):
                self.entries[slots[place]] = state
                text.append(token)
                state = state_of(text)

    def _check_state(self, row: Any, text: list[int]) -> None:
        if row.prev_hidden is not None:
            assert float(row.prev_hidden[0]) == state_of(text[: row.start]), "the state of another token"

    def _with_states(self, rows: Any, result: StepResult) -> StepResult:
        hidden = np.zeros((*result.is_finite.shape, 1), np.float32)
        for index, row in enumerate(rows):
            text = [*self._context(row), *row.tokens]
            for place in range(len(row.tokens)):
                hidden[index, place] = state_of(text[: row.start + place + 1])
        return StepResult(result.logits, hidden, result.is_finite)

    def _context(self, row: Any) -> list[int]:
        """The tokens before a row, as the cache has them."""
        tokens: list[int] = self.slots[self._slots(row, row.start)].tolist()
        return tokens

    def _slots(self, row: Any, count: int) -> np.ndarray[Any, Any]:
        """Where the first tokens of a row's text are, in the caches of all replicas."""
        places, table = np.arange(count), row.replica * self.num_blocks + np.asarray(row.block_table)
        slots: np.ndarray[Any, Any] = table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        return slots


class DraftingCase(Case):
    """A `Case` that speculates."""

    def __init__(self, runner: DraftingRunner, *, max_model_len: int, speculation: Speculation | None = None) -> None:
        super().__init__(0, max_model_len=max_model_len, runner=runner)
        self.runner: DraftingRunner = runner
        policy = SchedulerPolicy(max_num_seqs=MAX_SEQS, chunk_sizes=(2, CHUNK), shared=SHARED)
        self.engine = Engine(
            runner,  # type: ignore[arg-type]
            max_model_len=max_model_len,
            policy=policy,
            speculation=speculation or Always(runner.num_drafts),
        )


def told(output: Output) -> tuple[Any, ...]:
    """All that a client hears of an answer."""
    usage = output.usage
    return (
        output.token_ids,
        output.text,
        output.finish_reason,
        output.logprobs,
        output.prompt_logprobs,
        output.error,
        (usage.prompt_tokens, usage.completion_tokens),
    )
