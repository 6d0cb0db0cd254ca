"""However a text is cut, batched, ordered, padded and placed in the cache, its logits are those of the definition."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msds
from msds.engine.batch import BATCH_SPEC, build_batch
from msds.engine.runner import StepResult
from msds_graphs.binding import assign
from msds_graphs.plan import Plan
from tests.models.compare import TOLERANCE, difference
from tests.models.kit import (
    BLOCK_SIZE,
    BLOCKS_PER_TEXT,
    CHUNK,
    MAX_LEN,
    MAX_SEQS,
    NUM_BLOCKS,
    TEXTS,
    Kit,
    Part,
    tables,
    values_of,
)
from tests.reference.checkpoints import reference_logits

SAME_STEP = TOLERANCE / 10
"""Between runs of the same tokens through the same graph, or through two forms of one step."""

POISON = 1e30
"""What unread slots hold: a masked key may be anything finite, and 0 x 1e30 is 0."""

STRAIGHT = tables(range(1, NUM_BLOCKS))


@pytest.fixture(scope="module")
def kits(tiny):
    """kits(name): one Kit per variant, so that each graph is compiled once."""
    return functools.cache(lambda name: Kit(tiny(name)))


@pytest.fixture(scope="module", params=["v3_base", "llama_base"])
def kit(request, kits):
    return kits(request.param)


@pytest.fixture(scope="module")
def deepseek(kits):
    return kits("v3_base")


@st.composite
def schedules(draw):
    """Steps of 1 to 3 texts of any lengths, [(is_decode, [Part])]: chunks, order, company and blocks are drawn."""
    count = draw(st.integers(1, MAX_SEQS))
    table = tables(draw(st.permutations(range(1, NUM_BLOCKS))))
    chosen = draw(st.lists(st.integers(0, len(TEXTS) - 1), min_size=count, max_size=count))
    lengths = draw(st.lists(st.integers(1, MAX_LEN), min_size=count, max_size=count))
    done = [0] * count
    steps = []
    while any(done[i] < lengths[i] for i in range(count)):
        waiting = [i for i in range(count) if done[i] < lengths[i]]
        some = draw(st.permutations(waiting))[: draw(st.integers(1, len(waiting)))]
        is_decode = draw(st.integers(0, 3)) == 0  # mostly chunks: a decode step takes a whole call for few tokens
        parts = []
        for i in some:
            size = 1 if is_decode else min(draw(st.integers(1, CHUNK)), lengths[i] - done[i])
            parts.append(Part(chosen[i], done[i], size, table[i]))
            done[i] += size
        steps.append((is_decode, parts))
    return steps


@settings(max_examples=12)
@given(steps=schedules())
def test_any_schedule_gives_the_logits_of_the_definition(kit, steps):
    """Chunk splits, batch compositions, row orders and block tables, prefill and decode mixed, over a dirty cache."""
    kit.fill_cache(POISON)
    for is_decode, parts in steps:
        result = kit.decode(parts) if is_decode else kit.prefill(parts)
        assert kit.deviation(parts, result) < TOLERANCE, (is_decode, parts)


@settings(max_examples=10)
@given(length=st.integers(1, MAX_LEN - 1), text=st.integers(0, len(TEXTS) - 1))
def test_absorbed_equals_naive(deepseek, length, text):
    """The same token over the same cache, by decode and by a prefill of one."""
    deepseek.fill_cache(0.0)
    for start in range(0, length, CHUNK):
        deepseek.prefill([Part(text, start, min(CHUNK, length - start), STRAIGHT[0])])
    last = [Part(text, length, 1, STRAIGHT[0])]
    naive = deepseek.prefill(last).logits[0, 0]
    absorbed = deepseek.decode(last).logits[0, 0]
    assert difference(absorbed, naive) < SAME_STEP


def test_contents_of_padding_do_not_matter(kit):
    """Padding tokens, their positions and tables may be anything legal, as long as they write to block 0."""
    step = kit.runner._prefill
    parts = [Part(0, 0, 5, STRAIGHT[0]), Part(1, 0, 2, STRAIGHT[1])]
    rows = [part.row for part in parts]
    clean = build_batch(rows, block_size=BLOCK_SIZE, num_cache_blocks=NUM_BLOCKS, vocab_size=512)
    kit.fill_cache(0.0)
    want = kit.prefill(parts)
    rng = np.random.default_rng(1)
    bucket = {"S": MAX_SEQS, "Q": CHUNK, "B": BLOCKS_PER_TEXT}
    batch = {name: np.zeros(spec.resolve(bucket).shape, np.int32) for name, spec in BATCH_SPEC.items()}
    for name, values in clean.items():
        batch[name][tuple(slice(size) for size in values.shape)] = values
    is_padding = np.arange(CHUNK)[None] >= batch["query_lens"][:, None]
    batch["tokens"][is_padding] = rng.integers(0, 512, is_padding.sum())
    batch["positions"][is_padding] = rng.integers(0, MAX_LEN, is_padding.sum())
    batch["slot_mapping"][is_padding] = rng.integers(0, BLOCK_SIZE, is_padding.sum())
    batch["block_tables"][2] = STRAIGHT[0]  # the row of nobody looks at another's blocks
    kit.fill_cache(POISON)
    got = step(batch)
    for index, part in enumerate(parts):
        assert difference(got["hidden"][index, : part.count], want.hidden[index, : part.count]) < SAME_STEP
        assert difference(got["logits"][index, 0], want.logits[index, part.count - 1]) < SAME_STEP
    assert got["is_finite"][:2].all()


def test_which_blocks_a_text_lies_in_does_not_matter(kit):
    """The same chunks through two tables: the cached values lie elsewhere, the logits are equal bit for bit."""
    scattered = tables([*range(NUM_BLOCKS - 1, 0, -1)])
    seen = []
    for table in (STRAIGHT, scattered):
        kit.fill_cache(0.0)
        kit.prefill([Part(2, 0, 7, table[0])])
        seen.append(kit.prefill([Part(2, 7, 8, table[0])]).logits)
    np.testing.assert_array_equal(seen[0], seen[1])


def test_reference_implementations_equal_the_portable_ones(kit):
    """Copying writers and every expert for every token: the same logits, and the same cache outside block 0."""
    impl = {"cache_write": "reference", "moe_experts": "reference"}
    both = [kit, Kit(kit.model.folder, Plan(impl))]
    for each in both:
        each.fill_cache(0.0)
    steps = [
        (False, [Part(0, 0, 8, STRAIGHT[0]), Part(1, 0, 3, STRAIGHT[1])]),
        (False, [Part(1, 3, 1, STRAIGHT[1]), Part(2, 0, 6, STRAIGHT[2]), Part(0, 8, 5, STRAIGHT[0])]),
        (True, [Part(2, 6, 1, STRAIGHT[2]), Part(0, 13, 1, STRAIGHT[0])]),
    ]
    scale = float(np.abs(kit.defined).max())
    for is_decode, parts in steps:
        portable, reference = (each.decode(parts) if is_decode else each.prefill(parts) for each in both)
        for index, part in enumerate(parts):
            gap = portable.logits[index, : part.count] - reference.logits[index, : part.count]
            assert np.abs(gap).max() / scale < SAME_STEP
    for portable, reference in zip(*(each.cache_pages() for each in both), strict=True):
        assert difference(portable, reference) < SAME_STEP
        assert np.abs(reference).max() > 0


class TestBrokenSequence:
    """A token whose hidden state is not finite ends its own text and touches no other."""

    @pytest.fixture
    def broken(self, kit):
        """The kit with NaN in the embedding of the first token of text 3 that no other text has."""
        others = set(np.delete(TEXTS, 3, axis=0).ravel().tolist())
        token = next(int(token) for token in TEXTS[3] if int(token) not in others)
        values = values_of(kit.model.params)
        spoiled = np.array(values["embed_tokens"]["weight"])
        spoiled[token] = np.nan
        assert kit.defined.any()  # computed before the weights are spoiled
        assign(kit.model.params["embed_tokens"]["weight"], spoiled)
        yield kit, TEXTS[3].tolist().index(token)
        assign(kit.model.params["embed_tokens"]["weight"], values["embed_tokens"]["weight"])

    def test_neighbours_and_later_owners_of_its_blocks_are_well(self, broken):
        kit, place = broken
        start = max(0, place - 3)
        kit.fill_cache(0.0)
        bad, good = Part(3, start, CHUNK, STRAIGHT[0]), Part(0, 0, CHUNK, STRAIGHT[1])
        result = kit.prefill([bad, good])
        assert result.is_finite.all(1).tolist() == [False, True]
        assert kit.deviation([good], StepResult(result.logits[1:], result.hidden[1:], result.is_finite[1:])) < TOLERANCE
        assert all(np.isfinite(page).all() for page in kit.cache_pages())
        next_owner = [Part(1, 0, 5, STRAIGHT[0])]  # of the same blocks, leaving their last slots as they are
        assert kit.deviation(next_owner, kit.prefill(next_owner)) < TOLERANCE
        next_token = [Part(1, 5, 1, STRAIGHT[0]), Part(0, 8, 1, STRAIGHT[1])]
        assert kit.deviation(next_token, kit.decode(next_token)) < TOLERANCE


def test_new_weights_reach_every_compiled_step(deepseek, tiny):
    """`assign` of another checkpoint's derived tree: forward, prefill and decode follow, the absorbed halves too."""
    kit = deepseek
    assert kit.defined.any()
    before = values_of(kit.model.params)
    parts = [Part(0, 0, 8, STRAIGHT[0])]
    kit.prefill(parts)
    kit.decode([Part(0, 8, 1, STRAIGHT[0])])
    other = tiny("v3_base", seed=1)
    want = reference_logits("v3_base", other, TEXTS[0][:9])
    assign(kit.model.params, values_of(msds.load(other, mtp=False, progress=False).params))
    try:
        assert difference(kit.model.logits(TEXTS[0][:9]), want) < TOLERANCE
        assert difference(kit.prefill(parts).logits[0], want[:8]) < TOLERANCE
        assert difference(kit.decode([Part(0, 8, 1, STRAIGHT[0])]).logits[0], want[8:]) < TOLERANCE
    finally:
        assign(kit.model.params, before)
    assert difference(kit.model.logits(TEXTS[0]), kit.defined[0]) < SAME_STEP
