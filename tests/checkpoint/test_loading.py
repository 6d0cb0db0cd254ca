"""The ledger and the load itself: every place once, strays named, slices, memory, non-finite values."""

import tracemalloc
import warnings
from dataclasses import replace

import numpy as np
import pytest

from msds.checkpoint import (
    Checkpoint,
    CheckpointWarning,
    Entry,
    Ledger,
    Skip,
    check_checkpoint,
    load,
    raw_source,
    tensor_source,
    write_checkpoint,
)
from msds.errors import CheckpointError
from tests.checkpoint.damage import ENTRIES, three_shards, values

EXPERTS, ROWS, COLUMNS = 8, 6, 4


def expert(index):
    return f"layers.0.experts.{index}.up.weight"


STACK = Entry(
    "layers.0.experts.up",
    tuple(map(expert, range(EXPERTS))),
    (EXPERTS, ROWS, COLUMNS),
    "float32",
    stacked=True,
)


@pytest.fixture
def experts(tmp_path):
    """A folder with eight experts and an embedding, and their values."""
    rng = np.random.default_rng(0)
    stack = rng.standard_normal((EXPERTS, ROWS, COLUMNS)).astype(np.float32)
    embed = rng.standard_normal((10, COLUMNS)).astype(np.float32)
    # out of order in the file: the stack's order is the entry's
    sources = [tensor_source(expert(i), stack[i]) for i in (3, 0, 7, 1, 2, 6, 5, 4)]
    write_checkpoint(tmp_path, [*sources, tensor_source("embed.weight", embed)])
    return Checkpoint.open(tmp_path), stack, embed


EMBED = Entry("embed", ("embed.weight",), (10, COLUMNS))


def test_a_rank_holds_chosen_experts_and_rows_of_padding(experts):
    """Slots of a placement, in its order; the last part of a table is filled up with zeros."""
    checkpoint, stack, embed = experts
    rows = replace(STACK, rows=(6, 1, 3), index=(slice(0, EXPERTS), slice(2, 5)))
    table = replace(EMBED, index=(slice(8, 10),), padding=2)
    before = checkpoint.files.bytes_read
    arrays = load(checkpoint, [table, rows])
    np.testing.assert_array_equal(arrays[STACK.path], stack[[6, 1, 3], 2:5])
    np.testing.assert_array_equal(arrays["embed"], [*embed[8:], *np.zeros((2, COLUMNS), np.float32)])
    assert checkpoint.files.bytes_read - before == 4 * COLUMNS * (3 * 3 + 2)
    assert table.nbytes == 4 * COLUMNS * 4
    with pytest.raises(CheckpointError, match=r"cannot be held as rows \[8\]"):
        replace(STACK, rows=(8,))


