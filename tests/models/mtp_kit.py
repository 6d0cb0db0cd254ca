"""The MTP steps of a model over one cache, and what NumPy says of the same text."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import msds
from msds.engine.batch import BATCH_SPEC, Row, build_batch
from msds_graphs.binding import bind, fresh_prefix
from msds_graphs.compile import compile
from msds_graphs.specs import ArraySpec
from tests.models.compare import IDS, Array
from tests.reference import numpy_deepseek
from tests.reference.checkpoints import read_config, to_numpy_tensors

BLOCK_SIZE, NUM_BLOCKS, LENGTH = 4, 9, 12
TABLE = [3, 8, 1, 5]


class Mtp:
    """Runs any depth on a text of 12 tokens; the hidden states come from NumPy, so that only MTP is tested."""

    def __init__(self, folder: Path) -> None:
        self.model = msds.load(folder, mtp=True, progress=False)
        self.tensors, self.config = to_numpy_tensors(folder), read_config(folder)
        spec = self.model.functions.cache_spec(self.model.config, NUM_BLOCKS, BLOCK_SIZE)
        self.cache = bind(spec, fresh_prefix("cache"))
        self._steps: dict[int, Any] = {}

    @cached_property
    def hidden(self) -> Array:
        """[T, D] float32, the main model's states after its final norm."""
        hidden: Array = numpy_deepseek.forward(self.tensors, self.config, IDS[:LENGTH])["hidden"]
        return hidden.astype(np.float32)

    def _step(self, depth: int) -> Any:
        if depth not in self._steps:
            config, plan, mtp = self.model.config, self.model.plan, self.model.functions.mtp

            def step(params, cache, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
                return mtp(params, cache, batch, config, plan, 0, BLOCK_SIZE, depth)

            self._steps[depth] = compile(
                step,
                bound=self.model.params,
                donated=self.cache,
                batch=BATCH_SPEC | {"hidden": ArraySpec(("S", "Q", self.config["hidden_size"]), "float32")},
                buckets=[{"S": 1, "Q": LENGTH, "B": len(TABLE)}],
                outputs={"logits": ("S", "Q", None), "hidden": ("S", "Q", None), "is_finite": ("S", "Q")},
                in_place=True,
            )
        return self._steps[depth]

    def run(self, depth: int, hidden: Array, start: int = 0, count: int = LENGTH) -> dict[str, Array]:
        """States of positions start.. of the text, each with the token depth + 1 after it, at that token's position."""
        first = start + depth + 1
        rows = [Row(IDS[first : first + count].tolist(), first, TABLE)]
        batch = build_batch(rows, block_size=BLOCK_SIZE, num_cache_blocks=NUM_BLOCKS, vocab_size=512)
        outputs: dict[str, Array] = self._step(depth)({**batch, "hidden": hidden[None, start : start + count]})
        return outputs

    def want(self, depth: int, hidden: Array) -> dict[str, Array]:
        """Logits [T, V] and hidden [T, D] by NumPy."""
        after = depth + 1
        next_ids, positions = IDS[after : after + LENGTH], np.arange(after, after + LENGTH)
        return numpy_deepseek.mtp(self.tensors, self.config, hidden, next_ids, positions, depth)
