"""A Runner on several processes: rank 0's engine schedules and samples, all ranks make the same device calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from msds.engine.batch import Batch
from msds.engine.runner import Runner
from msds.launch.team import Follower, Leader
from msds.launch.wire import Arrays
from msds.models.specs.placement import ExpertPlacement
from msds_graphs.trees import Tree, tree_unflatten

if TYPE_CHECKING:
    from msds_graphs.compile import Compiled


class LeadingRunner(Runner):
    """Rank 0's runner: whatever it has computed, the others compute too, in the same order."""

    def __init__(self, *arguments: Any, team: Leader, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._team = team
        for attribute, step in _steps(self).items():  # all of them: one that stayed behind would stop every rank
            setattr(self, attribute, _LedStep(step, team))

    def warm_up(self, progress: Callable[[str], None] | None = print) -> None:
        """As `Runner.warm_up`, on all ranks."""

        def say(line: str) -> None:
            self._team.progress()
            if progress is not None:
                progress(line)

        with self._team.call("warm-up", "warm_up"):
            super().warm_up(say)

    def update_weights(self, tree: Tree) -> None:
        """As `Runner.update_weights`, on all ranks. What is wrong with the tree is said before any of them hears."""
        leaves, structure = self.model.checked_weights(tree)
        with self._team.call("new weights", "update_weights", arrays=dict(zip(structure.paths(), leaves, strict=True))):
            super().update_weights(tree)

    def place_experts(self, placements: Sequence[ExpertPlacement]) -> None:
        """As `Runner.place_experts`, on all ranks, each of which sends and takes what it is to."""
        slots = np.array([placement.slots for placement in placements], np.int32)  # [layers, ranks of ep, slots]
        with self._team.call("moving experts", "place_experts", arrays={"slots": slots}):
            super().place_experts(placements)


class _LedStep:
    """A compiled step of rank 0 that tells the others before it runs."""

    def __init__(self, step: Compiled, team: Leader) -> None:
        self._step = step
        self._team = team

    def __call__(self, batch: Batch) -> Tree:
        name = self._step.name
        with self._team.call(f"step {name}", "step", {"name": name}, batch):
            return self._step(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def follow(runner: Runner, team: Follower) -> None:
    """Make the device calls that rank 0 makes, until it says stop. What they return is rank 0's to look at."""
    structure = runner.model.weight_structure()

    def step(fields: Mapping[str, Any], arrays: Arrays) -> None:
        runner.steps[fields["name"]].tensors(dict(arrays))

    def warm_up(fields: Mapping[str, Any], arrays: Arrays) -> None:
        runner.warm_up(lambda line: team.progress())

    def update_weights(fields: Mapping[str, Any], arrays: Arrays) -> None:
        runner.update_weights(tree_unflatten(structure, [arrays[path] for path in structure.paths()]))

    def place_experts(fields: Mapping[str, Any], arrays: Arrays) -> None:
        pairs = zip(runner.model.placements, arrays["slots"].tolist(), strict=True)
        runner.place_experts([ExpertPlacement(old.num_experts, tuple(map(tuple, rows))) for old, rows in pairs])

    team.serve({"step": step, "warm_up": warm_up, "update_weights": update_weights, "place_experts": place_experts})


def _steps(runner: Runner) -> dict[str, Any]:
    """Every compiled step of a runner, by attribute."""
    from msds_graphs.compile import Compiled

    return {attribute: value for attribute, value in vars(runner).items() if isinstance(value, Compiled)}
