"""LLM end to end on a tiny checkpoint with a tokenizer: batches, choices, stops, log-probabilities, errors."""

from __future__ import annotations

import numpy as np
import pytest

import msds
from msds import SamplingParams
from msds.errors import OptionError, PromptError, SamplingError, TokenizerError
from msds_graphs.binding import assign, to_numpy
from msds_graphs.counter import count_compiles
from tests.models.compare import TOLERANCE, log_softmax

MAX_LEN = 64
OPTIONS = {"max_model_len": MAX_LEN, "block_size": 8, "max_num_seqs": 3, "prefill_chunk": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = ["the sea is wide", "你好", "answer the question, then think again " * 2, "s"]
END = 1


@pytest.fixture(scope="module")
def llm(tiny):
    return msds.LLM(tiny("llama_base", tokenizer=True), progress=False, **OPTIONS)


@pytest.fixture(autouse=True)
def _every_block_is_free_afterwards(llm):
    yield
    assert not llm.engine.has_work
    assert llm.engine.stats.referenced_blocks == 0


def ids_of(outputs):
    return [output.token_ids for output in outputs]


class TestBatches:
    def test_a_prompt_is_answered_as_it_would_be_alone(self, llm):
        """Four prompts for three places, so that one waits: ids equal, log-probabilities within the tolerance."""
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        together = llm.generate(PROMPTS, GREEDY)
        assert [output.prompt_index for output in together] == [0, 1, 2, 3]
        assert ids_of(together) == ids_of(alone)
        for batched, single in zip(together, alone, strict=True):
            assert batched.text == single.text
            gaps = [a.logprob - b.logprob for a, b in zip(batched.logprobs, single.logprobs, strict=True)]
            assert np.abs(gaps).max() < TOLERANCE

    def test_the_order_of_prompts_does_not_matter(self, llm):
        assert ids_of(llm.generate(PROMPTS[::-1], GREEDY))[::-1] == ids_of(llm.generate(PROMPTS, GREEDY))

    def test_text_and_its_ids_are_the_same_prompt(self, llm):
        ids = llm.model.tokenizer.encode(PROMPTS[0])
        assert ids[0] == 0  # begins once
        by_ids, by_text = llm.generate([ids, PROMPTS[0]], GREEDY)
        assert by_ids.token_ids == by_text.token_ids
        assert by_ids.usage.prompt_tokens == len(ids)
        assert llm.generate(ids, GREEDY)[0].token_ids == by_ids.token_ids  # one prompt of ids, not a list of prompts

    def test_parameters_per_prompt(self, llm):
        short, long = llm.generate(
            PROMPTS[:2], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3, min_tokens=3)]
        )
        assert (len(short.token_ids), len(long.token_ids)) == (1, 3)

    def test_ids_that_the_tokenizer_lacks_are_never_chosen(self, llm):
        known = llm.model.tokenizer.vocab_size
        assert known < llm.model.config.vocab_size
        hot = SamplingParams(temperature=100, max_tokens=40, ignore_eos=True, seed=3)
        assert max(llm.generate("s", hot)[0].token_ids) < known


class TestChoices:
    PARAMS = SamplingParams(n=3, temperature=1.5, seed=11, max_tokens=8, ignore_eos=True)

    def test_a_choice_does_not_depend_on_how_many_there_are(self, llm):
        three = llm.generate("the sea", self.PARAMS)
        assert [output.choice_index for output in three] == [0, 1, 2]
        assert len({output.token_ids for output in three}) == 3
        one = SamplingParams(temperature=1.5, seed=11, max_tokens=8, ignore_eos=True)
        assert llm.generate("the sea", one)[0].token_ids == three[0].token_ids

    def test_a_seeded_answer_does_not_depend_on_company(self, llm):
        alone = llm.generate("the sea", self.PARAMS)
        crowd = llm.generate(["sky", "the sea", "你"], self.PARAMS)
        assert ids_of(crowd[3:6]) == ids_of(alone)

    def test_without_a_seed_answers_differ(self, llm):
        free = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
        assert llm.generate("the sea", free)[0].token_ids != llm.generate("the sea", free)[0].token_ids


