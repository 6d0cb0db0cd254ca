"""Runs: what an interrupt leaves, going on bit for bit, what is exported, distillation, GRPO end to end."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msds
from msds.errors import CheckpointError, MsdsError, TrainingError
from msds.train.grpo import GrpoOptions, Reinforcer
from msds.train.objectives import Distillation, Grpo, NextToken
from msds.train.optimizer import AdamW, Schedule
from msds.train.save import write_folder
from msds.train.state import LOG_NAME, STATE_NAME, open_log, read_state
from msds.train.trainer import Trainer, TrainOptions, canonical
from msds.train.verifiable import Reply, Task
from msds_graphs.counter import compile_count
from msds_graphs.trees import tree_flatten, tree_map
from tests.train.conftest import random_examples

OPTIONS = TrainOptions(
    steps=4, learning_rate=1e-3, batch_size=4, lengths=(12,), warmup_steps=2, seed=3, save_every=2, log_every=1
)
EXAMPLES = random_examples(24, seed=5, vocab=300)


def leaves_of(trainer: Any) -> list[Any]:
    return [np.array(leaf) for leaf in tree_flatten(trainer.step.params())[0]]


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("llama_base", tokenizer=True)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path, list[Any]]:
    """A run of four steps: its trainer, a copy of its folder as it was after two, and its weights."""
    root = tmp_path_factory.mktemp("runs")
    trainer = Trainer(msds.load(folder, progress=False), root / "whole", OPTIONS)
    trainer.options = replace(OPTIONS, steps=2)
    trainer.run(EXAMPLES, None)
    shutil.copytree(root / "whole", root / "half")
    trainer.options = OPTIONS
    trainer.run(EXAMPLES, None)
    return trainer, root / "half", leaves_of(trainer)


def test_a_run_goes_on_bit_for_bit(folder: Path, whole: Any) -> None:
    trainer, half, weights = whole
    start = [np.array(leaf) for leaf in tree_flatten(msds.load(folder, progress=False).params)[0]]
    assert any(not np.array_equal(a, b) for a, b in zip(start, weights, strict=True))
    resumed = Trainer(msds.load(folder, progress=False), half, OPTIONS)
    assert resumed.done == 2
    assert any(not np.array_equal(a, b) for a, b in zip(leaves_of(resumed), weights, strict=True))
    resumed.run(EXAMPLES, None)
    for ours, theirs in zip(leaves_of(resumed), weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for part in ("first", "second"):
        for ours, theirs in zip(resumed.step.state[part], trainer.step.state[part], strict=True):
            np.testing.assert_array_equal(ours.asnumpy(), theirs.asnumpy())
    log = [json.loads(line) for line in (half / LOG_NAME).read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    assert {"loss", "cross_entropy", "grad_norm", "rate", "tokens_per_second"} <= log[0].keys()


def test_an_interrupt_saves_what_was_done(whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, _ = whole
    step = trainer.step

    class Interrupted:
        def __call__(self, *batches: Any, **control: Any) -> Any:
            if control["step"] == 2:
                raise KeyboardInterrupt
            return step(*batches, **control)

        def __getattr__(self, name: str) -> Any:
            return getattr(step, name)

    monkeypatch.setattr(trainer, "step", Interrupted())
    monkeypatch.setattr(trainer, "folder", tmp_path)
    monkeypatch.setattr(trainer, "done", 0)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(EXAMPLES, None)
    _, record = read_state(tmp_path / STATE_NAME)
    assert record["done"] == 1
    assert not list(tmp_path.glob(".*partial"))


def test_a_state_of_another_run_is_refused(
    folder: Path, whole: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, half, _ = whole
    monkeypatch.setattr(Trainer, "save", lambda self: None)
    with pytest.raises(TrainingError, match=r"seed was \d, now 4\): use the same options and model, or another folder"):
        Trainer(msds.load(folder, progress=False), half, replace(OPTIONS, seed=4))
    other = msds.load(tiny("llama_base", tokenizer=True, seed=9), progress=False)
    with pytest.raises(TrainingError, match=r"\(model was .* now .*\): use the same options and model"):
        Trainer(other, half, OPTIONS)
    again = Trainer(msds.load(folder, progress=False), half, replace(OPTIONS, steps=1, warmup_steps=0))
    with pytest.raises(TrainingError, match=r"half is at step \d already, beyond 1"):
        again.run(EXAMPLES, None)
    again.options = OPTIONS
    with pytest.raises(TrainingError, match="was trained on other texts"):
        again.run(EXAMPLES[1:], None)
    with open_log(half), pytest.raises(TrainingError, match="another process trains in"):
        again.run(EXAMPLES, None)
    (half / STATE_NAME).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="is not a state of a training run"):
        Trainer(msds.load(folder, progress=False), half, OPTIONS)


def test_the_export_serves_the_trained_weights(whole: Any, tmp_path: Path) -> None:
    trainer, _, _ = whole
    params = tree_flatten(trainer.step.params())[0]
    target = trainer.export(tmp_path / "out", dtype="float32")
    assert {file.name for file in target.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    served = msds.load(target, progress=False)
    for ours, theirs in zip(tree_flatten(served.params)[0], params, strict=True):
        np.testing.assert_array_equal(ours.asnumpy(), theirs)
    with pytest.raises(CheckpointError, match="not an empty folder"):
        trainer.export(target)
    broken = tree_map(np.array, trainer.step.params())
    broken["norm"]["weight"][3] = np.nan
    with pytest.raises(CheckpointError, match=r"norm.weight has values that are not finite"):
        write_folder(tmp_path / "broken", folder, broken, trainer.model.config)
    assert not (tmp_path / "broken").exists()


def test_an_export_keeps_what_describes_the_model(tiny: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny("llama_base", tokenizer=True), source)
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "fp8"}}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    model = msds.load(tiny("llama_base"), progress=False)
    target = write_folder(tmp_path / "target", source, canonical(model), model.config)
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_a_run_that_cannot_be_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    model = msds.load(folder, progress=False)
    with pytest.raises(TrainingError, match=r"lengths are \[24, 99999\], beyond the model's context"):
        Trainer(model, tmp_path / "run", replace(OPTIONS, lengths=(24, 99999)))
    (tmp_path / "file").write_text("x")
    with pytest.raises(TrainingError, match="file is a file"):
        Trainer(model, tmp_path / "file", OPTIONS)


def test_distillation_moves_towards_the_teacher(folder: Path, tiny: Any, tmp_path: Path) -> None:
    student = msds.load(folder, progress=False)
    teacher = msds.load(tiny("llama_base", tokenizer=True, seed=1), progress=False)
    options = replace(OPTIONS, steps=8, learning_rate=3e-3, warmup_steps=0)
    trainer = Trainer(student, tmp_path / "run", options, objective=Distillation(), teacher=teacher)
    trainer.run(EXAMPLES[:4], None)
    log = [json.loads(line) for line in (tmp_path / "run" / LOG_NAME).read_text().splitlines()]
    assert log[-1]["kl"] < 0.6 * log[0]["kl"]
    assert log[0]["loss"] == pytest.approx(log[0]["kl"], rel=1e-3)


def test_grpo_learns_what_is_rewarded(folder: Path, tmp_path: Path) -> None:
    """Reward: how many of an answer's tokens are even. Rollouts use new weights without a compilation."""
    options = GrpoOptions(
        rounds=6,
        tasks_per_round=2,
        group_size=8,
        micro_batch=8,
        learning_rate=3e-3,
        max_tokens=6,
        lengths=(24,),
        save_every=100,
    )
    tasks = [Task(({"role": "user", "content": text},), "", "all") for text in ("a", "b", "c")]
    llm = msds.LLM(folder, max_num_seqs=8, max_model_len=32, progress=False)
    tokenizer = llm.model.tokenizer
    assert tokenizer is not None

    def reward(task: Task, reply: Reply) -> float:
        ids = tokenizer.encode_plain(reply.text)
        return sum(one % 2 == 0 for one in ids) / max(len(ids), 1)

    policy = msds.load(folder, progress=False)
    run = Reinforcer(llm, policy, tmp_path / "run", options, objective=Grpo(kl_weight=0.0), reward=reward)
    run.options = replace(options, rounds=1)
    run.run(tasks, None)
    compiled = compile_count()
    run.options = options
    run.run(tasks, None)
    assert compile_count() == compiled
    log = [json.loads(line) for line in (tmp_path / "run" / LOG_NAME).read_text().splitlines()]
    assert [line["round"] for line in log] == [1, 2, 3, 4, 5, 6]
    assert np.mean([line["reward"] for line in log[-2:]]) > np.mean([line["reward"] for line in log[:2]]) + 0.1
    # what the engine said of its tokens is what the training graph says of them: the ratio starts at 1
    assert abs(log[0]["loss"]) < 1e-3
    assert log[0]["clipped"] == 0

    def failing(rows: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no memory")

    run.options = replace(options, rounds=7)
    with pytest.raises(TrainingError, match="1 tasks do not fill a round of 2"):
        run.run(tasks[:1], None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner, "prefill", failing)
        with pytest.raises(TrainingError, match=r"a task: an answer of round 7 failed: .*no memory"):
            run.run(tasks, None)
    long = [*tasks, Task(({"role": "user", "content": "word " * 9},), "", "all", "x.jsonl, line 4")]
    with pytest.raises(TrainingError, match=r"x.jsonl, line 4 has a prompt of \d+ tokens, but .* leave room for 18"):
        run.run(long, None)


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": math.nan}, {"learning_rate": -1.0}, {"temperature": math.inf}, {"lengths": ()}]
)
def test_numbers_that_would_ruin_a_policy_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MsdsError, match=r"learning rate|temperature|lengths"):
        GrpoOptions(rounds=1, **wrong)


