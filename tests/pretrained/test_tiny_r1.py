"""The shipped model: what its card claims, on a sample, and that other software reads it alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msds
from msds import SamplingParams
from msds.config import read_config
from msds.engine.sequence import Output
from msds.models.specs import tree_bytes
from msds.models.specs.deepseek import spec
from msds.text.reasoning import Start
from msds.train.evaluate import answered_rightly
from msds.train.tiny_r1.problems import KINDS, generate_problems
from msds.train.tiny_r1.recipe import CONFIG
from msds.train.verifiable import Task, is_correct, split_reply
from tests.engine.drafting import Always

SEED = 20261130
"""No training used it; held-out operands were never trained on under any seed."""

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "progress": False}


@pytest.fixture(scope="module")
def llm() -> msds.LLM:
    return msds.LLM(msds.DEFAULT_MODEL, **OPTIONS)


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    problems = generate_problems(20 * len(KINDS), seed=SEED, held_out=True)
    return [Task(tuple(problem.messages[:1]), problem.answer, problem.kind) for problem in problems]


@pytest.fixture(scope="module")
def greedy(llm: msds.LLM, tasks: list[Task]) -> list[Output]:
    return answer(llm, tasks)


def is_right(task: Task, output: Output) -> bool:
    return is_correct(task, split_reply(output.text, Start.OPEN).content)


def answer(llm: msds.LLM, tasks: list[Task]) -> list[Output]:
    return llm.chat([list(task.prompt) for task in tasks], SamplingParams(temperature=0, max_tokens=128))


def test_it_is_the_recipe_s_model_in_bfloat16() -> None:
    stored = json.loads((msds.DEFAULT_MODEL / "config.json").read_text(encoding="utf-8"))
    assert stored == CONFIG | {"torch_dtype": "bfloat16"}
    parameters = tree_bytes(spec(read_config(msds.DEFAULT_MODEL))) // 4
    assert 1e6 < parameters < 3e6
    assert sum(file.stat().st_size for file in msds.DEFAULT_MODEL.iterdir()) < 6 << 20


def test_nine_of_ten_held_out_problems_are_answered_rightly(greedy: list[Output], tasks: list[Task]) -> None:
    wrong = [
        (task.prompt, output.text) for task, output in zip(tasks, greedy, strict=True) if not is_right(task, output)
    ]
    assert len(wrong) <= 0.1 * len(tasks), wrong


def test_three_of_four_drafts_are_kept_and_change_nothing(greedy: list[Output], tasks: list[Task]) -> None:
    """One draft of the MTP layer per token, against greedy decoding."""
    llm = msds.LLM(msds.DEFAULT_MODEL, num_speculative_tokens=1, **OPTIONS)
    llm.engine._speculation = Always(1)
    drafted = answer(llm, tasks[:24])
    assert [output.token_ids for output in drafted] == [output.token_ids for output in greedy[:24]]
    stats = llm.engine.speculation
    assert stats is not None
    assert stats.drafted[0] > 200
    assert stats.accepted[0] >= 0.75 * stats.drafted[0]


def test_the_reasoning_is_used(llm: msds.LLM, tasks: list[Task]) -> None:
    """The same questions with the thinking closed at once."""
    hits = answered_rightly(llm, tasks, max_tokens=32, reasoning=False)
    assert sum(hits) <= 0.7 * len(hits)


def test_transformers_gives_the_same_logits_and_the_same_prompt_ids(llm: msds.LLM, tasks: list[Task]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(msds.DEFAULT_MODEL, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(msds.DEFAULT_MODEL)
    for task in tasks[: len(KINDS)]:
        ids = llm.model.chat.encode(list(task.prompt))
        rendered = tokenizer.apply_chat_template(list(task.prompt), add_generation_prompt=True, return_dict=True)
        assert list(rendered["input_ids"]) == list(ids)
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(llm.model.logits(ids), expected, atol=1e-4 * np.abs(expected).max())


def test_a_command_without_a_model_answers_with_it(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    from msds_serve.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--chat", "What is 47 + 85?", "--max-model-len", "256", "--json"]) == 0
    assert "The answer is 132." in json.loads(capsys.readouterr().out)["outputs"][0]["text"]
