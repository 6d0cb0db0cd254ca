"""The device side of the engine: the cache, the compiled steps, and one call per scheduled batch.

S sequences, N logit rows per sequence, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from msds.engine.batch import BATCH_SPEC, Batch, Row, build_batch
from msds_graphs.buckets import choose_bucket

if TYPE_CHECKING:
    from msds.model import Model
    from msds_graphs.compile import Compiled

logger = logging.getLogger("msds")

STEP_OUTPUTS = {"logits": ("S", None, None), "hidden": ("S", None, None), "is_finite": ("S",)}


@dataclass(frozen=True)
class StepResult:
    """logits [S, N, V] float32; is_finite [S]: False where a sequence's hidden states overflowed in this step."""

    logits: npt.NDArray[np.float32]
    is_finite: npt.NDArray[np.bool_]


class Runner:
    """Owns the paged cache and the compiled steps of one model. Used by one thread."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        prefill_buckets: Sequence[dict[str, int]],
        decode_buckets: Sequence[dict[str, int]],
    ) -> None:
        from msds_graphs.binding import bind, fresh_prefix

        self.model = model
        self.num_blocks = num_blocks
        self.block_size = block_size
        spec = model.functions.cache_spec(model.config, num_blocks, block_size, model.dtype)
        self.cache = bind(spec, fresh_prefix("cache"))
        functions = model.functions
        self._prefill = self._compile("prefill", functions.prefill, prefill_buckets, num_logits=1)
        self._prefill_all = self._compile("prefill with all logits", functions.prefill, prefill_buckets, num_logits=0)
        self._decode = self._compile("decode", functions.decode, decode_buckets, num_logits=1)

    def prefill(self, rows: Sequence[Row], *, all_logits: bool = False) -> StepResult:
        """A chunk of new tokens per row; logits of each row's last token, or of all its tokens."""
        return self._run(self._prefill_all if all_logits else self._prefill, rows)

    def decode(self, rows: Sequence[Row]) -> StepResult:
        """One new token per row."""
        return self._run(self._decode, rows)

    @property
    def num_compiled(self) -> int:
        """Graphs that MindSpore has compiled in this process."""
        from msds_graphs.counter import compile_count

        return compile_count()

    def warm_up(self, progress: Callable[[str], None] | None = print) -> None:
        """Compile every planned prefill and decode bucket, printing a table. Prompt log-probabilities compile apart."""
        self._prefill.warm_up(progress)
        self._decode.warm_up(progress)

    def _compile(self, name: str, function: Any, buckets: Sequence[dict[str, int]], *, num_logits: int) -> Compiled:
        from msds_graphs.compile import compile

        config, plan, block_size = self.model.config, self.model.plan, self.block_size

        def step(params, cache, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            return function(params, cache, batch, config, plan, num_logits, block_size)

        in_place = plan.implementation("cache_write") != "reference"
        return compile(
            step,
            bound=self.model.params,
            donated=self.cache,
            batch=BATCH_SPEC,
            buckets=buckets,
            outputs=STEP_OUTPUTS,
            name=name,
            in_place=in_place,
        )

    def _run(self, step: Compiled, rows: Sequence[Row]) -> StepResult:
        batch = build_batch(
            rows,
            block_size=self.block_size,
            num_cache_blocks=self.num_blocks,
            vocab_size=self.model.config.vocab_size,
        )
        outputs = self._call(step, batch)
        return StepResult(outputs["logits"], outputs["is_finite"])

    def _call(self, step: Compiled, batch: Batch) -> Any:
        """Run a step; say so when it must be compiled first, because that takes seconds."""
        if len(step.compiled_buckets) == len(step.buckets):
            return step(batch)
        dims = {"S": len(batch["tokens"]), "Q": batch["tokens"].shape[1], "B": batch["block_tables"].shape[1]}
        bucket = choose_bucket(step.buckets, dims)
        if bucket in step.compiled_buckets:
            return step(batch)
        logger.info("compiling %s for %r", step.name, bucket)
        start = time.perf_counter()
        outputs = step(batch)
        logger.info("compiled %s for %r in %.1f s", step.name, bucket, time.perf_counter() - start)
        return outputs