def test_experts_are_stacked_in_the_order_of_their_entry(experts):
    checkpoint, stack, embed = experts
    arrays = load(checkpoint, [EMBED, STACK])
    assert list(arrays) == ["embed", "layers.0.experts.up"]
    np.testing.assert_array_equal(arrays["layers.0.experts.up"], stack)
    np.testing.assert_array_equal(arrays["embed"], embed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_load_as_the_type_asked_for(experts, dtype):
    checkpoint, stack, _ = experts
    entry = Entry(STACK.path, STACK.names, STACK.shape, dtype, stacked=True)
    got = load(checkpoint, [entry], [Skip("embed.*", "not part of this test")])[STACK.path]
    if dtype == "bfloat16":
        torch = pytest.importorskip("torch")
        np.testing.assert_array_equal(got, torch.from_numpy(stack).bfloat16().view(torch.uint16).numpy())
    else:
        np.testing.assert_array_equal(got, stack.astype(dtype))


def test_a_rank_reads_only_its_part(experts):
    checkpoint, stack, embed = experts
    index = (slice(2, 4), slice(1, 5))
    mine = Entry(STACK.path, STACK.names, STACK.shape, stacked=True, index=index)
    rows = Entry("embed", ("embed.weight",), (10, COLUMNS), index=(slice(5, 10),))
    arrays = load(checkpoint, [mine, rows])
    np.testing.assert_array_equal(arrays[STACK.path], stack[index])
    np.testing.assert_array_equal(arrays["embed"], embed[5:])
    assert checkpoint.files.bytes_read == sum(array.nbytes for array in arrays.values())


def test_the_ledgers_of_two_ranks_make_up_that_of_one(experts):
    checkpoint, _, _ = experts
    halves = [
        Ledger(
            [Entry(STACK.path, STACK.names, STACK.shape, stacked=True, index=(part,)), EMBED],
            checkpoint.tensors,
        )
        for part in (slice(0, 4), slice(4, 8))
    ]
    whole = Ledger([STACK, EMBED], checkpoint.tensors)
    assert halves[0].used | halves[1].used == whole.used
    assert halves[0].elsewhere == {expert(i) for i in range(4, 8)}
    assert not whole.elsewhere
    assert not any(half.strays for half in halves)


def test_strays_are_named_in_one_warning_and_skips_are_not(experts):
    checkpoint, _, _ = experts
    with pytest.warns(CheckpointWarning, match=r"does not use: tensor embed\.weight") as caught:
        load(checkpoint, [STACK])
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(checkpoint, [STACK], [Skip("embed.*", "the other half")])
    assert check_checkpoint(checkpoint, [STACK], [Skip("embed.*", "the other half")]).skipped == {
        "embed.weight": "the other half"
    }


def test_a_missing_expert_is_named(experts):
    checkpoint, _, _ = experts
    names = (*STACK.names[:-1], expert(99))
    with pytest.raises(CheckpointError, match=r"layers\.0\.experts\.up lacks tensor layers\.0\.experts\.99"):
        load(checkpoint, [Entry(STACK.path, names, STACK.shape, stacked=True), EMBED])


def test_entries_may_not_contradict_each_other(experts):
    checkpoint, _, _ = experts
    with pytest.raises(CheckpointError, match="embed has two entries"):
        Ledger([EMBED, EMBED], checkpoint.tensors)
    with pytest.raises(CheckpointError, match=r"embed\.weight would fill both embed and head"):
        Ledger([EMBED, Entry("head", ("embed.weight",), (10, COLUMNS))], checkpoint.tensors)
    with pytest.raises(CheckpointError, match="3 tensors"):
        Entry("x", ("a", "b", "c"), (2, 4), stacked=True)
    with pytest.raises(CheckpointError, match="'int8'"):
        Entry("x", ("a",), (2, 4), "int8")
    with pytest.raises(CheckpointError, match="axis 0"):
        Entry("x", ("a",), (2, 4), index=(slice(0, 3),))


def test_each_place_is_filled_exactly_once(experts):
    checkpoint, _, _ = experts
    ledger = Ledger([EMBED], checkpoint.tensors)
    with pytest.raises(CheckpointError, match=r"embed \(from embed\.weight\)"):
        ledger.close()
    ledger.fill("embed.weight")
    with pytest.raises(CheckpointError, match=r"embed\.weight was read twice"):
        ledger.fill("embed.weight")
    ledger.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
def test_a_value_that_is_not_finite_is_named_with_its_position(tmp_path, bad, stored, loaded):
    array = np.ones((300, 5), np.float32)
    array[217, 3] = bad
    array[250, 1] = bad
    write_checkpoint(tmp_path, [tensor_source("w", array, stored)])
    with pytest.raises(CheckpointError, match=rf"tensor w \({stored}\) is not finite at \[217, 3\]"):
        load(Checkpoint.open(tmp_path), [Entry("w", ("w",), (300, 5), loaded)])
    part = (slice(200, 300), slice(2, 5))
    with pytest.raises(CheckpointError, match=r"\[217, 3\]"):
        load(Checkpoint.open(tmp_path), [Entry("w", ("w",), (300, 5), loaded, index=part)])
    clean = Entry("w", ("w",), (300, 5), loaded, index=(slice(0, 217),))
    load(Checkpoint.open(tmp_path), [clean])


def test_a_value_beyond_the_type_asked_for_is_refused(tmp_path):
    write_checkpoint(tmp_path, [tensor_source("w", np.array([1, 1e30], np.float32))])
    with pytest.raises(CheckpointError, match=r"not finite at \[1\] when loaded as float16"):
        load(Checkpoint.open(tmp_path), [Entry("w", ("w",), (2,), "float16")])


def test_float8_weights_are_scaled_and_their_scales_accounted_for(tmp_path):
    codes = np.full((24, 20), 0x38, np.uint8)
    scales = np.arange(4, dtype=np.float32).reshape(2, 2) + 1
    sources = [raw_source("w", codes, "float8_e4m3fn"), tensor_source("w_scale_inv", scales)]
    stray = (
        tensor_source("v", np.ones((2, 2), np.float32)),
        tensor_source("v_scale_inv", np.ones((1, 1), np.float32)),
    )
    write_checkpoint(tmp_path, [*sources, *stray])
    checkpoint = Checkpoint.open(tmp_path, weight_block_size=(16, 16))
    entries = [Entry("w", ("w",), (24, 20), "bfloat16"), Entry("v", ("v",), (2, 2))]
    with pytest.warns(CheckpointWarning, match="v_scale_inv"):  # v is not float8: its scales belong to nothing
        arrays = load(checkpoint, entries)
    assert check_checkpoint(checkpoint, entries).scales == {"w_scale_inv"}
    one_to_four = np.array([[0x3F80, 0x4000], [0x4040, 0x4080]], np.uint16)
    np.testing.assert_array_equal(arrays["w"][[0, 23]][:, [0, 19]], one_to_four)


def test_memory_is_that_of_the_result_and_a_few_pieces(tmp_path):
    count, shape = 3, (2048, 2048)
    array = np.ones(shape, np.float32)
    names = tuple(f"e.{i}" for i in range(count))
    write_checkpoint(tmp_path, [tensor_source(name, array, "bfloat16") for name in names])
    checkpoint = Checkpoint.open(tmp_path)
    for dtype, item in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        entry = Entry("e", names, (count, *shape), dtype, stacked=True)
        tracemalloc.start()
        load(checkpoint, [entry])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        result, tensor = count * array.size * item, array.size * 4
        assert peak < result + tensor, f"{dtype}: {peak - result} bytes beside the result"


def test_all_shards_load_with_a_bar_when_asked(tmp_path, capsys):
    load(Checkpoint.open(three_shards(tmp_path)), ENTRIES)
    assert capsys.readouterr().err == ""
    arrays = load(Checkpoint.open(tmp_path), ENTRIES, progress=True)
    np.testing.assert_array_equal(arrays["b"], values("b.weight"))
    assert "load: 100%" in capsys.readouterr().err
