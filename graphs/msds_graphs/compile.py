"""compile: a pure function over trees becomes one static graph per bucket. The only place with `ms.jit`."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from msds_graphs.batch import BatchLayout, unpad
from msds_graphs.binding import assign, bind, fresh_prefix, to_numpy, to_tensor, wait
from msds_graphs.buckets import Bucket, choose_bucket, unique_buckets, worst_waste
from msds_graphs.errors import GraphError
from msds_graphs.faults import explain
from msds_graphs.functions import prepare
from msds_graphs.interrupts import held_back
from msds_graphs.results import Result, read_result
from msds_graphs.steps import make_step
from msds_graphs.trees import Tree, at, tree_flatten, tree_map, tree_structure, tree_unflatten

_NUMBERS = itertools.count(1)

GRAPH_CALL_DEPTH = 20_000
"""MindSpore's own limit of 1,000 is reached by loops over a hundred leaves: each turn is a call inside the last."""


def compile(
    fn: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    *,
    bound: Tree,
    batch: Tree,
    donated: Tree = (),
    buckets: Iterable[Mapping[str, int]] | None = None,
    outputs: Tree = None,
    pad: Tree = 0,
    name: str | None = None,
    in_place: bool = False,
) -> Compiled:
    """One graph per bucket for `fn(bound, donated, batch) -> (outputs, donated)`, compiled on first use.

    bound: weights, read only; donated: state that the step replaces (caches, optimiser moments). Both are
    trees of arrays or ArraySpecs, which are bound here, or of Parameters from `bind`, which are shared with
    every other step that was given them: steps see each other's writes.

    batch: tree of ArraySpec (symbolic dims are strings) or example arrays: what each call passes.
    buckets: sizes of the symbolic dims, needed when there are any. pad: fill values for padding, a prefix of
    the batch tree; padded entries reach the function, so they must be legal (an index into block 0, not -1).
    outputs: for each output the names of its axes, as a prefix of the output tree, e.g.
    {"logits": ("S", None, None)}: named axes are cut back to the call's sizes. Required with symbolic dims;
    () where an output, or all of them, carry no padding.

    in_place: False: the returned donated tree is assigned to the Parameters, which is right for any function
    and costs a copy. True: the function promises that it wrote each donated leaf with in-place operations and
    returns the result of the last one; nothing is copied, and what it returns is not looked at. In such a
    function the old name sees the new data, so it must write first and read only the returned value;
    `Compiled.check_in_place` tests the promise.

    What is closed over, a partial's arguments included, is static: numbers, strings, frozen dataclasses.
    Closed-over arrays, functions without source, named tuples and mismatching trees raise GraphError here or
    when the first bucket compiles.
    """
    # Nine parameters: one call states the whole contract of a step, everything but the function by keyword.
    prepared = prepare(fn)
    layout = BatchLayout(batch, pad)
    if not layout.paths:
        raise GraphError("the batch has no leaves: a step takes at least one array per call")
    if layout.symbols and buckets is None:
        raise GraphError(f"the batch has symbolic dims {list(layout.symbols)}: give buckets for them")
    if layout.symbols and outputs is None:
        raise GraphError(
            f"the batch has symbolic dims {list(layout.symbols)}: name the axes of the outputs in outputs="
        )
    planned = unique_buckets(buckets if buckets is not None else [{}], layout.symbols)
    for what, tree, deepest in (("bound", bound, 6), ("donated", donated, 5), ("batch", batch, 6)):
        _check_depth(what, tree, deepest)
    label = name or _name_of(fn)
    prefix = fresh_prefix(label)
    state = _State(bind(bound, f"{prefix}.bound"), bind(donated, f"{prefix}.donated"))
    return Compiled(prepared, label, state, layout, planned, _Options(outputs, in_place))


def _name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__)).strip("<>")


def _check_depth(what: str, tree: Tree, deepest: int) -> None:
    """MindSpore nests containers six deep at most; what a function returns lies one level further down."""
    depth = tree_structure(tree).depth
    if depth > deepest:
        raise GraphError(
            f"{what} is a tree of {depth} levels, graph mode takes {deepest} there: pass its leaves as one tuple "
            "and rebuild the tree in the function with msds_graphs.steps.unflatten"
        )


@dataclass(frozen=True)
class _State:
    """The Parameters a step closes over; GraphError when two of them would share a name in the graph."""

    bound: Tree
    donated: Tree

    def __post_init__(self) -> None:
        donated = tree_flatten(self.donated)[0]
        owners: dict[str, Any] = {}
        for parameter in (*tree_flatten(self.bound)[0], *donated):
            if owners.setdefault(parameter.name, parameter) is not parameter:
                raise GraphError(
                    f"two Parameters are named {parameter.name!r}, which one graph cannot hold: bind() the "
                    "trees with different prefixes"
                )
        if len({id(parameter) for parameter in donated}) != len(donated):
            raise GraphError("a Parameter appears twice in the donated tree: donate each once")


