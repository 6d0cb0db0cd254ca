"""GRPO: answers are sampled by the engine that serves, judged, and the policy moves towards the better ones.

Rollouts and training share nothing but weights: each round puts the trained tree into the engine's compiled steps
(`LLM.update_weights`, no compilation), samples a group of answers per task, and takes one optimiser step on them.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msds.engine.sequence import Output
from msds.errors import TrainingError
from msds.llm import LLM
from msds.model import Model
from msds.sampling import SamplingParams
from msds.train.data import Example, build_batch, digest, split_batch
from msds.train.objectives import Grpo, plain_logprobs
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
from msds.train.step import COMMON_BATCH, TrainStep
from msds.train.trainer import canonical, check_lengths
from msds.train.verifiable import Reply, Task, is_correct, split_reply
from msds_graphs.binding import bind, fresh_prefix
from msds_graphs.compile import compile
from msds_graphs.interrupts import held_back

Array = npt.NDArray[Any]
Reward = Callable[[Task, Reply], float]


@dataclass(frozen=True)
class GrpoOptions:
    """tasks_per_round groups of group_size answers make one optimiser step, in micro-batches of micro_batch texts.

    max_tokens: of an answer; one that is cut there is judged as it stands. lengths: as in `TrainOptions`.
    """

    rounds: int
    tasks_per_round: int = 16
    group_size: int = 8
    micro_batch: int = 64
    learning_rate: float = 1e-4
    temperature: float = 1.0
    max_tokens: int = 96
    lengths: tuple[int, ...] = (128,)
    seed: int = 0
    save_every: int = 10

    def __post_init__(self) -> None:
        for name in ("rounds", "tasks_per_round", "micro_batch", "max_tokens", "save_every"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.group_size < 2:
            raise TrainingError(f"group_size is {self.group_size}: advantages within a group need at least 2 answers")
        if not 0 < self.temperature < math.inf:
            raise TrainingError(f"temperature is {self.temperature}: answers of a group must differ, so it is above 0")
        Schedule(self.learning_rate, self.rounds)  # OptionError for a rate that is none
        check_lengths(self.lengths)
        answers = self.tasks_per_round * self.group_size
        if answers % self.micro_batch:
            raise TrainingError(f"{answers} answers a round do not divide into micro-batches of {self.micro_batch}")


def group_advantages(rewards: Array) -> Array:
    """(r - mean) / std within each group: [P, G] -> [P, G] float32 (DeepSeekMath, section 4.1.2).

    A group whose rewards are all equal says nothing: its advantages are 0.
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    spread = rewards.std(axis=1, keepdims=True)
    return np.where(spread > 1e-9, centred / np.maximum(spread, 1e-9), 0.0).astype(np.float32)


def right_answer(task: Task, reply: Reply) -> float:
    """The reward of DeepSeek-R1-Zero's accuracy part: 1 for a right final answer, 0 otherwise."""
    return float(is_correct(task, reply.content))


