"""Logits and greedy texts equal the reference's: transformers, or the NumPy model where transformers ignores a field.

`forward` runs for every variant of the catalogue. Prefill and decode run for those variants that between them
contain every form of attention, rotation, feed-forward and head; graphs cost seconds each.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

import msds
from tests.models.compare import IDS, TOLERANCE, difference, edited, far_positions, full_distribution, log_softmax
from tests.reference.checkpoints import reference_logits
from tests.reference.variants import VARIANTS, YARN_V3

VOCAB = 512
GREEDY = msds.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB)


@pytest.mark.parametrize("name", VARIANTS)
def test_forward(tiny, name):
    """At positions 0, 1, ... and far ones with gaps, where stretched and plain rotations differ."""
    remark = contextlib.nullcontext()
    if VARIANTS[name].stored_head == "different":
        remark = pytest.warns(UserWarning, match="lm_head")
    with remark:
        model = msds.load(tiny(name))
    far = far_positions(name, 40)
    near = model.logits(IDS)
    assert near.shape == (64, VOCAB)
    assert near.dtype == np.float32
    assert difference(near, reference_logits(name, tiny(name), IDS)) < TOLERANCE
    there = model.logits(IDS[:40], far)  # fewer than its bucket holds: padded
    assert difference(there, reference_logits(name, tiny(name), IDS[:40], far)) < TOLERANCE
    if VARIANTS[name].family.startswith("deepseek"):
        assert difference(there, near[:40]) > 100 * TOLERANCE  # the positions are heard


@pytest.mark.parametrize(
    "name",
    [
        "v3_base",
        "v3_v_dim",
        "v3_attention_bias",
        "v3_fp8",  # absorbed weights from dequantised ones
        "v2_lite",
        "v2_group_limited",
        "qwen2_tied",
        "qwen2_yarn",
        "llama_mha",
        "llama_head_dim",
        "llama_bias",
    ],
)
def test_prefill_and_decode(tiny, name):
    """37 + 64 tokens: three chunks, the last padded, over blocks of 8; stretched dense families pass position 64."""
    llm = msds.LLM(tiny(name), max_model_len=112, prefill_chunk=16, block_size=8, max_num_seqs=1)
    check_greedy(llm, name, IDS[:37])


def test_cached_steps_beyond_the_original_context(tiny, tmp_path):
    """YaRN from an original context of 32: prefill passes it in its third chunk, decode lies beyond it."""
    name = "v3_mscale_differs"
    scaling = {**VARIANTS[name].config["rope_scaling"], "original_max_position_embeddings": 32}
    folder = edited(tiny(name), tmp_path / "short", rope_scaling=scaling)
    plain = edited(tiny(name), tmp_path / "long", rope_scaling={**YARN_V3})
    assert difference(reference_logits(name, plain, IDS), reference_logits(name, folder, IDS)) > 100 * TOLERANCE
    llm = msds.LLM(folder, max_model_len=112, prefill_chunk=16, block_size=8, max_num_seqs=1)
    check_greedy(llm, name, IDS[:37])


@pytest.mark.parametrize("name", ["v3_base", "llama_yarn"])
def test_texts_that_cross_bucket_edges(tiny, name):
    """Contexts of 512 and 640 tokens are different graphs: one text crosses in prefill, one in decode."""
    llm = msds.LLM(tiny(name), max_model_len=640, prefill_chunk=64, block_size=32, max_num_seqs=1)
    text = np.random.default_rng(3).integers(0, VOCAB, 520)
    check_greedy(llm, name, text, count=2)
    check_greedy(llm, name, text[:490])
    used = {dict(bucket)["B"] for bucket in llm.engine.runner._decode.compiled_buckets}
    assert used == {16, 20}


def check_greedy(llm, name, prompt, count=64):
    """The greedy ids are the reference's, and the whole distribution at every position agrees.

    By induction: if each id is the argmax of the reference's logits after the ids before it, the reference would
    have generated the same text.
    """
    [output] = llm.generate([int(id_) for id_ in prompt], replace(GREEDY, max_tokens=count))
    ids = np.array([*prompt, *output.token_ids])
    assert len(ids) == len(prompt) + count
    logits = reference_logits(name, llm.model.folder, ids[:-1])
    assert list(output.token_ids) == logits[len(prompt) - 1 :].argmax(-1).tolist()
    rows = [entry.top for entry in (*output.prompt_logprobs[1:], *output.logprobs)]
    got = np.stack([full_distribution(top) for top in rows])
    assert np.abs(got - log_softmax(logits)).max() < TOLERANCE * np.abs(logits).max()
