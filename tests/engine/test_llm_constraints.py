"""Constraints through `LLM`, over a tiny random model whose chats begin inside the thinking."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

import msds
from msds import SamplingParams
from msds.constraints import Choice, JsonSchema
from msds.errors import ConstraintError, SamplingError

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "of": {"enum": ["sea", "天"]}},
    "required": ["ok", "of"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "s"}]


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Path]) -> msds.LLM:
    folder = tiny("llama_base", tokenizer=True)
    return msds.LLM(folder, progress=False, max_model_len=128, block_size=8, max_num_seqs=3, prefill_chunk=16)


def test_a_random_model_writes_valid_json(llm: msds.LLM) -> None:
    assert llm.model.grammars is not None
    pieces = llm.model.grammars.table.pieces
    no_space = {id_: -100.0 for id_, piece in enumerate(pieces) if piece and not piece.strip()}
    params = SamplingParams(constraint=JsonSchema(SCHEMA), temperature=1, seed=1, n=3, logit_bias=no_space)
    outputs = llm.generate(["the sea", "sky"], params)
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), SCHEMA)
    assert len({output.text for output in outputs}) > 1


def test_a_chat_thinks_first(llm: msds.LLM) -> None:
    assert llm.model.tokenizer is not None
    end = llm.model.tokenizer.control_ids["</think>"]
    yes = Choice(["yes"])
    [free] = llm.chat(USER, SamplingParams(constraint=yes, temperature=1, seed=1, max_tokens=8))
    assert free.finish_reason == "length"
    [thought] = llm.chat(USER, SamplingParams(constraint=yes, temperature=1, seed=1, logit_bias={end: 100}))
    assert thought.text.split("</think>")[1].strip() == "yes"
    [at_once] = llm.generate("s", SamplingParams(constraint=yes, temperature=1, seed=1))
    assert at_once.text == "yes"


def test_one_bad_constraint_stops_all_before_any_runs(llm: msds.LLM) -> None:
    good, bad = (SamplingParams(constraint=JsonSchema(schema)) for schema in (SCHEMA, {"uniqueItems": True}))
    with pytest.raises(ConstraintError, match="uniqueItems"):
        llm.generate(["a", "b"], [good, bad])
    assert not llm.engine.has_work


def test_without_a_tokenizer(tiny: Callable[..., Path]) -> None:
    bare = msds.LLM(tiny("llama_base"), progress=False, max_model_len=64, block_size=8)
    with pytest.raises(SamplingError, match="constraint needs a tokenizer"):
        bare.generate([5], SamplingParams(constraint=Choice(["a"])))
