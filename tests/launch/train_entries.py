"""Training as these tests run it, in one process or as a rank of several."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msds
from msds.launch import Place
from msds.train.objectives import NextToken
from msds.train.optimizer import AdamW
from msds.train.parallel import replicas
from msds.train.state import resume_state
from msds.train.trainer import Trainer, TrainOptions
from msds_graphs.ranks import Ranks
from tests.train.conftest import LENGTH, SEQUENCES, random_examples

EXAMPLES = random_examples(3 * SEQUENCES, seed=2)
OPTIONS = TrainOptions(
    steps=2, learning_rate=1e-3, batch_size=SEQUENCES, lengths=(LENGTH,), warmup_steps=1, seed=1, log_every=1
)


def train(model: str, folder: Path, ranks: Ranks | None = None) -> Trainer:
    """Two steps in `folder`, and what it was after one of them in `folder`-half."""
    trainer = Trainer(
        msds.load(model, progress=False),
        folder,
        OPTIONS,
        objective=NextToken(balance_weight=0.02),
        # a larger eps: with the usual one, Adam makes a whole step of what is left when a gradient rounds to nothing
        optimizer=AdamW(weight_decay=0.3, max_grad_norm=0.5, bias_update_speed=0.01, eps=1e-3),
        ranks=ranks,
    )
    trainer.options = replace(OPTIONS, steps=1)
    trainer.run(EXAMPLES, None)
    if trainer.ranks.rank == 0:
        shutil.copytree(folder, f"{folder}-half")
    trainer.options = OPTIONS
    trainer.run(EXAMPLES, None)
    return trainer


def go_on(trainer: Trainer, folder: Path) -> None:
    """The rest of the run whose state is in `folder`."""
    trainer.folder = folder
    trainer.done, trainer._seen = resume_state(folder, trainer.step, trainer._identity())
    assert trainer.done == 1
    trainer.run(EXAMPLES, None)


def train_rank(place: Place, model: str, folder: str, half: str) -> None:
    """As one replica: a run of its own in `folder`, and the end of the run in `half`; then told to stop by one."""
    trainer = train(model, Path(folder), replicas(place))
    go_on(trainer, Path(half))
    trainer.folder = Path(f"{folder}-stopped")
    if place.rank == 0:
        shutil.copytree(f"{folder}-half", trainer.folder)
    trainer.done = 0
    trainer.run(EXAMPLES, None, stop=lambda: place.rank == 1)
    assert trainer.done == 1
