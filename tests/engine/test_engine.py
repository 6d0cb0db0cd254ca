"""The loop over a runner that is no model: it watches that every step is legal and answers by the tokens it cached."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.engine.batch import build_batch
from msds.engine.engine import Engine
from msds.engine.ladder import SharedPrefill
from msds.engine.runner import StepResult
from msds.engine.schedule_types import SchedulerPolicy
from msds.engine.sequence import Delta, GenerationSequence, Output, RequestInfo
from msds.errors import OptionError, PromptError
from msds.sampling import SamplingParams

VOCAB, EOS, BLOCK_SIZE, CHUNK, MAX_SEQS = 32, 1, 4, 6, 3
SHARED = SharedPrefill(rows=(2, 3), tokens=CHUNK - 1, context=12)


def logits_after(tokens: list[int]) -> np.ndarray[Any, Any]:
    """What the model of these tests says after a text: a function of all of its tokens and their order."""
    seed = [len(tokens), *tokens]
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3


def check_prefill(rows: Any) -> None:
    """A chunk of one sequence of each replica, or several as `SHARED` allows."""
    most = max(Counter(row.replica for row in rows).values())
    if most == 1:
        assert all(len(row.tokens) <= CHUNK for row in rows)
        return
    assert most <= max(SHARED.rows)
    assert all(len(row.tokens) <= SHARED.tokens and row.context_len <= SHARED.context for row in rows)


class FakeRunner:
    """A cache of token ids per replica. A row whose context was not cached by earlier steps of its text fails."""

    def __init__(self, num_blocks: int, num_replicas: int = 1) -> None:
        self.num_blocks, self.block_size, self.num_replicas = num_blocks, BLOCK_SIZE, num_replicas
        config = SimpleNamespace(vocab_size=VOCAB)
        self.model = SimpleNamespace(config=config, eos_token_ids=frozenset({EOS}), tokenizer=None, allowed_vocab=VOCAB)
        self.slots = np.full(num_replicas * num_blocks * BLOCK_SIZE, -1)
        self.kinds: list[str] = []
        self.num_shared = 0

    def prefill(self, rows: Any, *, all_logits: bool = False) -> StepResult:
        check_prefill(rows)
        self.kinds.append("prefill")
        self.num_shared += len(rows) > 1
        return self._step(rows, all_logits)

    def decode(self, rows: Any) -> StepResult:
        assert 1 <= max(Counter(row.replica for row in rows).values()) <= MAX_SEQS
        assert all(len(row.tokens) == 1 for row in rows)
        self.kinds.append("decode")
        return self._step(rows, False)

    def _step(self, rows: Any, all_logits: bool) -> StepResult:
        batch = build_batch(rows, block_size=BLOCK_SIZE, num_cache_blocks=self.num_blocks, vocab_size=VOCAB)
        self._check_writes(rows, batch)
        most = batch["tokens"].shape[1] if all_logits else 1
        logits = np.full((len(rows), most, VOCAB), np.nan, np.float32)  # what is padding must not be looked at
        for index, row in enumerate(rows):
            base = row.replica * self.num_blocks
            self.slots[base * BLOCK_SIZE + batch["slot_mapping"][index, : len(row.tokens)]] = row.tokens
            table = base + batch["block_tables"][index]
            context = [
                int(self.slots[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE]) for p in range(row.context_len)
            ]
            first = row.start + 1 if all_logits else row.context_len
            for place, end in enumerate(range(first, row.context_len + 1)):
                logits[index, place] = logits_after(context[:end])
        hidden = np.zeros((*batch["tokens"].shape, 1), np.float32)
        is_finite = batch["tokens"] != VOCAB - 1
        if self.kinds[-1] == "prefill":
            lens = [len(row.tokens) for row in rows]  # only as the last token does it break anything here
            is_finite |= np.arange(is_finite.shape[1]) != np.array(lens)[:, None] - 1
        return StepResult(logits, hidden, is_finite)

    def _check_writes(self, rows: Any, batch: Any) -> None:
        written = [
            (row.replica, block) for index, row in enumerate(rows) for block in set(self._blocks(batch, index, row))
        ]
        assert len(set(written)) == len(written), "two sequences write one block"
        for index, row in enumerate(rows):
            for other in (other for other in rows[:index] + rows[index + 1 :] if other.replica == row.replica):
                assert not set(self._blocks(batch, index, row)) & set(other.block_table), "a shared block is written"

    def _blocks(self, batch: Any, index: int, row: Any) -> list[int]:
        """The blocks that a row writes."""
        return [int(slot) // BLOCK_SIZE for slot in batch["slot_mapping"][index, : len(row.tokens)]]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy answer by definition."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(logits_after(tokens).argmax()))
        if tokens[-1] in (EOS, VOCAB - 1):
            break
    return tokens[len(prompt) :]


class Case:
    """An engine over a fake runner, and the answers it gave."""

    def __init__(
        self,
        num_blocks: int,
        *,
        max_model_len: int,
        runner: FakeRunner | None = None,
        num_replicas: int = 1,
        shared: SharedPrefill | None = SHARED,
    ) -> None:
        self.runner = runner or FakeRunner(num_blocks, num_replicas)
        policy = SchedulerPolicy(max_num_seqs=MAX_SEQS, chunk_sizes=(2, CHUNK), shared=shared)
        self.engine = Engine(self.runner, max_model_len=max_model_len, policy=policy)  # type: ignore[arg-type]
        self.outputs: list[Output] = []

    def add(self, prompt: list[int], index: int = 0, **params: Any) -> list[GenerationSequence]:
        sampling = SamplingParams(**{"temperature": 0, **params})
        return self.engine.add(prompt, sampling, self.listen, RequestInfo(prompt_index=index))

    def listen(self, sequence: GenerationSequence, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self.outputs.append(sequence.output())

    def run(self) -> list[Output]:
        while self.engine.step():
            pass
        return sorted(self.outputs, key=lambda output: (output.prompt_index, output.choice_index))

    def assert_nothing_held(self) -> None:
        stats = self.engine.stats
        assert not self.engine.has_work
        assert (stats.referenced_blocks, stats.running, stats.waiting) == (0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == self.runner.num_replicas * (self.runner.num_blocks - 1)


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(2, VOCAB - 2), min_size=1, max_size=20), st.integers(1, 8)), min_size=1, max_size=6
)


@given(requests=PROMPTS, spare=st.integers(0, 20), num_replicas=st.sampled_from([1, 1, 2, 3]))
def test_any_requests_in_any_cache_that_can_hold_the_largest(requests: Any, spare: int, num_replicas: int) -> None:
    """Each answer is that of its prompt alone, whoever shares the steps, the prefixes and the cache; in the end no
    block is held. Small caches preempt, equal prompts hit the prefix cache."""
    largest = max(-(-(len(prompt) + max_tokens) // BLOCK_SIZE) for prompt, max_tokens in requests)
    case = Case(1 + largest + spare, max_model_len=28, num_replicas=num_replicas)
    for index, (prompt, max_tokens) in enumerate(requests):
        case.add(prompt, index, max_tokens=max_tokens)
    outputs = case.run()
    assert len(outputs) == len(requests)
    for got, (prompt, max_tokens) in zip(outputs, requests, strict=True):
        want = expected(prompt, max_tokens)
        assert list(got.token_ids) == want
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(prompt), len(want))
        broken = want[-1] == VOCAB - 1 and len(want) < max_tokens
        assert got.finish_reason == ("stop" if want[-1] == EOS else "error" if broken else "length")
    case.assert_nothing_held()


SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 6), "seed": st.integers(0, 9), "temperature": st.sampled_from([0, 1.5])},
    optional={"logprobs": st.integers(0, 2), "prompt_logprobs": st.integers(0, 2), "n": st.just(2)},
)


@given(requests=st.lists(st.tuples(st.lists(st.integers(2, 4), min_size=1, max_size=14), SAMPLING), max_size=6))
def test_answers_do_not_depend_on_the_prompts_that_share_their_steps(requests: Any) -> None:
    """Ids, log-probabilities of both kinds and usage are those of each request alone, one prompt to a step."""
    case = Case(60, max_model_len=28)
    for index, (prompt, params) in enumerate(requests):
        case.add(prompt, index, **params)
    got = case.run()
    want = []
    for index, (prompt, params) in enumerate(requests):
        single = Case(60, max_model_len=28, shared=None)
        single.add(prompt, index, **params)
        want += single.run()
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.token_ids, ours.finish_reason, ours.error) == (
            theirs.token_ids,
            theirs.finish_reason,
            theirs.error,
        )
        assert (ours.logprobs, ours.prompt_logprobs) == (theirs.logprobs, theirs.prompt_logprobs)
        assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
        assert ours.usage.completion_tokens == theirs.usage.completion_tokens
    case.assert_nothing_held()


def test_a_burst_of_short_prompts_is_one_step() -> None:
    case = Case(30, max_model_len=28)
    prompts = [[5, 6], [7, 8, 9, 10], [11]]
    for index, prompt in enumerate(prompts):
        case.add(prompt, index, max_tokens=3, prompt_logprobs=0 if index == 1 else None)
    outputs = case.run()
    assert case.runner.kinds[:2] == ["prefill", "decode"]
    assert case.runner.num_shared == 1
    assert [list(output.token_ids) for output in outputs] == [expected(prompt, 3) for prompt in prompts]
    assert outputs[1].prompt_logprobs is not None
    assert outputs[0].prompt_logprobs is outputs[2].prompt_logprobs is None


def test_preemption_is_invisible() -> None:
    """Three answers in a cache for one and a half: some start again, and nobody can tell."""
    prompts = [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]
    case = Case(9, max_model_len=24)
    for index, prompt in enumerate(prompts):
        case.add(prompt, index, max_tokens=16, ignore_eos=True, logprobs=0)
    outputs = case.run()
    assert case.engine.stats.preemptions > 0
    alone = []
    for prompt in prompts:
        single = Case(40, max_model_len=24)
        single.add(prompt, max_tokens=16, ignore_eos=True, logprobs=0)
        alone += single.run()
    for got, want in zip(outputs, alone, strict=True):
        assert (got.token_ids, got.logprobs, got.usage) == (want.token_ids, want.logprobs, want.usage)
    case.assert_nothing_held()


def test_a_prefix_hit_gives_what_a_miss_gives() -> None:
    prompt = list(range(2, 15))  # three full blocks and one token
    case = Case(40, max_model_len=28)
    case.add(prompt, 0, max_tokens=5)
    case.run()
    case.add(prompt, 1, max_tokens=5)
    case.add(prompt[:12], 2, max_tokens=5)  # full blocks only: the last token is computed all the same
    first, again, full = case.run()
    assert again.token_ids == first.token_ids
    assert list(full.token_ids) == expected(prompt[:12], 5)
    assert [output.usage.cached_tokens for output in (first, again, full)] == [0, 12, 8]


def test_a_broken_sequence_ends_alone() -> None:
    """Token 31 makes this model's hidden state overflow; what it left in the cache is not found by others."""
    case = Case(20, max_model_len=28)
    broken_prompt = [5, 6, 7, VOCAB - 1]
    case.add([*broken_prompt, 8], 0, max_tokens=4)
    case.add([5, 6, 7], 1, max_tokens=4)
    broken, well = case.run()
    assert (broken.finish_reason, list(well.token_ids)) == ("length", expected([5, 6, 7], 4))
    case = Case(20, max_model_len=28)
    case.add(broken_prompt, 0, max_tokens=4)
    case.add([5, 6, 7], 1, max_tokens=4)
    broken, well = case.run()
    assert (broken.finish_reason, broken.token_ids) == ("error", ())
    assert "not finite" in str(broken.error)
    assert list(well.token_ids) == expected([5, 6, 7], 4)
    assert case.engine.stats.cached_blocks == 1  # of the healthy one
    case.assert_nothing_held()