class TestEnds:
    @pytest.fixture
    def answer(self, llm):
        return llm.generate(PROMPTS[0], GREEDY)[0]

    def test_length(self, llm, answer):
        assert answer.finish_reason == "length"
        assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, answer.usage.prompt_tokens + 12)

    def test_stop_string(self, llm, answer):
        stop = answer.text[4:6]
        place = answer.text.index(stop)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
        cut = llm.generate(PROMPTS[0], params)[0]
        assert (cut.text, cut.finish_reason) == (answer.text[:place], "stop")
        kept = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
        assert llm.generate(PROMPTS[0], kept)[0].text == answer.text[: place + len(stop)]

    def test_stop_token(self, llm, answer):
        last = next(
            index
            for index, token in enumerate(answer.token_ids)
            if index > 2 and answer.token_ids.index(token) == index
        )
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[answer.token_ids[last]])
        cut = llm.generate(PROMPTS[0], params)[0]
        assert (cut.token_ids, cut.finish_reason) == (answer.token_ids[: last + 1], "stop")
        assert answer.text.startswith(cut.text)

    def test_end_of_sequence(self, llm):
        """A bias makes the end token the likeliest."""
        bias = {END: 100.0}
        now = llm.generate("s", SamplingParams(temperature=0, max_tokens=5, logit_bias=bias))[0]
        assert (now.token_ids, now.text, now.finish_reason) == ((END,), "", "stop")
        later = llm.generate("s", SamplingParams(temperature=0, max_tokens=5, min_tokens=3, logit_bias=bias))[0]
        assert later.token_ids.index(END) == 3
        assert later.finish_reason == "stop"
        never = llm.generate("s", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias=bias))[0]
        assert (never.token_ids, never.finish_reason) == ((END,) * 5, "length")

    def test_the_rest_of_the_context_is_the_default_and_the_limit(self, llm):
        ids = [5] * 60
        free = llm.generate(ids, SamplingParams(temperature=0, ignore_eos=True))[0]
        assert (len(free.token_ids), free.finish_reason) == (MAX_LEN - 60, "length")
        exact = llm.generate(ids, SamplingParams(temperature=0, ignore_eos=True, max_tokens=4))[0]
        assert exact.token_ids == free.token_ids


class TestLogprobs:
    def test_of_the_answer(self, llm):
        answer = llm.generate(PROMPTS[2], GREEDY)[0]
        ids = [*llm.model.tokenizer.encode(PROMPTS[2]), *answer.token_ids]
        defined = log_softmax(llm.model.logits(ids))[len(ids) - 13 : -1]
        for row, entry, token in zip(defined, answer.logprobs, answer.token_ids, strict=True):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(row[token], abs=1e-3)
            assert [top for top, _ in entry.top] == np.argsort(-row, kind="stable")[:3].tolist()
            np.testing.assert_allclose([value for _, value in entry.top], np.sort(row)[::-1][:3], atol=1e-3)

    def test_of_the_prompt(self, llm):
        """37 tokens in three chunks; the first token has no log-probability, nothing is counted twice."""
        ids = np.random.default_rng(2).integers(3, 300, 37).tolist()
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
        entries = llm.generate(ids, params)[0].prompt_logprobs
        defined = log_softmax(llm.model.logits(ids))
        assert len(entries) == 37
        assert entries[0] is None
        for place, entry in enumerate(entries[1:], start=1):
            row = defined[place - 1]
            assert entry.token_id == ids[place]
            assert entry.logprob == pytest.approx(row[ids[place]], abs=1e-3)
            assert entry.rank == 1 + int((row > row[ids[place]]).sum())
            assert entry.top[0][0] == int(row.argmax())

    def test_are_absent_unless_asked_for(self, llm):
        answer = llm.generate("s", SamplingParams(temperature=0, max_tokens=2))[0]
        assert answer.logprobs is None
        assert answer.prompt_logprobs is None


class TestStreaming:
    def test_pieces_join_to_the_text(self, llm):
        pieces = {}
        params = SamplingParams(n=2, temperature=1.2, seed=4, max_tokens=10, ignore_eos=True)

        def listen(prompt, choice, text):
            pieces[prompt, choice] = pieces.get((prompt, choice), "") + text

        for output in llm.generate(PROMPTS[:2], params, on_text=listen):
            assert pieces[output.prompt_index, output.choice_index] == output.text

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_an_interrupt_leaves_the_engine_usable(self, llm, error):
        before = ids_of(llm.generate(PROMPTS, GREEDY))
        calls = []

        def interrupt(prompt, choice, text):
            calls.append(text)
            if len(calls) == 5:
                raise error

        with pytest.raises(error):
            llm.generate(PROMPTS, GREEDY, on_text=interrupt)
        assert llm.engine.stats.referenced_blocks == 0
        assert ids_of(llm.generate(PROMPTS, GREEDY)) == before


class TestChat:
    MESSAGES = ({"role": "system", "content": "S"}, {"role": "user", "content": "Hi"})

    def test_a_conversation_is_its_rendered_prompt(self, llm):
        answer = llm.chat(self.MESSAGES, GREEDY)[0]
        rendered = llm.model.chat.encode(self.MESSAGES)
        assert rendered.count(0) == 1  # begins once
        assert answer.usage.prompt_tokens == len(rendered)
        assert llm.generate(rendered, GREEDY)[0].token_ids == answer.token_ids

    def test_several_conversations(self, llm):
        other = [{"role": "user", "content": "Bye"}]
        both = llm.chat([self.MESSAGES, other], GREEDY)
        assert ids_of(both) == ids_of([llm.chat(self.MESSAGES, GREEDY)[0], llm.chat(other, GREEDY)[0]])


