"""Constrained answers without a model: random logits through the real sampler, over small tokenizers."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from msds.constraints import Constraint
from msds.constraints.grammars import GrammarCompiler
from msds.constraints.state import ConstraintState
from msds.engine.sampler import SequenceState, sample
from msds.sampling import SamplingParams
from msds.text.reasoning import Start
from msds.text.tokenizer import Tokenizer
from tests.text import tiny

EOS_ID = 1


@functools.cache
def byte_level() -> GrammarCompiler:
    """`<think>` and `</think>` are control tokens, as in R1's and V3.1's vocabularies."""
    return GrammarCompiler(tiny.byte_level())


@functools.cache
def plain_think() -> GrammarCompiler:
    """The markers are plain text, with tokens that hold a marker's end and more, as in V3's vocabulary."""
    merges = ["t h", "i n", "th in", "thin k", "< /", "> {", '> "', "> Ċ", "< th"]
    json = tiny.byte_level_json(merges)
    json["added_tokens"] = [token for token in json["added_tokens"] if "think" not in token["content"]]
    for number, token in enumerate(json["added_tokens"][2:], start=len(json["model"]["vocab"])):
        token["id"] = number
    return GrammarCompiler(Tokenizer(json, tiny.byte_level_config()))


@dataclass
class Walk:
    """One answer: its ids, its text, and how it ended ("stop", "length", or an error)."""

    ids: list[int]
    text: str
    reason: str


def walk(
    compiler: GrammarCompiler,
    constraint: Constraint,
    *,
    start: Start = Start.CLOSED,
    noise: int = 0,
    steps: int = 400,
    likely: Collection[str] = (),
    **params: Any,
) -> Walk:
    """Sample from random logits until the answer ends. likely: texts whose tokens are helped."""
    tokenizer = compiler._tokenizer
    sampling = SamplingParams(**{"constraint": constraint, "ignore_eos": False, **params})
    size = tokenizer.vocab_size + 3  # the model's vocabulary is padded
    state = SequenceState(
        sampling,
        seed=noise,
        choice=0,
        prompt_ids=[3],
        end_ids=() if sampling.ignore_eos else (EOS_ID,),
        vocab_size=size,
        constraint=compiler.compile(constraint).start(start, hidden=tokenizer.special_ids),
    )
    helped = np.zeros(size, np.float32)
    for text in likely:
        helped[tokenizer.encode(text, bos=False)] = 4
    ends = {*state._all_end_ids}
    rng, ids, reason = np.random.default_rng(noise), list[int](), "length"
    for _ in range(steps):
        logits = rng.standard_normal((1, size)).astype(np.float32) * 2 + helped
        [chosen] = sample(logits, [state], allowed_vocab=tokenizer.vocab_size)
        if chosen.error is not None:
            reason = chosen.error
            break
        ids.append(chosen.token_id)
        state.observe(chosen.token_id)
        if chosen.token_id in ends or state.must_end:
            reason = "stop"
            break
    return Walk(ids, tokenizer.decode(ids), reason)


def started(compiler: GrammarCompiler, constraint: Constraint, start: Start = Start.CLOSED) -> ConstraintState:
    """A state at its beginning."""
    return compiler.compile(constraint).start(start)


def allowed(compiler: GrammarCompiler, state: ConstraintState) -> set[bytes]:
    """The bytes of the tokens that may come next."""
    return {compiler._tokenizer.token_bytes(int(id_)) for id_ in np.flatnonzero(state.mask)}


def feed(compiler: GrammarCompiler, state: ConstraintState, text: str) -> ConstraintState:
    """Accept the tokens of a text, control tokens spelled out, each of which must be allowed."""
    for id_ in compiler._tokenizer.encode(text, bos=False):
        assert state.mask[id_], compiler._tokenizer.token_bytes(id_)
        state.accept(id_)
    return state
