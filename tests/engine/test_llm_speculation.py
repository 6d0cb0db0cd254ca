"""Speculation with a real MTP layer: answers are those of the same checkpoint without, and nothing compiles on the way.

A random MTP layer is hardly ever right, so the checkpoint is rigged: the main model's layers say little, so that the
next token hangs mostly on the last one, and the MTP layer passes that on. About half of the drafts are then kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import msds
from msds import SamplingParams
from msds.engine.ladder import step_ladders
from msds.engine.sequence import RequestInfo
from msds.errors import OptionError
from msds_graphs.binding import assign, to_numpy
from msds_graphs.counter import count_compiles
from tests.engine.drafting import Always
from tests.models.compare import TOLERANCE, difference
from tests.models.mutants import shortened

OPTIONS = {"max_model_len": 64, "block_size": 8, "max_num_seqs": 3, "prefill_chunk": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(3, 300, length).tolist() for length in (1, 4, 19, 36)]
LOUDNESS = 0.03
"""Of what the layers add to the residual stream, as a share of what they were written with."""


def rig(llm: msds.LLM) -> None:
    """Quiet layers, and an MTP layer that passes its token's embedding on to the norm that the main model has."""
    params = llm.model.params
    for layer in (*params["layers"], *params["mtp"]):
        experts, shared = layer["mlp"]["experts"], layer["mlp"]["shared_experts"]
        for loud in (layer["self_attn"]["o_proj"]["weight"], experts["down_proj"], shared["down_proj"]["weight"]):
            assign(loud, np.array(to_numpy(loud)) * np.float32(LOUDNESS))
    for layer in params["mtp"]:
        size = layer["eh_proj"]["weight"].shape[0]
        assign(layer["eh_proj"]["weight"], np.eye(size, 2 * size, dtype=np.float32))
        assign(layer["enorm"]["weight"], np.ones(size, np.float32))
        assign(layer["shared_head"]["norm"]["weight"], np.array(to_numpy(params["norm"]["weight"])))


def make(folder: Any, k: int, **options: Any) -> msds.LLM:
    def widest(**sizes: Any) -> Any:  # one number of sequences in place of two: half as many graphs
        prefill, decode = step_ladders(**sizes)
        return prefill, tuple(bucket for bucket in decode if bucket["S"] == sizes["max_num_seqs"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msds.llm.step_ladders", widest)
        llm = msds.LLM(folder, progress=False, num_speculative_tokens=k, **{**OPTIONS, **options})
    rig(llm)
    if k:
        llm.engine._speculation = Always(k)
    return llm


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """One layer beside the MTP layer: it compiles faster."""
    return shortened(tiny("v3_base", tokenizer=True), tmp_path_factory.mktemp("short") / "v3", 1)


@pytest.fixture(scope="module")
def plain(folder):
    return make(folder, 0)


@pytest.fixture(scope="module")
def fast(folder):
    """Three drafts; warmed up, and from then on no test compiles anything."""
    llm = make(folder, 3)
    llm.warm_up(progress=False)
    llm.model.logits([5])  # the definition's graph for texts of up to 16 tokens
    return llm


@pytest.fixture(autouse=True)
def _nothing_compiles(request):
    if "fast" not in request.fixturenames:
        yield
        return
    llm = request.getfixturevalue("fast")
    if "plain" in request.fixturenames:
        request.getfixturevalue("plain").warm_up(progress=False)
    with count_compiles() as seen:
        yield
    assert seen.count == 0
    assert llm.engine.stats.referenced_blocks == 0


def same(got: Any, want: Any) -> None:
    assert [output.token_ids for output in got] == [output.token_ids for output in want]
    for one, other in zip(got, want, strict=True):
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert one.usage.completion_tokens == other.usage.completion_tokens
        assert (one.logprobs is None) == (other.logprobs is None)
        gaps = [a.logprob - b.logprob for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True)]
        assert np.abs([0.0, *gaps]).max() < TOLERANCE


def test_greedy_answers_are_the_same_and_half_of_the_drafts_are_kept(fast, plain):
    """Four prompts for three places, of one to three chunks; then again, now that their blocks are cached."""
    want = plain.generate(PROMPTS, GREEDY)
    same(fast.generate(PROMPTS, GREEDY), want)
    stats = fast.engine.speculation
    assert 0.4 < stats.accepted[0] / stats.drafted[0] < 0.95
    assert min(stats.accepted) > 3
    again = fast.generate(PROMPTS, GREEDY)
    assert sum(output.usage.cached_tokens for output in again) > 40
    same(again, want)
    same([fast.generate([prompt], GREEDY)[0] for prompt in PROMPTS], want)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.05, "seed": 3, "n": 2},
        {"temperature": 0.3, "seed": 1, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
        {"presence_penalty": 0.2, "logit_bias": {7: 0.3}, "min_tokens": 9},
    ],
    ids=["choices", "sampled", "penalties"],
)
def test_sampled_answers_are_the_same(fast, plain, more):
    params = replace(GREEDY, **more)
    same(fast.generate(PROMPTS, params), plain.generate(PROMPTS, params))


