"""Drafts of the MTP layer, and that every step of the main model keeps the layer's cache complete."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import msds
from msds.engine.batch import Row
from msds.engine.runner import Runner
from msds_graphs.binding import assign, to_numpy
from msds_graphs.trees import tree_map
from tests.models.compare import IDS, TOLERANCE, difference
from tests.models.mutants import shortened
from tests.reference import numpy_deepseek
from tests.reference.checkpoints import read_config, to_numpy_tensors

BLOCK_SIZE, CHUNK, K = 4, 6, 3
TABLE = [3, 8, 1, 5, 2]
TEXT = [int(id_) for id_ in IDS[:14]]
HIDDEN = 64


class World:
    """A runner with drafts, and NumPy's states of TEXT."""

    def __init__(self, folder):
        self.folder = folder
        self.tensors, self.config = to_numpy_tensors(folder), read_config(folder)
        buckets = [{"S": 2, "Q": 1, "B": 5}, {"S": 2, "Q": 1 + K, "B": 5}]
        self.runner = Runner(
            msds.load(folder, mtp=True, progress=False),
            num_blocks=12,
            block_size=BLOCK_SIZE,
            prefill_buckets=[{"S": 1, "Q": CHUNK, "B": 5}],
            decode_buckets=buckets,
            num_drafts=K,
        )
        self.hidden = numpy_deepseek.forward(self.tensors, self.config, TEXT)["hidden"].astype(np.float32)

    def row(self, start, stop, table=TABLE):
        return Row(TEXT[start:stop], start, table, self.hidden[start - 1] if start else None)

    def fill(self, value):
        assign(self.runner.cache, tree_map(lambda page: np.full(page.shape, value, np.float32), self.runner.cache))

    def entries(self):
        """What the MTP page holds of positions 1 to 12."""
        places = np.arange(1, 13)
        slots = np.asarray(TABLE)[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        return np.array(to_numpy(self.runner.cache["mtp"][0]["latent"]))[slots]


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    """One layer beside the MTP layer."""
    return World(shortened(tiny("v3_base"), tmp_path_factory.mktemp("short") / "v3", 1))


def expected_drafts(world, last, allowed):
    """Drafts after TEXT[: last + 1] by NumPy: the layer over all positions so far, again for each draft."""
    ids, states, drafts = TEXT[1 : last + 1], list(world.hidden[:last]), []
    for _ in range(K):
        positions = np.arange(1, len(ids) + 1)
        out = numpy_deepseek.mtp(world.tensors, world.config, np.array(states), ids, positions)
        drafts.append(int(out["logits"][-1, :allowed].argmax()))
        ids, states = [*ids, drafts[-1]], [*states, out["hidden"][-1]]
    return drafts


def test_drafts_are_those_of_numpy(world):
    """Over a dirty cache: the prompt in two chunks, then one token alone, then drafts after the next."""
    world.fill(1e3)
    for start, stop in ((0, 6), (6, 11)):
        result = world.runner.prefill([world.row(start, stop)])
        assert difference(result.hidden[0], world.hidden[start:stop]) < TOLERANCE
    world.runner.decode([world.row(11, 12)])
    got = world.runner.draft([world.row(12, 13)])
    assert got.tolist() == [expected_drafts(world, 12, 512)]


def test_ids_without_a_token_are_not_drafted(world, monkeypatch):
    """The likeliest id is made padding of the vocabulary; and this is one draft alone, over a cache that is copied."""
    likeliest = expected_drafts(world, 12, 512)[0]
    monkeypatch.setattr(msds.model.Model, "allowed_vocab", likeliest)
    single = Runner(
        msds.load(world.folder, mtp=True, plan=msds.Plan((("cache_write", "reference"),)), progress=False),
        num_blocks=12,
        block_size=BLOCK_SIZE,
        prefill_buckets=[{"S": 1, "Q": CHUNK, "B": 5}],
        decode_buckets=[{"S": 1, "Q": 1, "B": 5}],
        num_drafts=1,
    )
    for start, stop in ((0, 6), (6, 12)):
        single.prefill([world.row(start, stop)])
    assert single.draft([world.row(12, 13)]).tolist() == [expected_drafts(world, 12, likeliest)[:1]]


def test_of_equals_the_first_is_drafted(world):
    head = world.runner.model.params["lm_head"]["weight"]
    before = np.array(to_numpy(head))
    assign(head, np.zeros_like(before))
    try:
        assert world.runner.draft([world.row(12, 13)]).tolist() == [[0] * K]
    finally:
        assign(head, before)


def test_drafts_do_not_see_what_they_must_not(world):
    """Rejected drafts, another's blocks, and the slot of position 0 leave no trace; nor does company."""
    world.fill(0.0)
    world.runner.prefill([world.row(0, 6)])
    world.runner.prefill([world.row(6, 12)])
    want = world.runner.draft([world.row(12, 13)])
    world.fill(1e3)
    world.runner.prefill([world.row(0, 6)])
    world.runner.prefill([world.row(6, 10)])
    world.runner.draft([world.row(10, 11)])  # writes entries of its drafts at positions 11 and 12
    wrong = Row([TEXT[10], 7, 8, 9], 10, TABLE, world.hidden[9])  # as a round whose drafts are all rejected
    world.runner.decode([wrong])
    world.runner.decode([world.row(11, 12), Row([5], 0, [9], None)])
    got = world.runner.draft([world.row(12, 13), Row([6], 1, [9], np.ones(HIDDEN, np.float32))])
    assert got[0].tolist() == want[0].tolist()


@pytest.mark.parametrize("cuts", [(0, 6, 12, 13), (0, 3, 9, 13), (0, 5, 8, 12, 13)])
def test_entries_do_not_depend_on_how_the_text_was_computed(world, cuts):
    """Prefill chunks and decode steps of one or several tokens write the same entries, those of `mtp` itself."""
    world.fill(0.0)
    world.runner.prefill([world.row(0, 6)])
    world.runner.prefill([world.row(6, 12)])
    world.runner.decode([world.row(12, 13)])
    want = world.entries()
    assert np.abs(want).min(1).max() > 0
    world.fill(0.0)
    world.runner.prefill([world.row(cuts[0], cuts[1])])
    for start, stop in itertools.pairwise(cuts[1:]):
        run = world.runner.decode if stop - start <= 1 + K else world.runner.prefill
        run([world.row(start, stop)])
    assert difference(world.entries(), want) < TOLERANCE
    world.runner.draft([world.row(12, 13)])
    assert difference(world.entries(), want) < TOLERANCE


def test_a_runner_without_drafts_has_none(tiny):
    bucket = {"S": 1, "Q": 1, "B": 2}
    model = msds.load(tiny("v3_base"), mtp=False, progress=False)
    runner = Runner(model, num_blocks=3, block_size=4, prefill_buckets=[bucket], decode_buckets=[bucket])
    with pytest.raises(RuntimeError, match="without drafts"):
        runner.draft([Row([1], 0, [1])])