@dataclass(frozen=True)
class _Options:
    outputs: Tree
    in_place: bool


@dataclass
class _Step:
    """A compiled bucket: the jit object, the shapes it was made for, and what it returned at compile time."""

    call: Callable[..., Any]
    result: Result | None = None


@dataclass(frozen=True)
class WarmUpRow:
    """seconds: compiling and one run; waste: the largest share of padding a call in this bucket can have."""

    bucket: Bucket
    seconds: float
    waste: float


class Compiled:
    """A function compiled per bucket. Made by `compile`; one thread may use it at a time.

    bound, donated: the trees of Parameters. buckets: those planned. rebuilds: steps compiled anew because a
    run of theirs had failed, or on request. A bucket compiles on its first call, or in warm_up; no call
    compiles a second time unless a step failed.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        state: _State,
        layout: BatchLayout,
        buckets: tuple[Bucket, ...],
        options: _Options,
    ) -> None:
        self.name = name
        self.bound = state.bound
        self.donated = state.donated
        self.buckets = buckets
        self.rebuilds = 0
        self._fn = fn
        self._layout = layout
        self._options = options
        self._steps: dict[Bucket, _Step] = {}
        self._compiled_once: set[Bucket] = set()
        self._indices = tree_unflatten(layout.structure, range(layout.structure.num_leaves))

    @property
    def compiled_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that are ready to run, in planned order."""
        return tuple(bucket for bucket in self.buckets if bucket in self._steps)

    def __call__(self, batch: Tree) -> Tree:
        """Outputs as NumPy arrays (bfloat16 as float32) without padding. Donated Parameters are updated.

        GraphError for a batch that is not as declared, UnplannedShapeError for a shape that fits no bucket:
        both before anything runs. GraphError from the run itself: see `tensors`.
        """
        leaves = self._layout.flatten(batch)
        dims = self._layout.measure(leaves)
        bucket = choose_bucket(self.buckets, dims)
        flat, result = self._run(bucket, self._layout.pad(leaves, bucket))
        arrays = [unpad(to_numpy(leaf), axes, dims) for leaf, axes in zip(flat, result.axes, strict=True)]
        return tree_unflatten(result.outputs, arrays)

    def tensors(self, batch: Tree) -> tuple[Tree, Bucket]:
        """The graph's own outputs, padded and on the device, and the bucket: for feeding another step.

        When the run fails inside the graph, GraphError: donated Parameters may be partly written, and the
        step is dropped (MindSpore's object is unusable then), so the next call compiles this bucket anew.
        """
        leaves = self._layout.flatten(batch)
        bucket = choose_bucket(self.buckets, self._layout.measure(leaves))
        flat, result = self._run(bucket, self._layout.pad(leaves, bucket))
        return tree_unflatten(result.outputs, flat), bucket

    def warm_up(self, progress: Callable[[str], None] | None = print) -> list[WarmUpRow]:
        """Compiles every bucket that is not ready, by running it on a batch of fill values.

        Donated Parameters have their old values afterwards, except with in_place, where the run's writes stay
        (caches are large): fill values must write where nothing is read. progress receives the lines of a
        table (bucket, seconds, largest padding waste); None is silent.
        """
        rows = []
        before = self._snapshot()
        width = max(len(repr(bucket)) for bucket in self.buckets)
        say = progress or (lambda line: None)
        say(f"{self.name}: {'bucket':<{width}}  seconds  padding at worst")
        for bucket in self.buckets:
            start = time.perf_counter()
            if bucket not in self._steps:
                self._run(bucket, list(self._layout.filler(bucket)))
            row = WarmUpRow(bucket, time.perf_counter() - start, worst_waste(self.buckets, bucket))
            say(f"{self.name}: {bucket!r:<{width}}  {row.seconds:7.2f}  {row.waste:15.0%}")
            rows.append(row)
        assign(self.donated if before is not None else (), before or ())
        return rows

    def _snapshot(self) -> Tree | None:
        """Copies of the donated values, for warm-up to put back; None with in_place, where it does not."""
        return None if self._options.in_place else tree_map(lambda leaf: np.array(to_numpy(leaf)), self.donated)

    def rebuild(self, bucket: Mapping[str, int] | None = None) -> None:
        """Drops the bucket's step and compiles it anew, running it on fill values as warm_up does."""
        planned = self._planned(bucket)
        self._steps.pop(planned, None)
        before = self._snapshot()
        self._run(planned, list(self._layout.filler(planned)))
        assign(self.donated if before is not None else (), before or ())

    def check_in_place(self, batch: Tree) -> None:
        """Runs `batch` once and compares every returned donated leaf with its Parameter, bit for bit.

        GraphError naming the first leaf that was returned but not written in place. Costs a compilation of
        its own, so it belongs into tests and verification, with a batch whose writes change something.
        """
        if not self._options.in_place:
            raise GraphError(f"{self.name} was compiled with in_place=False: there is no promise to check")
        leaves = self._layout.flatten(batch)
        bucket = choose_bucket(self.buckets, self._layout.measure(leaves))
        step = self._make(bucket, returns_donated=True)
        flat = self._call(step, bucket, self._layout.pad(leaves, bucket))
        slots, structure = tree_flatten(self.donated)
        for path, slot, returned in zip(structure.paths(), slots, flat[len(flat) - len(slots) :], strict=True):
            if slot.asnumpy().tobytes() != returned.asnumpy().tobytes():
                raise GraphError(
                    f"{self.name} returned donated {path!r} with values that its Parameter does not have: "
                    "write it with an in-place operation and return that, or compile with in_place=False"
                )

    def export(self, path: str | Path, bucket: Mapping[str, int] | None = None) -> Path:
        """Writes the bucket's step as MINDIR with the Parameters' values; see msds_graphs.export."""
        from msds_graphs.export import export_step

        planned = self._planned(bucket)
        step = self._make(planned)
        return export_step(step.call, self._tensors_of(self._layout.filler(planned)), Path(path), self.name)

    def check(self, bucket: Mapping[str, int] | None = None) -> None:
        """Compiles the bucket and keeps nothing of it: for dry runs, in whose processes MindSpore runs no graph.

        In any other it runs once on fill values, as in warm_up.
        """
        planned = self._planned(bucket)
        self._call(self._make(planned), planned, list(self._layout.filler(planned)))

    def _planned(self, bucket: Mapping[str, int] | None) -> Bucket:
        """The planned bucket that is meant; None means the only one."""
        wanted = self.buckets[0] if bucket is None and len(self.buckets) == 1 else Bucket(bucket or {})
        if wanted not in self.buckets:
            raise GraphError(f"bucket {wanted!r} is not planned: the buckets are {list(self.buckets)}")
        return wanted

    def _tensors_of(self, arrays: Sequence[Any]) -> list[ms.Tensor]:
        for leaf, path in zip(arrays, self._layout.paths, strict=True):
            if isinstance(leaf, ms.Parameter):  # MindSpore would compile anew for every other Parameter
                raise GraphError(f"batch {at(path)} is a Parameter: pass it in bound or donated, or its value")
        return [
            to_tensor(leaf, spec.dtype) if isinstance(leaf, np.ndarray) else leaf
            for leaf, spec in zip(arrays, self._layout.specs, strict=True)
        ]

    def _make(self, bucket: Bucket, *, returns_donated: bool = False) -> _Step:
        """A fresh step. A jit object is made once and kept: MindSpore compiles anew for each one."""
        step = _Step(call=lambda: None)

        def on_result(tokens: tuple[Any, ...]) -> None:
            step.result = read_result(tokens, self.donated, self._options.outputs, bucket)

        trees = (self.bound, self.donated, self._indices)
        function = make_step(
            self._fn, trees, on_result, in_place=self._options.in_place, returns_donated=returns_donated
        )
        # MindSpore tells jit functions apart by name, place and a time stamp, and warns of "recompiling" one of
        # the same name and place: a name of its own keeps steps apart for certain, and quiet.
        function.__name__ = f"{function.__name__}_{next(_NUMBERS)}"
        step.call = ms.jit(function, fullgraph=True)
        return step

    def _run(self, bucket: Bucket, arrays: list[Any]) -> tuple[tuple[Any, ...], Result]:
        step = self._steps.get(bucket)
        if step is None:
            step = self._make(bucket)
            self.rebuilds += bucket in self._compiled_once
            flat = self._call(step, bucket, arrays)
            self._compiled_once.add(bucket)
            self._steps[bucket] = step
        else:
            flat = self._call(step, bucket, arrays)
        assert step.result is not None
        return flat[: step.result.outputs.num_leaves], step.result

    def _call(self, step: _Step, bucket: Bucket, arrays: list[Any]) -> tuple[Any, ...]:
        compiling = step.result is None
        if compiling:
            ms.set_recursion_limit(GRAPH_CALL_DEPTH)
        try:
            with held_back(f"compiling {self.name}") if compiling else nullcontext():
                flat: tuple[Any, ...] = step.call(*self._tensors_of(arrays))
                wait(flat)  # the call returns before the graph has run, and only here do its errors come out
        except Exception as error:
            if self._steps.get(bucket) is step:
                del self._steps[bucket]
            raise explain(error, f"{'compiling' if compiling else 'running'} {self.name} [{bucket!r}]") from error
        return flat
