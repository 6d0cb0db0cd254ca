"""Whole training steps: against torch training the same checkpoint with transformers, and against itself split up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import msds
from msds.errors import TrainingError
from msds.model import Model
from msds.models.names import hf_names
from msds.train.data import build_batch, split_batch
from msds.train.objectives import NextToken
from msds.train.optimizer import AdamW
from msds.train.step import TrainStep
from msds.train.trainer import canonical
from msds_graphs.binding import assign
from msds_graphs.trees import tree_flatten
from tests.reference import numpy_deepseek
from tests.reference.checkpoints import to_numpy_tensors
from tests.train.conftest import LENGTH, SEQUENCES, random_examples

RATE = 3e-3
OPTIMIZER = AdamW(weight_decay=0.3, max_grad_norm=0.5, bias_update_speed=0.01)
OBJECTIVE = NextToken(mtp_weight=0.3, balance_weight=0.02)


class Stepper:
    """A compiled step over two texts at a time, put back to the start before each use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: Model = msds.load(folder, mtp=True, progress=False)
        self.start = canonical(self.model)
        shapes = [{"S": SEQUENCES // 2, "Q": LENGTH}]
        self.step = TrainStep(self.model.config, self.start, buckets=shapes, objective=OBJECTIVE, optimizer=OPTIMIZER)

    def reset(self) -> TrainStep:
        self.step.objective, self.step.optimizer = OBJECTIVE, OPTIMIZER
        leaves = tuple(np.array(leaf) for leaf in tree_flatten(self.start)[0])
        assign(self.step.state["params"], leaves)
        for part in ("first", "second"):
            assign(self.step.state[part], tuple(np.zeros_like(leaf) for leaf in leaves))
        return self.step


@pytest.fixture(scope="module")
def stepper(small: Path) -> Stepper:
    return Stepper(small)


def halves(seed: int) -> list[dict[str, Any]]:
    return split_batch(build_batch(random_examples(SEQUENCES, seed), (LENGTH,)), 2)


def test_two_steps_move_every_weight_as_torch_does(stepper: Stepper) -> None:
    """AdamW with decay of matrices only and clipping, over cross entropy: transformers' model, torch's optimiser.

    The MTP layer and the balance loss are left to other tests: transformers has neither.
    """
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(stepper.folder, dtype=torch.float32)
    parameters = dict(theirs.named_parameters())
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    ours = stepper.reset()
    ours.objective = NextToken(mtp_weight=0.0, balance_weight=0.0)
    ours.optimizer = replace(OPTIMIZER, bias_update_speed=0.0)
    for number in (1, 2):
        examples = random_examples(SEQUENCES, number)
        batch = build_batch(examples, (LENGTH,))
        loss = torch.zeros(())
        for row, example in enumerate(examples):
            logits = theirs(torch.tensor([example.token_ids])).logits[0, :-1]
            targets = torch.tensor(example.token_ids[1:])
            weights = torch.tensor(batch["weights"][row, 1 : len(example.token_ids)])
            loss = loss + (torch.nn.functional.cross_entropy(logits, targets, reduction="none") * weights).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        report = ours(split_batch(batch, 2), rate=RATE, step=number)
        assert report.values["cross_entropy"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert report.values["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert float(norm) > OPTIMIZER.max_grad_norm
    theirs.save_pretrained("trained", max_shard_size="1GB")
    want = to_numpy_tensors(Path("trained"))
    params = ours.params()
    leaves, structure = tree_flatten(params)
    compared = 0
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        if path.startswith("mtp."):
            continue
        names = hf_names(path, stepper.model.config)
        for name, part in zip(names, leaf if len(names) > 1 else [leaf], strict=True):
            # Adam turns a gradient of almost nothing into a whole step of either sign: a few weights in ten thousand
            off = np.abs(part - want[name]) > RATE * 0.02
            assert off.mean() < 5e-4, name
            compared += 1
    assert compared > 50


def test_losses_are_those_of_numpy(stepper: Stepper) -> None:
    """Cross entropy and the MTP module's, from the independent NumPy model, text by text."""
    step = stepper.reset()
    examples = random_examples(SEQUENCES, 3)
    batch = build_batch(examples, (LENGTH,))
    report = step(split_batch(batch, 2), rate=1e-9, step=1)
    tensors, config = to_numpy_tensors(stepper.folder), _hub_config(stepper.folder)
    main = ahead = 0.0
    for row, example in enumerate(examples):
        ids, weights = np.array(example.token_ids), batch["weights"][row].astype(np.float64)
        out = numpy_deepseek.forward(tensors, config, ids)
        main += _cross_entropy(out["logits"][:-1], ids[1:], weights[1 : len(ids)])
        positions = np.arange(1, len(ids))
        deep = numpy_deepseek.mtp(tensors, config, out["hidden"][:-1], ids[1:], positions)
        ahead += _cross_entropy(deep["logits"][:-1], ids[2:], weights[2 : len(ids)])
    assert report.values["cross_entropy"] == pytest.approx(main, rel=1e-5)
    assert report.values["mtp"] == pytest.approx(ahead, rel=1e-5)
    balance = report.values["balance"]
    assert 0.9 < balance < 8
    total = main + OBJECTIVE.mtp_weight * ahead + OBJECTIVE.balance_weight * balance * report.expert_counts.shape[0]
    assert report.values["loss"] == pytest.approx(total, rel=1e-5)


def test_micro_batches_add_up(stepper: Stepper) -> None:
    """Two halves in either order are one step: the weights carry the normalisation."""
    step = stepper.reset()
    one = step(halves(4), rate=RATE, step=1)
    first = step.params()
    step = stepper.reset()
    other = step(halves(4)[::-1], rate=RATE, step=1)
    assert other.values["loss"] == pytest.approx(one.values["loss"], rel=1e-6)
    for a, b in zip(tree_flatten(first)[0], tree_flatten(step.params())[0], strict=True):
        np.testing.assert_allclose(a, b, atol=RATE * 0.02)
    assert one.expert_counts.sum() == 2 * 2 * sum(len(example.token_ids) for example in random_examples(4, 4))


def test_a_step_that_is_not_finite_changes_nothing(stepper: Stepper) -> None:
    step = stepper.reset()
    before = [np.array(leaf) for leaf in tree_flatten(step.params())[0]]
    bad = halves(5)
    bad[1]["weights"][0, 3] = np.inf
    with pytest.raises(TrainingError, match=r"step 1 is not finite .*nothing was updated"):
        step(bad, rate=RATE, step=1)
    for old, new in zip(before, tree_flatten(step.params())[0], strict=True):
        np.testing.assert_array_equal(old, new)
    good = step(halves(5), rate=RATE, step=1)  # and what was added up is gone
    assert np.isfinite(list(good.values.values())).all()


def test_the_bias_rule_balances_a_skewed_router(stepper: Stepper) -> None:
    """A bias that sends all tokens to one group is taken back, by `bias_update_speed` a step."""
    step = stepper.reset()
    index = step.paths.index("layers.1.mlp.gate.e_score_correction_bias")
    skewed = np.where(np.arange(8) < 2, 0.3, 0.0).astype(np.float32)
    leaves = [np.array(leaf) for leaf in tree_flatten(stepper.start)[0]]
    leaves[index] = skewed
    assign(step.state["params"], tuple(leaves))
    loads = []
    for number in range(1, 41):
        report = step(halves(number), rate=1e-9, step=number)
        counts = report.expert_counts[0]
        loads.append(counts[:2].sum() / counts.sum())
    bias = step.state["params"][index].asnumpy()
    assert loads[0] > 0.6
    assert np.mean(loads[-5:]) < 0.5
    assert (bias[:2] < skewed[:2]).all()
    np.testing.assert_allclose(np.abs((bias - skewed) / 0.01 % 1 - 0.5), 0.5, atol=1e-3)  # whole updates


def _hub_config(folder: Path) -> dict[str, Any]:
    import json

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _cross_entropy(logits: Any, targets: Any, weights: Any) -> float:
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-(logprobs[np.arange(len(targets)), targets] * weights).sum())
