"""The device side of the engine: the cache, the compiled steps, and one call per scheduled batch.

S sequences, Q new tokens per sequence, N logit rows per sequence, V vocabulary, D hidden, k draft tokens, R replicas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from msds.engine.batch import BATCH_SPEC, Batch, Row, build_batch, draft_slots, pick_rows, prev_hidden, stack_batches
from msds_graphs.buckets import choose_bucket
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import Tree

if TYPE_CHECKING:
    from msds.model import Model
    from msds.models.specs.placement import ExpertPlacement
    from msds_graphs.compile import Compiled

logger = logging.getLogger("msds")

LAST_TOKEN = {"logits": ("S", None, None), "hidden": ("S", "Q", None), "is_finite": ("S", "Q")}
EVERY_TOKEN = {"logits": ("S", "Q", None), "hidden": ("S", "Q", None), "is_finite": ("S", "Q")}

HEAD_ROWS = 64
"""States that become logits in one call of the head: one small graph serves prompts and chunks of any length."""


@dataclass(frozen=True)
class StepResult:
    """logits [S, N, V] and hidden [S, Q, D] float32; is_finite [S, Q]: False where a token's hidden state overflowed.

    S are the rows of the step, in its order, of all replicas. Row i of a sequence is its new token i, and rows after
    its last are padding; N is Q, or 1: the last token alone.
    """

    logits: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32]
    is_finite: npt.NDArray[np.bool_]


class Runner:
    """Owns the paged cache and the compiled steps of one model. Used by one thread.

    num_drafts: tokens that `draft` proposes, for a model loaded with MTP layers; every step then keeps their cache
    complete, whether anything is drafted or not. 0: there is no `draft`. counts_experts: for `expert_counts`.

    Where the model has several replicas, each has as many blocks, and buckets are of one of them. Every rank is given
    the rows of all, computes those of its own replica, or padding, and has the results of all.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        prefill_buckets: Sequence[dict[str, int]],
        decode_buckets: Sequence[dict[str, int]],
        num_drafts: int = 0,
        counts_experts: bool = False,
    ) -> None:
        from msds_graphs.binding import bind, fresh_prefix
        from msds_graphs.counter import compile_count

        self._compile_count = compile_count  # counts from its import on
        self.model = model
        self.num_replicas = model.plan.ranks.size("dp")
        self.num_blocks = num_blocks
        self.block_size = block_size
        spec = model.cache_spec(num_blocks, block_size)
        if counts_experts:
            spec = {**spec, "expert_counts": model.expert_counts_spec()}
        self.cache = bind(spec, fresh_prefix("cache"))
        self.num_drafts = num_drafts
        functions = model.functions
        self._prefill = self._compile_pass("prefill", functions.prefill, prefill_buckets, num_logits=1)
        self._decode = self._compile_pass("decode", functions.decode, decode_buckets, num_logits=0)
        self._draft = self._compile_draft([bucket for bucket in decode_buckets if bucket["Q"] == 1])
        self._head = self._compile_head()

    def prefill(self, rows: Sequence[Row], *, all_logits: bool = False) -> StepResult:
        """A chunk of new tokens per row; logits of each row's last token, or of all its tokens.

        Those of a last token are the same numbers either way, so that what is sampled does not depend on it.
        """
        result = self._run(self._prefill, rows)
        return self._with_all_logits(rows, result) if all_logits else result

    def decode(self, rows: Sequence[Row]) -> StepResult:
        """One or a few new tokens per row; logits of all of them."""
        return self._run(self._decode, rows)

    def draft(self, rows: Sequence[Row]) -> npt.NDArray[np.int32]:
        """[S, k] what may follow the one token of each row: its last, which the main model has not computed yet."""
        if self._draft is None:
            raise RuntimeError("this runner was made without drafts")
        return self._call(self._draft, rows)["drafts"]

    @property
    def num_compiled(self) -> int:
        """Graphs that MindSpore has compiled in this process."""
        return self._compile_count()

    @property
    def steps(self) -> dict[str, Compiled]:
        """The compiled steps by name."""
        steps = (self._prefill, self._decode, self._draft, self._head)
        return {step.name: step for step in steps if step is not None}

    def warm_up(self, progress: Callable[[str], None] | None = print) -> None:
        """Compile every planned shape, printing a table: nothing is compiled afterwards, whatever is asked for."""
        for step in self.steps.values():
            step.warm_up(progress)

    def update_weights(self, tree: Tree) -> None:
        """New weights in every compiled step, as `Model.update_weights`; between two steps."""
        self.model.update_weights(tree)

    def expert_counts(self) -> npt.NDArray[np.int32]:
        """[M, E] how many tokens chose each routed expert of each MoE layer in all steps so far; it wraps around.

        The layers of `mtp` come last. Tokens of all replicas; padding does not count.
        """
        return np.array(self.cache["expert_counts"].asnumpy())  # a copy: what asnumpy gives may be written by a step

    def place_experts(self, placements: Sequence[ExpertPlacement]) -> None:
        """Move experts between two steps, as `Model.place_experts`; what the steps compute stays the same."""
        self.model.place_experts(placements)

    def _compile_pass(
        self, name: str, function: Any, buckets: Sequence[dict[str, int]], *, num_logits: int
    ) -> Compiled:
        config, plan, block_size = self.model.config, self.model.plan, self.block_size

        def run(params, cache, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            return function(params, cache, batch, config, plan, num_logits, block_size)

        return self._compile(name, run, buckets, outputs=LAST_TOKEN if num_logits else EVERY_TOKEN)

    def _compile_draft(self, buckets: Sequence[dict[str, int]]) -> Compiled | None:
        count = self.num_drafts
        if count == 0:
            return None
        config, plan, block_size, vocab = self.model.config, self.model.plan, self.block_size, self.model.allowed_vocab
        function = self.model.functions.draft

        def run(params, cache, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            return function(params, cache, batch, config, plan, count, vocab, block_size)

        return self._compile("draft", run, buckets, outputs={"drafts": ("S", None)})

    def _compile(
        self,
        name: str,
        run: Any,
        buckets: Sequence[dict[str, int]],
        *,
        outputs: Mapping[str, tuple[str | None, ...]],
    ) -> Compiled:
        """A step over the cache, of one replica, for all of them; outputs: their axes."""
        from msds.models.replicas import of_all_replicas, own_part
        from msds_graphs.compile import compile

        ranks, lead = self.model.plan.ranks, () if self.num_replicas == 1 else (self.num_replicas,)

        def step(params, cache, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            found, cache = run(params, cache, own_part(batch, ranks))
            return of_all_replicas(found, ranks), cache

        specs = self._batch_spec(name)
        return compile(
            step,
            bound=self.model.params,
            donated=self.cache,
            batch={leaf: ArraySpec((*lead, *spec.shape), spec.dtype) for leaf, spec in specs.items()},
            buckets=buckets,
            outputs={leaf: (*(None for _ in lead), *axes) for leaf, axes in outputs.items()},
            name=name,
            in_place=self.model.plan.implementation("cache_write") != "reference",
        )

    def _batch_spec(self, name: str) -> dict[str, ArraySpec]:
        """What a step of one replica takes."""
        if self.num_drafts == 0:
            return BATCH_SPEC
        specs = BATCH_SPEC | {"prev_hidden": ArraySpec(("S", self.model.config.hidden_size), "float32")}
        return specs | {"draft_slots": ArraySpec(("S", self.num_drafts), "int32")} if name == "draft" else specs

    def _compile_head(self) -> Compiled:
        from msds_graphs.compile import compile

        config, ranks, head = self.model.config, self.model.plan.ranks, self.model.functions.head

        def step(params, donated, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            return head(params, batch["hidden"].astype(params["norm"]["weight"].dtype), config, ranks), donated

        return compile(
            step,
            bound=self.model.params,
            batch={"hidden": ArraySpec(("T", config.hidden_size), "float32")},
            buckets=[{"T": HEAD_ROWS}],
            outputs=("T", None),
            name="head",
        )

    def _with_all_logits(self, rows: Sequence[Row], result: StepResult) -> StepResult:
        """The result with the logits of every new token, from the states that the step has left."""
        sequences, queries = result.hidden.shape[:2]
        is_real = np.arange(queries) < np.array([[len(row.tokens)] for row in rows])
        states = result.hidden[is_real]
        parts = [self._head({"hidden": states[at : at + HEAD_ROWS]}) for at in range(0, len(states), HEAD_ROWS)]
        logits = np.zeros((sequences, queries, parts[0].shape[1]), np.float32)
        logits[is_real] = np.concatenate(parts)
        for index, row in enumerate(rows):
            logits[index, len(row.tokens) - 1] = result.logits[index, 0]
        return StepResult(logits, result.hidden, result.is_finite)

    def _run(self, step: Compiled, rows: Sequence[Row]) -> StepResult:
        outputs = self._call(step, rows)
        return StepResult(outputs["logits"], outputs["hidden"], outputs["is_finite"])

    def _call(self, step: Compiled, rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
        """What a step over the cache gives for each row."""
        outputs: dict[str, npt.NDArray[Any]]
        if self.num_replicas == 1:
            outputs = self._compute(step, self._batch(step.name, rows))
            return outputs
        parts = [[row for row in rows if row.replica == index] for index in range(self.num_replicas)]
        outputs = self._compute(step, stack_batches([self._batch(step.name, part) if part else None for part in parts]))
        return {name: pick_rows(array, rows) for name, array in outputs.items()}

    def _batch(self, name: str, rows: Sequence[Row]) -> Batch:
        """The batch of one replica for a step."""
        batch = build_batch(
            rows,
            block_size=self.block_size,
            num_cache_blocks=self.num_blocks,
            vocab_size=self.model.config.vocab_size,
            ahead=self.num_drafts - 1 if name == "draft" else 0,  # each draft reads the one before
        )
        if self.num_drafts:
            batch["prev_hidden"] = prev_hidden(rows, self.model.config.hidden_size)
        if name == "draft":
            batch["draft_slots"] = draft_slots(rows, self.num_drafts, self.block_size)
        return batch

    def _compute(self, step: Compiled, batch: Batch) -> Any:
        """Run a step; say so when it must be compiled first, because that takes seconds."""
        if len(step.compiled_buckets) == len(step.buckets):
            return step(batch)
        (sequences, queries), blocks = batch["tokens"].shape[-2:], batch["block_tables"].shape[-1]
        dims = {"S": sequences, "Q": queries, "B": blocks}
        bucket = choose_bucket(step.buckets, dims)
        if bucket in step.compiled_buckets:
            return step(batch)
        logger.info("compiling %s for %r", step.name, bucket)
        start = time.perf_counter()
        outputs = step(batch)
        logger.info("compiled %s for %r in %.1f s", step.name, bucket, time.perf_counter() - start)
        return outputs
