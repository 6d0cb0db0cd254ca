"""An engine without a scheduler: the steps of a model, one bucket each, and full control of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import msds
from msds.engine.batch import Row
from msds.engine.runner import Runner, StepResult
from msds_graphs.binding import assign, to_numpy
from msds_graphs.plan import Plan
from msds_graphs.trees import Tree, tree_flatten, tree_map
from tests.models.compare import Array

BLOCK_SIZE = 4
BLOCKS_PER_TEXT = 8
MAX_LEN = BLOCK_SIZE * BLOCKS_PER_TEXT
MAX_SEQS = 3
CHUNK = 8
NUM_BLOCKS = 1 + MAX_SEQS * BLOCKS_PER_TEXT

TEXTS = np.random.default_rng(5).integers(0, 512, (6, MAX_LEN))
"""Texts that tests take prefixes of: the definition then needs one graph and six calls."""


@dataclass(frozen=True)
class Part:
    """The next tokens of one text in a step."""

    text: int
    start: int
    count: int
    table: Sequence[int]

    @property
    def row(self) -> Row:
        tokens = TEXTS[self.text][self.start : self.start + self.count]
        return Row([int(token) for token in tokens], self.start, list(self.table))


class Kit:
    """Prefill takes up to 3 sequences of up to 8 new tokens, decode up to 3 of one, texts have up to 32 tokens."""

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        self.model = msds.load(folder, mtp=False, plan=plan, progress=False)
        self.runner = Runner(
            self.model,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            prefill_buckets=[{"S": MAX_SEQS, "Q": CHUNK, "B": BLOCKS_PER_TEXT}],
            decode_buckets=[{"S": MAX_SEQS, "Q": 1, "B": BLOCKS_PER_TEXT}],
        )

    @cached_property
    def defined(self) -> Array:
        """Logits [6, 32, V] of all texts by the definition."""
        return np.stack([self.model.logits(text) for text in TEXTS])

    def prefill(self, parts: Sequence[Part]) -> StepResult:
        """Logits [S, Q, V] of all new tokens."""
        return self.runner.prefill([part.row for part in parts], all_logits=True)

    def decode(self, parts: Sequence[Part]) -> StepResult:
        """Logits [S, Q, V]."""
        return self.runner.decode([part.row for part in parts])

    def deviation(self, parts: Sequence[Part], result: StepResult) -> float:
        """Largest difference of the real rows from the definition, relative to its largest logit."""
        assert result.is_finite.all()
        worst = 0.0
        for part, logits in zip(parts, result.logits, strict=True):
            want = self.defined[part.text, part.start : part.start + part.count]
            worst = max(worst, float(np.abs(logits[: part.count] - want).max()))
        return worst / float(np.abs(self.defined).max())

    def fill_cache(self, value: float) -> None:
        """Every row of the cache, block 0 included, becomes `value`."""
        assign(self.runner.cache, tree_map(lambda page: np.full(page.shape, value, np.float32), self.runner.cache))

    def cache_pages(self) -> list[Array]:
        """Every page as [heads, slots, features], without the slots of block 0."""
        slots = NUM_BLOCKS * BLOCK_SIZE
        pages = [to_numpy(page) for page in tree_flatten(self.runner.cache)[0]]
        return [page.reshape(-1, slots, page.shape[-1])[:, BLOCK_SIZE:] for page in pages]


def values_of(params: Tree) -> Tree:
    """Copies of the values of a bound tree."""
    copied: Tree = tree_map(lambda leaf: np.array(to_numpy(leaf)), params)
    return copied


def tables(order: Sequence[int]) -> list[list[int]]:
    """Block tables of MAX_SEQS texts from an order of the blocks 1, 2, ..."""
    blocks: Any = np.asarray(order).reshape(MAX_SEQS, BLOCKS_PER_TEXT)
    rows: list[list[int]] = blocks.tolist()
    return rows