def test_a_step_that_raises_ends_its_own_sequences() -> None:
    class Failing(FakeRunner):
        def prefill(self, rows: Any, *, all_logits: bool = False) -> StepResult:
            if rows[0].tokens[0] == 9:
                raise ValueError("no such kernel")
            return super().prefill(rows, all_logits=all_logits)

    case = Case(0, max_model_len=28, runner=Failing(30))
    case.add([9, 9, 9, 9, 9, 9], 0, max_tokens=4)  # too long to share a step
    case.add([5, 6, 7], 1, max_tokens=4)
    failed, well = case.run()
    assert failed.finish_reason == "error"
    assert "no such kernel" in str(failed.error)
    assert list(well.token_ids) == expected([5, 6, 7], 4)
    assert case.engine.num_failed_steps == 1
    case.assert_nothing_held()


def test_sampling_that_raises_ends_its_own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong between the graph and the commit, the step is closed and the engine goes on."""
    case = Case(30, max_model_len=28)
    with monkeypatch.context() as patch:
        patch.setattr("msds.engine.engine.sample", lambda *args, **kwargs: [][0])
        case.add([9, 9, 9], 0, max_tokens=4)
        (failed,) = case.run()
    assert failed.finish_reason == "error"
    case.add([5, 6, 7], 1, max_tokens=4)
    assert list(case.run()[1].token_ids) == expected([5, 6, 7], 4)
    case.assert_nothing_held()


def test_deadlines_and_aborts() -> None:
    case = Case(30, max_model_len=60)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    case.engine.add([2, 3], sampling, case.listen, RequestInfo(prompt_index=0, deadline=0.0))
    (kept,) = case.add([4, 5], 1, max_tokens=6, ignore_eos=True)
    (given_up,) = case.add([6, 7], 2, max_tokens=6, ignore_eos=True)
    for _ in range(2):
        case.engine.step()
    case.engine.abort(given_up)
    case.engine.abort(given_up)  # a second time is nothing
    outputs = case.run()
    assert [output.finish_reason for output in outputs] == ["error", "length", "abort"]
    assert "deadline" in str(outputs[0].error)
    assert kept.num_output == 6
    assert outputs[2].token_ids == tuple(expected([6, 7], 6)[: len(outputs[2].token_ids)])
    case.assert_nothing_held()


def test_prefill_and_decode_take_turns() -> None:
    """A long prompt that arrives does not stop those who are being answered."""
    case = Case(40, max_model_len=60)
    case.add([2, 3], 0, max_tokens=12, ignore_eos=True)
    case.engine.step()
    case.add(list(range(2, 30)), 1, max_tokens=12, ignore_eos=True)
    for _ in range(8):
        case.engine.step()
    kinds = case.runner.kinds
    assert kinds.count("prefill") > 3
    assert all(pair != ("prefill", "prefill") for pair in itertools.pairwise(kinds[1:]))


def test_prompt_logprobs_survive_small_chunks() -> None:
    """One per prompt token, each from the logits after the tokens before it, also when the prompt is recomputed."""
    prompt = list(range(2, 15))
    case = Case(40, max_model_len=28)
    for index in range(2):
        case.add(prompt, index, max_tokens=1, prompt_logprobs=0)
    for output in case.run():
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for at, known in enumerate(output.prompt_logprobs[1:], start=1):
            logits = logits_after(prompt[:at]).astype(np.float64)
            want = logits[prompt[at]] - np.log(np.exp(logits).sum())
            assert known is not None
            assert known.logprob == pytest.approx(want, abs=1e-5)


class TestRefusals:
    @pytest.fixture
    def case(self) -> Case:
        return Case(6, max_model_len=100)

    def test_a_prompt_that_fills_the_context(self, case: Case) -> None:
        with pytest.raises(PromptError, match=r"prompt 3 has 100 tokens.*max_model_len is 100"):
            case.add([2] * 100, 3)

    def test_prompt_and_answer_beyond_the_context(self, case: Case) -> None:
        with pytest.raises(PromptError, match=r"90 tokens and max_tokens is 11.*lower max_tokens to 10"):
            case.add([2] * 90, max_tokens=11)

    def test_more_blocks_than_there_are(self, case: Case) -> None:
        with pytest.raises(OptionError, match=r"needs 6 cache blocks.*has 5"):
            case.add([2] * 21, max_tokens=1)
        assert not case.engine.has_work
        case.add([2] * 20, max_tokens=1)  # needs exactly all: the last token is never computed
        assert len(case.run()) == 1

    def test_abort_all_frees_everything(self, case: Case) -> None:
        for index in range(4):
            case.add([2, 3, 4], index, max_tokens=5, ignore_eos=True)
        for _ in range(3):
            case.engine.step()
        case.engine.abort_all()
        case.assert_nothing_held()