def test_defaults_come_from_the_generation_config(llm):
    assert llm.default_sampling(max_tokens=3) == SamplingParams.from_generation_config(
        llm.model.generation, max_tokens=3
    )
    assert len(llm.generate("s", llm.default_sampling(max_tokens=3, min_tokens=3))[0].token_ids) == 3


def test_an_overflow_in_one_prompt_leaves_the_others_alone(llm):
    """NaN in the embedding of one token: its answer ends with an error, its blocks are clean for the next owner."""
    weight = llm.model.params["embed_tokens"]["weight"]
    before = np.array(to_numpy(weight))
    well = [[5, 6, 7, 8], [9] * 20]
    want = ids_of(llm.generate(well, GREEDY))
    spoiled = before.copy()
    spoiled[300] = np.nan
    assign(weight, spoiled)
    try:
        outputs = llm.generate([well[0], [4, 300, 4], well[1]], GREEDY)
        broken = outputs[1]
        assert (broken.finish_reason, broken.token_ids) == ("error", ())
        assert "not finite" in broken.error
        assert [outputs[0].token_ids, outputs[2].token_ids] == want
        assert ids_of(llm.generate(well, GREEDY)) == want
    finally:
        assign(weight, before)


@pytest.fixture(scope="module")
def bare(tiny):
    return msds.LLM(tiny("llama_base"), progress=False, **OPTIONS)


class TestWithoutTokenizer:
    def test_token_ids_work(self, bare):
        answer = bare.generate([5, 6, 7], GREEDY)[0]
        assert answer.text == ""
        logits = bare.model.logits([5, 6, 7, *answer.token_ids])
        assert list(answer.token_ids) == logits[2:-1].argmax(-1).tolist()

    def test_texts_do_not(self, bare):
        with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
            bare.generate("text", GREEDY)
        with pytest.raises(TokenizerError, match="no tokenizer"):
            bare.chat([{"role": "user", "content": "Hi"}], GREEDY)
        with pytest.raises(SamplingError, match="stop strings need a tokenizer"):
            bare.generate([5], SamplingParams(stop="x"))


class TestRefusals:
    @pytest.mark.parametrize("prompts", [[], [[]], [5, "x"], {"prompt": 1}, [[5], 3], [None]])
    def test_prompts(self, llm, prompts):
        with pytest.raises(PromptError):
            llm.generate(prompts, GREEDY)

    @pytest.mark.parametrize(("ids", "named"), [([512], "512"), ([-1], "-1"), ([1.5], "1.5"), ([True], "True")])
    def test_ids(self, llm, ids, named):
        with pytest.raises(PromptError, match=named):
            llm.generate([ids], GREEDY)

    def test_nothing_runs_when_one_of_many_is_refused(self, llm):
        with pytest.raises(PromptError, match=r"prompt 1 has 64 tokens"):
            llm.generate([[5], [5] * 64], GREEDY)
        with pytest.raises(SamplingError, match="1 sampling parameters for 2 prompts"):
            llm.generate(["a", "b"], [GREEDY])
        with pytest.raises(SamplingError, match="logit_bias names token 512"):
            llm.generate(["a", "b"], SamplingParams(logit_bias={512: 1.0}))

    def test_unknown_option(self, llm):
        with pytest.raises(OptionError, match=r"'max_tokens' is unknown.*max_model_len"):
            msds.LLM(llm.model.folder, max_tokens=3)


def test_nothing_compiles_after_warm_up(tiny):
    """Prompts of 1, 17, 40 and limit-1 tokens, 1 to 5 of them, n 1 and 3: MindSpore's own count stays where it was."""
    llm = msds.LLM(tiny("llama_base", tokenizer=True), progress=False, warm_up=True, **OPTIONS)
    rng = np.random.default_rng(0)
    with count_compiles() as seen:
        for count in (1, 3, 5, 1):
            for n in (1, 3):
                lengths = [1, 17, 40, MAX_LEN - 1, 8][:count]
                prompts = [rng.integers(3, 300, length).tolist() for length in lengths]
                params = SamplingParams(temperature=0, n=n, ignore_eos=True, max_tokens=1)
                assert len(llm.generate(prompts, params)) == count * n
    assert seen.count == 0


def test_arrays_of_ids_are_ids(llm):
    import numpy as np

    greedy = SamplingParams(temperature=0, max_tokens=3)
    (want,) = llm.generate([[5, 6, 7]], greedy)
    for prompts in (np.array([5, 6, 7]), [np.array([5, 6, 7])], np.array([[5, 6, 7]]), [np.int64(5), 6, 7]):
        (got,) = llm.generate(prompts, greedy)
        assert got.token_ids == want.token_ids
