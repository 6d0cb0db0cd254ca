"""A compiled training step: one graph per batch shape that adds up gradients, one that applies them.

Two graphs, because the optimiser takes as long to compile as the model and does not depend on the batch's shape; and
because accumulation, and summing over data-parallel processes, happen between them. Parameters and moments are flat
tuples, since graph mode nests six levels and DeepSeek's trees have five.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops

from msds.config import ModelConfig
from msds.errors import TrainingError
from msds.train.objectives import NextToken, ObjectiveSettings
from msds.train.optimizer import AdamW, adamw_leaf, clip_scale, updated_bias
from msds.train.parallel import HostSums, reducer
from msds_graphs.binding import bind, fresh_prefix, ms_dtype, to_numpy
from msds_graphs.compile import Compiled, compile
from msds_graphs.grad import value_and_grad
from msds_graphs.plan import Plan
from msds_graphs.ranks import Ranks
from msds_graphs.specs import ArraySpec
from msds_graphs.steps import unflatten
from msds_graphs.trees import Tree, tree_flatten, tree_unflatten

Array = npt.NDArray[Any]

COMMON_BATCH = {
    "tokens": ArraySpec(("S", "Q"), "int32"),
    "positions": ArraySpec(("S", "Q"), "int32"),
    "query_lens": ArraySpec(("S",), "int32"),
    "weights": ArraySpec(("S", "Q"), "float32"),
}
_SCALAR = ArraySpec((), "float32")
_CONTROL = dict.fromkeys(("rate", "step", "weight_decay", "max_grad_norm", "bias_update_speed"), _SCALAR)
_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class Precision:
    """Dtypes by role. params: what is stored and updated; compute: what activations and matrix products use.

    Router gates, log-probabilities, losses and moments are float32 whatever this says.
    """

    params: str = "float32"
    compute: str = "float32"

    def casts(self, path: str) -> bool:
        """Whether the parameter at `path` is cast for computing."""
        return self.compute != self.params and ".gate." not in path


@dataclass(frozen=True)
class StepReport:
    """What one step told: named scalars (loss, grad_norm, the objective's parts), and tokens per expert [layers, E]."""

    values: dict[str, float]
    expert_counts: Array = field(repr=False)


class TrainStep:
    """Model, objective and optimiser, compiled.

    params: the canonical tree as NumPy arrays. buckets: shapes (S sequences, Q positions) of batches. `objective` and
    `optimizer` may be replaced by others of their class while training; beta1, beta2 and eps are fixed when compiled.
    ranks: this process among replicas, each of which is given its part of every batch; all hold the same state.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Tree,
        *,
        buckets: Iterable[Mapping[str, int]],
        objective: ObjectiveSettings | None = None,
        optimizer: AdamW | None = None,
        precision: Precision | None = None,
        plan: Plan | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks or Ranks()
        self.sum_over_ranks = HostSums(self.ranks)
        self.objective = objective or NextToken()
        self.optimizer = optimizer or AdamW()
        self.precision = precision or Precision()
        leaves, self.structure = tree_flatten(params)
        self.paths = self.structure.paths()
        biases = [leaf for leaf, path in zip(leaves, self.paths, strict=True) if path.endswith(_BIAS)]
        prefix = fresh_prefix("train")

        def bound(name: str, arrays: Iterable[Array]) -> Tree:
            return bind(tuple(arrays), f"{prefix}.{name}")

        self.state: dict[str, Tree] = {
            "params": bound("params", (np.array(leaf, self.precision.params) for leaf in leaves)),
            "first": bound("first", (np.zeros(leaf.shape, np.float32) for leaf in leaves)),
            "second": bound("second", (np.zeros(leaf.shape, np.float32) for leaf in leaves)),
        }
        self._sums = {
            "grads": bound("grads", (np.zeros(leaf.shape, np.float32) for leaf in leaves)),
            "counts": bound("counts", (np.zeros(leaf.shape, np.float32) for leaf in biases)),
        }
        self.gradients = self._compile_gradients(buckets, plan or Plan())
        self.update = self._compile_update(reducer(self.ranks))

    def params(self) -> Tree:
        """The canonical tree of present values, as NumPy arrays of their own."""
        return tree_unflatten(self.structure, [np.array(to_numpy(leaf)) for leaf in self.state["params"]])

    def warm_up(self, progress: Callable[[str], None] | None = print) -> None:
        """Compile all shapes, printing a table; the state is what it was."""
        for compiled in (self.gradients, self.update):
            compiled.warm_up(progress)

    def __call__(self, micro_batches: Sequence[Mapping[str, Array]], *, rate: float, step: int) -> StepReport:
        """One optimiser step over batches whose `weights` sum to one together; step counts from 1.

        TrainingError when the loss or the gradient is not finite: nothing was updated then.
        """
        totals: dict[str, float] = {}
        counts: list[Array] = []
        for batch in micro_batches:
            out = self.gradients({**batch, **_scalars(self.objective)})
            for name, value in out["parts"].items():
                totals[name] = totals.get(name, 0.0) + float(value)
            counts.append(np.stack(out["counts"]) if out["counts"] else np.zeros((0, 0), np.float32))
        control = {**_scalars(self.optimizer), "rate": _scalar(rate), "step": _scalar(step)}
        norm = self.update({name: control[name] for name in _CONTROL})["grad_norm"]
        names, parts = list(totals), np.sum(counts, axis=0)
        summed = self.sum_over_ranks(np.concatenate([np.array([*totals.values()], np.float32), parts.ravel()]))
        totals = dict(zip(names, summed.tolist(), strict=False))
        totals["grad_norm"] = float(norm)
        if not np.isfinite(list(totals.values())).all():
            raise TrainingError(
                f"step {step} is not finite ({', '.join(f'{name} {value:.4g}' for name, value in totals.items())}): "
                "nothing was updated; lower the learning rate or look at the batch"
            )
        return StepReport(totals, summed[len(names) :].reshape(parts.shape))

    def _compile_gradients(self, buckets: Iterable[Mapping[str, int]], plan: Plan) -> Compiled:
        config = self.config
        objective = self.objective.make(config)
        indices = tree_unflatten(self.structure, range(len(self.paths)))
        compute = ms_dtype(self.precision.compute)
        casts = tuple(self.precision.casts(path) for path in self.paths)

        def loss_of(leaves, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            cast = ()
            for position in range(len(leaves)):
                leaf = leaves[position].astype(compute) if casts[position] else leaves[position]
                cast = (*cast, leaf)  # type: ignore[assignment]
            tree = unflatten(indices, cast)  # type: ignore[no-untyped-call]
            return objective(tree, batch, config, plan)

        loss_and_grad = value_and_grad(loss_of, has_aux=True)

        def gradients(params, sums, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            (loss, parts), grads = loss_and_grad(params, batch)
            scalars = {"loss": loss}
            for name in parts.keys():  # noqa: SIM118  (graph mode iterates over keys() only)
                if name != "counts":
                    scalars[name] = parts[name]
            counts = _with_bias(parts["counts"], sums["counts"])
            sums = {"grads": _added(sums["grads"], grads), "counts": _added(sums["counts"], counts)}
            return {"parts": scalars, "counts": parts["counts"]}, sums

        return compile(
            gradients,
            bound=self.state["params"],
            donated=self._sums,
            batch=COMMON_BATCH | self.objective.extra_batch(config) | dict.fromkeys(_scalars(self.objective), _SCALAR),
            buckets=buckets,
            outputs=(),
            name="gradients",
        )

    def _compile_update(self, reduce: Callable[[Any], Any] | None) -> Compiled:
        settings = self.optimizer
        biases = tuple(position for position, path in enumerate(self.paths) if path.endswith(_BIAS))

        def update(bound, donated, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            state, sums = donated["state"], donated["sums"]
            if reduce is not None:
                sums = reduce(sums)
            grads = sums["grads"]
            scale, norm = clip_scale(grads, batch["max_grad_norm"])
            is_finite = ops.isfinite(norm)
            params, first, second, zeros = (), (), (), ()
            for position in range(len(grads)):
                leaf, moments = state["params"][position], (state["first"][position], state["second"][position])
                if position in biases:
                    counts = sums["counts"][biases.index(position)]
                    new = (updated_bias(leaf, counts, batch["bias_update_speed"]), *moments)
                else:
                    new = adamw_leaf(settings, leaf, grads[position] * scale, moments, batch)
                params = (*params, ops.where(is_finite, new[0], leaf))  # type: ignore[assignment]
                first = (*first, ops.where(is_finite, new[1], moments[0]))  # type: ignore[assignment]
                second = (*second, ops.where(is_finite, new[2], moments[1]))  # type: ignore[assignment]
                zeros = (*zeros, ops.zeros_like(grads[position]))  # type: ignore[assignment]
            sums = {"grads": zeros, "counts": _zeros(sums["counts"])}
            return {"grad_norm": norm}, {"state": {"params": params, "first": first, "second": second}, "sums": sums}

        return compile(
            update,
            bound=(),
            donated={"state": self.state, "sums": self._sums},
            batch=_CONTROL,
            outputs=(),
            name="update",
        )


def _scalars(settings: Any) -> dict[str, Array]:
    return {one.name: _scalar(getattr(settings, one.name)) for one in fields(settings)}


def _scalar(value: float) -> Array:
    return np.asarray(value, np.float32)


def _with_bias(counts: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The counts that the bias rule needs: all, or none where the model's routers have no bias."""
    return counts if len(kept) > 0 else ()


def _added(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    total: tuple[Tensor, ...] = ()
    for position in range(len(one)):
        total = (*total, one[position] + other[position])
    return total


def _zeros(leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = ()
    for leaf in leaves:
        result = (*result, ops.zeros_like(leaf))
    return result
