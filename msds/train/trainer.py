"""Supervised training of a checkpoint on conversations: the loop, its log, and a state that resumes bit for bit."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msds.config import max_context
from msds.errors import TrainingError
from msds.model import Model
from msds.train.data import Batches, Example, digest, split_batch
from msds.train.objectives import ObjectiveSettings
from msds.train.optimizer import AdamW, Schedule
from msds.train.save import write_folder
from msds.train.state import (
    check_goes_on,
    check_run_folder,
    digest_of_tree,
    open_log,
    resume_state,
    save_state,
)
from msds.train.step import COMMON_BATCH, Precision, StepReport, TrainStep
from msds_graphs.binding import to_numpy
from msds_graphs.compile import Compiled, compile
from msds_graphs.interrupts import held_back
from msds_graphs.ranks import Ranks
from msds_graphs.trees import tree_map

logger = logging.getLogger("msds")


@dataclass(frozen=True)
class TrainOptions:
    """How long and how fast. lengths: text lengths that batches are padded to, one compiled graph each.

    warmup_steps: None is a tenth of the steps, 100 at most.
    """

    steps: int
    learning_rate: float = 1e-3
    batch_size: int = 64
    accumulation: int = 1
    lengths: tuple[int, ...] = (128,)
    warmup_steps: int | None = None
    decay_steps: int = 0
    seed: int = 0
    save_every: int = 200
    log_every: int = 20

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)}: it must be at least 1")
        check_lengths(self.lengths)
        if self.batch_size % self.accumulation:
            raise TrainingError(f"a batch of {self.batch_size} does not divide into {self.accumulation} micro-batches")
        self.schedule  # noqa: B018  (OptionError for numbers that do not fit together, before any work)

    def micro_batch(self, replicas: int) -> int:
        """Texts per graph call of each of so many replicas; TrainingError where they do not divide."""
        parts = self.accumulation * replicas
        if self.batch_size % parts:
            raise TrainingError(
                f"a batch of {self.batch_size} does not divide into {self.accumulation} micro-batches for each of "
                f"{replicas} processes: make it a multiple of {parts}"
            )
        return self.batch_size // parts

    @property
    def schedule(self) -> Schedule:
        """The learning rate by step."""
        warmup = min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps
        return Schedule(self.learning_rate, self.steps, warmup, self.decay_steps)


def check_lengths(lengths: Sequence[int]) -> None:
    """TrainingError for lengths that no text can be padded to."""
    if not lengths or min(lengths) < 2:
        raise TrainingError(f"lengths are {list(lengths)}: give at least one of at least 2 tokens")


class Trainer:
    """Trains a loaded model, its MTP layers too, in `folder`, which keeps state and log.

    A folder that holds a state goes on from it; TrainingError when it belongs to a run with other options. ranks: this
    process among replicas, which share `folder`: rank 0 writes there. How many there are may change between runs.
    """

    def __init__(
        self,
        model: Model,
        folder: Path,
        options: TrainOptions,
        *,
        objective: ObjectiveSettings | None = None,
        optimizer: AdamW | None = None,
        precision: Precision | None = None,
        teacher: Model | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if max(options.lengths) > max_context(model.config):
            raise TrainingError(
                f"lengths are {list(options.lengths)}, beyond the model's context of {max_context(model.config)}"
            )
        check_run_folder(folder)
        self.model = model
        self.folder = folder
        self.options = options
        self.ranks = ranks or Ranks()
        size = options.micro_batch(self.ranks.plan.dp)
        start = canonical(model)
        self._start = digest_of_tree(start)
        self.step = TrainStep(
            model.config,
            start,
            buckets=[{"S": size, "Q": length} for length in options.lengths],
            objective=objective,
            optimizer=optimizer,
            precision=precision,
            plan=model.plan,
            ranks=ranks,
        )
        self._teacher = None if teacher is None else self._compile_teacher(teacher)
        self.done, self._seen = resume_state(folder, self.step, self._identity())
        self._check_state()
        if self.done:
            logger.info("going on from step %d", self.done)

    @property
    def _writes(self) -> bool:
        return self.ranks.rank == 0

    def _check_state(self) -> None:
        """TrainingError unless all replicas go on from the same step."""
        others = self.step.sum_over_ranks(np.array([self.done], np.float32))[0]
        if others != self.done * self.ranks.plan.ranks:
            raise TrainingError(
                f"rank {self.ranks.rank} goes on from step {self.done} of {self.folder}, other ranks do not: give all "
                "of them the same folder, on several machines a shared one"
            )

    def run(
        self,
        examples: Sequence[Example],
        progress: Callable[[str], None] | None = print,
        *,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train up to options.steps; the state is saved every so many steps, at the end, and on an interrupt.

        stop: asked after each step whether to end now; replicas end together when one of them says so.
        """
        options, schedule = self.options, self.options.schedule
        batches = Batches(examples, sequences=options.batch_size, lengths=options.lengths, seed=options.seed)
        say = progress if progress is not None and self._writes else (lambda line: None)
        texts = digest(one.token_ids for one in examples)
        check_goes_on(self.folder, done=self.done, wanted=options.steps, unit="step", before=self._seen, texts=texts)
        self._seen = texts
        since = self.done
        with open_log(self.folder) if self._writes else Path(os.devnull).open("a", encoding="utf-8") as log:
            if self.done == options.steps:
                say(f"step {self.done}/{options.steps}  nothing is left to train")
                return
            self.step.warm_up(say)
            if self._teacher is not None:
                self._teacher.warm_up(say)
            started, tokens = time.monotonic(), 0
            try:
                while self.done < options.steps:
                    batch = batches[self.done]
                    parts = split_batch(batch, options.accumulation * self.ranks.plan.dp)
                    parts = parts[self.ranks.rank :: self.ranks.plan.dp]
                    if self._teacher is not None:
                        for part in parts:
                            inputs = {name: part[name] for name in COMMON_BATCH}
                            part["teacher_logits"] = self._teacher(inputs)["logits"]
                    with held_back(f"step {self.done + 1}"):  # weights and their number belong together
                        report = self.step(parts, rate=schedule.rate(self.done), step=self.done + 1)
                        self.done += 1
                    tokens += int(batch["query_lens"].sum())
                    if self.done % options.log_every == 0 or self.done == options.steps:
                        seconds = time.monotonic() - started
                        line = self._line(report, tokens / seconds, schedule.rate(self.done - 1))
                        log.write(json.dumps(line) + "\n")
                        log.flush()
                        say(_render(line, options.steps))
                        started, tokens = time.monotonic(), 0
                    if self.done % options.save_every == 0:
                        self.save()
                    if self.step.sum_over_ranks(np.array([stop()], np.float32))[0]:
                        break
            finally:
                if self.done > since:
                    self.save()

    def save(self) -> None:
        """Write the state from which a later run goes on; rank 0 does, for all replicas hold the same."""
        if self._writes:
            save_state(self.folder, self.step, self.done, self._identity(), self._seen)

    def export(self, target: Path, *, dtype: str = "bfloat16") -> Path:
        """The trained weights as a Hugging Face folder, tokenizer included."""
        return write_folder(target, self.model.folder, self.step.params(), self.model.config, dtype=dtype)

    def _compile_teacher(self, teacher: Model) -> Compiled:
        """The teacher's logits for the same batches; TrainingError when its ids mean other tokens."""
        own, other = self.model.tokenizer, teacher.tokenizer
        if teacher.config.vocab_size != self.model.config.vocab_size or (
            own is not None and other is not None and not own.vocabulary.same_tokens(other.vocabulary)
        ):
            raise TrainingError(
                f"{teacher.folder} and {self.model.folder} have different vocabularies: a teacher must share the "
                "student's tokenizer"
            )
        config, plan, forward = teacher.config, teacher.plan, teacher.functions.forward

        def logits(params, state, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            return {"logits": forward(params, batch, config, plan)["logits"]}, state

        buckets = self.step.gradients.buckets
        return compile(logits, bound=teacher.params, batch=COMMON_BATCH, buckets=buckets, outputs=(), name="teacher")

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share; how long and how fast it trains, padding and logging may change."""
        options = asdict(self.options)
        for name in ("steps", "decay_steps", "save_every", "log_every", "learning_rate", "warmup_steps", "lengths"):
            del options[name]
        options["model"] = self._start
        return options | {"objective": repr(self.step.objective), "optimizer": repr(self.step.optimizer)}

    def _line(self, report: StepReport, speed: float, rate: float) -> dict[str, Any]:
        line: dict[str, Any] = {"step": self.done, "rate": rate, "tokens_per_second": round(speed)}
        line |= {name: round(value, 5) for name, value in report.values.items()}
        if report.expert_counts.size:
            loads = report.expert_counts / report.expert_counts.mean(axis=1, keepdims=True)
            line["max_expert_load"] = round(float(loads.max()), 2)
        return line


def canonical(model: Model) -> Any:
    """The canonical tree of a loaded model, without derived leaves, as NumPy arrays of its own."""
    spec = model.functions.spec(model.config, model.dtype)
    return _like(spec, tree_map(lambda leaf: np.array(to_numpy(leaf)), model.params))


def _like(spec: Any, tree: Any) -> Any:
    """The part of a tree that a spec names."""
    if isinstance(spec, Mapping):
        return {key: _like(child, tree[key]) for key, child in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_like(child, part) for child, part in zip(spec, tree, strict=True))
    return tree


def _render(line: Mapping[str, Any], total: int) -> str:
    shown = " ".join(f"{name} {value:.4g}" for name, value in line.items() if name not in ("step", "tokens_per_second"))
    return f"step {line['step']}/{total}  {shown}  {line['tokens_per_second']} tok/s"
