"""Fixtures of the training tests: small examples, and one compiled step that the tests of a module share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msds.train.data import Example
from tests.reference.checkpoints import write_checkpoint
from tests.reference.variants import VARIANTS

SEQUENCES, LENGTH = 4, 12


@pytest.fixture(autouse=True)
def _scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore writes a dump of every graph that fails to compile into the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 of a dense, a MoE and an MTP layer: training graphs take long to compile."""
    base = VARIANTS["v3_base"]
    config = base.config | {"num_hidden_layers": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256}
    VARIANTS["v3_train"] = replace(base, name="v3_train", config=config)
    try:
        return write_checkpoint("v3_train", tmp_path_factory.mktemp("small") / "model")
    finally:
        del VARIANTS["v3_train"]


def random_examples(count: int, seed: int = 0, vocab: int = 256, longest: int = LENGTH) -> list[Example]:
    """Texts of 4 to `longest` tokens with prompts of 1 to 3."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(rng.integers(4, longest + 1))
        ids: Any = rng.integers(3, vocab, length).tolist()
        found.append(Example(tuple(ids), int(rng.integers(1, 4))))
    return found