class Reinforcer:
    """Reinforces a model on tasks, keeping state and log in `folder`; goes on from a state that it finds there."""

    def __init__(
        self,
        llm: LLM,
        policy: Model,
        folder: Path,
        options: GrpoOptions,
        *,
        objective: Grpo | None = None,
        optimizer: AdamW | None = None,
        reward: Reward = right_answer,
    ) -> None:
        check_run_folder(folder)
        self.llm = llm
        self.policy = policy
        self.folder = folder
        self.options = options
        self.reward = reward
        start = canonical(policy)
        shapes = [{"S": options.micro_batch, "Q": length} for length in options.lengths]
        self.step = TrainStep(
            policy.config,
            start,
            buckets=shapes,
            objective=objective or Grpo(),
            optimizer=optimizer or AdamW(weight_decay=0.0),
            plan=policy.plan,
        )
        self._reference = compile(
            plain_logprobs(policy.config, policy.plan),
            bound=bind(start, fresh_prefix("reference")),
            batch=COMMON_BATCH,
            buckets=shapes,
            outputs=(),
            name="reference",
        )
        self._start = digest_of_tree(start)
        self.done, self._seen = resume_state(folder, self.step, self._identity())

    def run(self, tasks: Sequence[Task], progress: Callable[[str], None] | None = print) -> None:
        """Rounds up to options.rounds; the state is saved every so many rounds, at the end, and on an interrupt."""
        say, since = progress or (lambda line: None), self.done
        if len(tasks) < self.options.tasks_per_round:
            raise TrainingError(
                f"{len(tasks)} tasks do not fill a round of {self.options.tasks_per_round}: lower tasks_per_round"
            )
        prompts = self._prompts(tasks)
        texts = digest(prompts)
        check_goes_on(
            self.folder, done=self.done, wanted=self.options.rounds, unit="round", before=self._seen, texts=texts
        )
        self._seen = texts
        prompted = list(zip(tasks, prompts, strict=True))
        with open_log(self.folder) as log:
            if self.done == self.options.rounds:
                say(f"round {self.done}/{self.options.rounds}  nothing is left to train")
                return
            for compiled in (self.llm.engine.runner, self.step, self._reference):
                compiled.warm_up(say)
            try:
                while self.done < self.options.rounds:
                    line = self._round(*self._pick(prompted))
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    shown = " ".join(f"{name} {value:.4g}" for name, value in line.items() if name != "round")
                    say(f"round {line['round']}/{self.options.rounds}  {shown}")
                    if self.done % self.options.save_every == 0:
                        self.save()
            finally:
                if self.done > since:
                    self.save()

    def save(self) -> None:
        """Write the state from which a later run goes on."""
        save_state(self.folder, self.step, self.done, self._identity(), self._seen)

    def export(self, target: Path, *, dtype: str = "bfloat16") -> Path:
        """The reinforced weights as a Hugging Face folder, tokenizer included."""
        return write_folder(target, self.policy.folder, self.step.params(), self.policy.config, dtype=dtype)

    def _pick(self, prompted: list[tuple[Task, list[int]]]) -> tuple[list[Task], list[list[int]]]:
        """Tasks and prompts of this round, the same in a resumed run."""
        picked = random.Random(f"{self.options.seed}:{self.done}").sample(prompted, self.options.tasks_per_round)
        return [task for task, _ in picked], [prompt for _, prompt in picked]

    def _round(self, tasks: Sequence[Task], prompts: Sequence[list[int]]) -> dict[str, Any]:
        options, started = self.options, time.monotonic()
        self.llm.update_weights(canonical_of_main(self.llm, self.step.params()))
        outputs = self.llm.generate(prompts, [self._sampling(index) for index in range(len(tasks))])
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None:
            where = tasks[failed.prompt_index].where
            raise TrainingError(f"{where}: an answer of round {self.done + 1} failed: {failed.error}")
        sampled = time.monotonic()
        starts = [self.llm.model.chat.start_of_answer(prompt) for prompt in prompts]
        rewards = np.array(
            [
                self.reward(tasks[output.prompt_index], split_reply(output.text, starts[output.prompt_index]))
                for output in outputs
            ],
            np.float32,
        ).reshape(len(tasks), options.group_size)
        batch = self._batch(prompts, outputs, rewards)
        parts = split_batch(batch, len(outputs) // options.micro_batch)
        for part in parts:
            part["ref_logprobs"] = self._reference({name: part[name] for name in COMMON_BATCH})["logprobs"]
        with held_back(f"round {self.done + 1}"):  # weights and their number belong together
            report = self.step(parts, rate=options.learning_rate, step=self.done + 1)
            self.done += 1
        lengths = [len(output.token_ids) for output in outputs]
        return {
            "round": self.done,
            "reward": round(float(rewards.mean()), 4),
            "mixed_groups": round(float((rewards.std(axis=1) > 0).mean()), 4),
            "answer_tokens": round(float(np.mean(lengths)), 1),
            **{name: round(value, 6) for name, value in report.values.items()},
            "sampling_seconds": round(sampled - started, 2),
            "training_seconds": round(time.monotonic() - sampled, 2),
        }

    def _prompts(self, tasks: Sequence[Task]) -> list[list[int]]:
        """All prompts; TrainingError for the first that leaves no room for an answer."""
        most = max(self.options.lengths) - self.options.max_tokens
        prompts = [self.llm.model.chat.encode(task.prompt) for task in tasks]
        for task, prompt in zip(tasks, prompts, strict=True):
            if len(prompt) > most:
                raise TrainingError(
                    f"{task.where} has a prompt of {len(prompt)} tokens, but lengths {list(self.options.lengths)} and "
                    f"max_tokens {self.options.max_tokens} leave room for {most}: raise lengths, lower max_tokens, or "
                    "leave the task out"
                )
        return prompts

    def _sampling(self, index: int) -> SamplingParams:
        """Of task `index` in this round: one seed for all tasks would draw the same numbers in each."""
        options = self.options
        return SamplingParams(
            n=options.group_size,
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            seed=(options.seed * 1_000_003 + self.done) * 10_007 + index,
            logprobs=0,
        )

    def _batch(self, prompts: Sequence[list[int]], outputs: Sequence[Output], rewards: Array) -> dict[str, Array]:
        """Weights 1 / (P G |o|) on the answers' tokens, and what the policy said of them when it wrote them."""
        examples = [
            Example((*prompts[output.prompt_index], *output.token_ids), len(prompts[output.prompt_index]))
            for output in outputs
        ]
        batch = build_batch(examples, self.options.lengths)
        batch["advantages"] = group_advantages(rewards).reshape(-1)
        batch["old_logprobs"] = np.zeros_like(batch["weights"])
        for row, (example, output) in enumerate(zip(examples, outputs, strict=True)):
            answer = slice(example.num_prompt, len(example.token_ids))
            assert output.logprobs is not None
            batch["old_logprobs"][row, answer] = [one.logprob for one in output.logprobs]
            batch["weights"][row] = 0.0
            batch["weights"][row, answer] = 1.0 / (len(outputs) * len(output.token_ids))
        return batch

    def _identity(self) -> dict[str, Any]:
        options = asdict(self.options)
        for name in ("rounds", "save_every"):
            del options[name]
        options["lengths"] = list(options["lengths"])
        options["model"] = self._start
        return options | {"objective": repr(self.step.objective), "optimizer": repr(self.step.optimizer)}


def canonical_of_main(llm: LLM, tree: Any) -> Any:
    """A trained tree as the serving model takes it: without MTP layers where it was loaded without them."""
    spec = llm.model.functions.spec(llm.model.config, llm.model.dtype)
    return {**tree, "mtp": ()} if "mtp" in spec and not spec["mtp"] else tree
