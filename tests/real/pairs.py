"""One real model, run by msds and by transformers on the same weights, prompts and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import msds
from tests.real.fetch import RealModel

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "中国的首都是哪里？",
    "请用一句话介绍大海。",
)
MAX_TOKENS = 24
COMPARED = 64
"""Tokens of each text whose logits are compared with the definition's: one compiled shape. The served
log-probabilities cover the rest."""


@dataclass(frozen=True)
class Answer:
    """prompt_ids, token_ids: end token included. logprobs: of the chosen tokens, [len(token_ids)]. logits: of the
    prompt and the tokens that the reference chose, cut to COMPARED, [T, vocab] float32, teacher-forced."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: npt.NDArray[np.float64]
    logits: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Pair:
    """Answers to PROMPTS, in that order."""

    model: RealModel
    ours: tuple[Answer, ...]
    reference: tuple[Answer, ...]


def compare(model: RealModel, folder: Path) -> Pair:
    """Runs both, one after the other, so that their weights are not in memory together."""
    reference = _run_transformers(folder)
    return Pair(model, _run_msds(folder, reference), reference)


def _conversation(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _run_transformers(folder: Path) -> tuple[Answer, ...]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # a second thread waits a scheduler slice per product when the machine is shared
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    with torch.no_grad():
        for prompt in PROMPTS:
            inputs = tokenizer.apply_chat_template(
                _conversation(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            everything = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
            prompt_ids = inputs["input_ids"][0].tolist()
            token_ids = everything[0, len(prompt_ids) :].tolist()
            logits = model(everything).logits[0].numpy()
            text = tokenizer.decode(token_ids, skip_special_tokens=True)
            logprobs = _chosen_logprobs(logits, prompt_ids, token_ids)
            answers.append(Answer(tuple(prompt_ids), tuple(token_ids), text, logprobs, logits[:COMPARED]))
    return tuple(answers)


def _chosen_logprobs(logits: Any, prompt_ids: list[int], token_ids: list[int]) -> npt.NDArray[np.float64]:
    rows = logits[len(prompt_ids) - 1 : -1].astype(np.float64)
    rows = rows - rows.max(-1, keepdims=True)
    rows = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    chosen: npt.NDArray[np.float64] = rows[np.arange(len(token_ids)), token_ids]
    return chosen


def _run_msds(folder: Path, reference: tuple[Answer, ...]) -> tuple[Answer, ...]:
    llm = msds.LLM(folder, max_model_len=128, max_num_seqs=len(PROMPTS), prefill_chunk=64, threads=1, progress=False)
    sampling = msds.SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)
    conversations = [_conversation(prompt) for prompt in PROMPTS]
    answers = []
    for conversation, output, theirs in zip(conversations, llm.chat(conversations, sampling), reference, strict=True):
        assert output.logprobs is not None
        logprobs = np.array([entry.logprob for entry in output.logprobs])
        logits = llm.model.logits((theirs.prompt_ids + theirs.token_ids)[:COMPARED])
        prompt_ids = tuple(llm.model.chat.encode(conversation))
        answers.append(Answer(prompt_ids, output.token_ids, output.text, logprobs, logits))
    return tuple(answers)