def test_every_draft_stands_on_the_state_of_the_token_before(fast, monkeypatch):
    """The states that go into the layer are those that the definition has there."""
    rows = []
    real = fast.engine.runner.draft
    monkeypatch.setattr(fast.engine.runner, "draft", lambda asked: (rows.extend(asked), real(asked))[1])
    [output] = fast.generate([PROMPTS[1]], replace(GREEDY, max_tokens=12))
    text = [*PROMPTS[1], *output.token_ids]
    batch = {
        "tokens": np.array([text], np.int32),
        "positions": np.arange(len(text), dtype=np.int32)[None],
        "query_lens": np.array([len(text)], np.int32),
    }
    hidden = fast.model._compiled_forward()(batch)["hidden"][0]
    assert len(rows) > 2
    for row in rows:
        assert difference(row.prev_hidden, hidden[row.start - 1]) < TOLERANCE


def test_new_weights_under_way(fast, plain):
    """What was said before stays; what follows is what the new weights say after it."""
    finished = []
    fast.engine.add(PROMPTS[1], GREEDY, lambda s, d: finished.append(s) if d.finish_reason else None, RequestInfo())
    [sequence] = fast.engine._sequences.values()
    while sequence.num_output < 8:
        fast.engine.step()
    said = sequence.output_ids
    heads = [llm.model.params["lm_head"]["weight"] for llm in (fast, plain)]
    before = np.array(to_numpy(heads[0]))
    for head in heads:
        assign(head, np.flip(before, 0).copy())
    try:
        for llm in (fast, plain):
            llm.engine.invalidate()
        while fast.engine.step():
            pass
        rest = plain.generate([[*PROMPTS[1], *said]], replace(GREEDY, max_tokens=24 - len(said)))[0].token_ids
        assert sequence.output_ids == [*said, *rest]
    finally:
        for llm, head in zip((fast, plain), heads, strict=True):
            assign(head, before)
            llm.engine.invalidate()


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
def test_fewer_drafts(folder, plain, k):
    """Another k, the same answers; k is the length of a loop in one graph, of which test_draft runs 1 and 3 turns."""
    llm = make(folder, k, max_num_seqs=1)
    want = [plain.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    same(llm.generate(PROMPTS, GREEDY), want)
    assert sum(llm.engine.speculation.accepted) > 20


@pytest.mark.parametrize("count", [-1, 9, True, 1.0])
def test_refused_numbers(tiny, count):
    with pytest.raises(OptionError, match="num_speculative_tokens is"):
        msds.LLM(tiny("v3_base"), num_speculative_tokens=count)


@pytest.mark.parametrize("name", ["v3_no_mtp", "llama_base"])
def test_a_checkpoint_without_mtp_is_refused(tiny, name):
    with pytest.raises(OptionError, match="no MTP layer to draft with: leave it out"):
        msds.LLM(tiny(name), num_speculative_tokens=1)