def test_the_schedule_rises_stays_and_falls() -> None:
    schedule = Schedule(peak=1.0, total_steps=100, warmup_steps=10, decay_steps=20, final=0.1)
    assert schedule.rate(0) == pytest.approx(0.1)
    assert schedule.rate(9) == schedule.rate(79) == 1.0
    assert schedule.rate(89) == pytest.approx(0.55)
    assert schedule.rate(99) == pytest.approx(0.1)
    assert Schedule(peak=1.0, total_steps=3).rate(2) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(peak=0.0, total_steps=1), "learning rate is 0"),
        (lambda: Schedule(peak=1.0, total_steps=5, warmup_steps=4, decay_steps=2), "do not fit into 5 steps"),
        (lambda: AdamW(beta2=1.0), "beta2 is 1"),
        (lambda: AdamW(max_grad_norm=0.0), "max_grad_norm is 0"),
        (lambda: NextToken(mtp_weight=-1), "mtp_weight is -1"),
        (lambda: Distillation(temperature=0), "temperature is 0"),
        (lambda: TrainOptions(steps=0), "steps is 0"),
        (lambda: TrainOptions(steps=1, batch_size=5, accumulation=2), "does not divide into 2"),
        (lambda: GrpoOptions(rounds=1, group_size=1), "at least 2 answers"),
        (lambda: GrpoOptions(rounds=1, temperature=0.0), "temperature is 0"),
        (lambda: GrpoOptions(rounds=1, micro_batch=7), "do not divide into micro-batches of 7"),
    ],
)
def test_options_that_make_no_sense_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(MsdsError, match=message):
        make()
