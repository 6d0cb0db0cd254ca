"""Each way in which a checkpoint can be damaged ends in one clear error, and all of them in one together."""

import json

import numpy as np
import pytest

from msds.checkpoint import Checkpoint, Entry, check_checkpoint, load, raw_source, tensor_source, write_file
from msds.errors import CheckpointError
from tests.checkpoint.damage import (
    ENTRIES,
    INDEX,
    SHAPES,
    edit_header,
    edit_index,
    header,
    shard,
    three_shards,
    values,
)


def truncate(folder):
    path = folder / shard(2)
    path.write_bytes(path.read_bytes()[:-1])


def append(folder):
    with (folder / shard(2)).open("ab") as file:
        file.write(b"xy")


def delete(folder):
    (folder / shard(3)).unlink()


def huge_header(folder):
    (folder / shard(1)).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def not_json(folder):
    (folder / shard(1)).write_bytes((9).to_bytes(8, "little") + b"{'a': 1 }")


def deep_json(folder):
    (folder / shard(1)).write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)


def duplicate_key(folder):
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    text = f'{{"x": {entry}, "x": {entry}}}'.encode()
    (folder / shard(1)).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


def pointer(folder):
    oid = "0" * 64
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 4976698672\n"
    (folder / shard(1)).write_text(text)


def empty_file(folder):
    (folder / shard(1)).write_bytes(b"")


def overlap(folder):
    def change(entries):
        entries["a.weight"] |= {"shape": [3, 4], "data_offsets": [0, 48]}
        entries["d"] = {"dtype": "F32", "shape": [13], "data_offsets": [44, 96]}

    edit_header(folder / shard(1), change)


def gap(folder):
    edit_header(folder / shard(1), lambda e: e["a.weight"].update(shape=[5, 4], data_offsets=[16, 96]))


def outside(folder):
    edit_header(folder / shard(1), lambda e: e["a.weight"].update(shape=[600, 4], data_offsets=[0, 9600]))


def wrong_length(folder):
    edit_header(folder / shard(1), lambda e: e["a.weight"].update(shape=[6, 5]))


def unknown_type(folder):
    edit_header(folder / shard(1), lambda e: e["a.weight"].update(dtype="F4"))


def negative_shape(folder):
    edit_header(folder / shard(1), lambda e: e["a.weight"].update(shape=[-6, -4]))


def index_lists_more(folder):
    edit_index(folder, lambda index: index["weight_map"].update({"z.weight": shard(2)}))


def index_lists_less(folder):
    edit_index(folder, lambda index: index["weight_map"].pop("b.weight"))
    edit_index(folder, lambda index: index["weight_map"].update({"q": shard(2)}))


def index_outside(folder):
    edit_index(folder, lambda index: index["weight_map"].update({"a.weight": "../other.safetensors"}))


def index_not_json(folder):
    (folder / INDEX).write_text("{")


def index_without_map(folder):
    edit_index(folder, lambda index: index.pop("weight_map"))


def lost_index_and_shard(folder):
    (folder / INDEX).unlink()
    delete(folder)


def duplicate_tensor(folder):
    (folder / INDEX).unlink()
    (folder / shard(2)).write_bytes((folder / shard(1)).read_bytes())


def integer_weight(folder):
    write_file(folder / shard(1), [tensor_source("a.weight", np.zeros(SHAPES["a.weight"], np.int8))])


def wrong_shape(folder):
    write_file(folder / shard(1), [tensor_source("a.weight", np.zeros((4, 6), np.float32))])


def no_scales(folder):
    write_file(folder / shard(1), [raw_source("a.weight", np.zeros(SHAPES["a.weight"], np.uint8), "float8_e4m3fn")])


FAULTS = [
    (truncate, rf"{shard(2)}: is truncated: expected (\d+) bytes, has (\d+)"),
    (append, rf"{shard(2)}: has 2 bytes too many: expected \d+, has \d+"),
    (delete, rf"{shard(3)} is missing; it holds tensor c\.weight"),
    (huge_header, rf"{shard(1)}: states a header of 4611686018427387904 bytes"),
    (not_json, rf"{shard(1)}: its header is not JSON"),
    (deep_json, rf"{shard(1)}: its header is not JSON"),
    (duplicate_key, rf"{shard(1)}: its header has 'x' twice"),
    (
        pointer,
        rf"{shard(1)}: is a git-lfs pointer of \d+ bytes, the real file has 4976698672; run 'git lfs pull'",
    ),
    (empty_file, rf"{shard(1)}: has 0 bytes"),
    (overlap, rf"{shard(1)}: tensors a\.weight and d overlap"),
    (gap, rf"{shard(1)}: 16 bytes between the header and a\.weight belong to no tensor"),
    (outside, rf"{shard(1)}: is truncated"),
    (wrong_length, rf"{shard(1)}: tensor a\.weight: F32 \[6, 5\] needs 120 bytes, .* hold 96"),
    (unknown_type, rf"{shard(1)}: tensor a\.weight: number type 'F4' is not known"),
    (negative_shape, rf"{shard(1)}: tensor a\.weight: shape \[-6, -4\]"),
    (index_lists_more, rf"{shard(2)} does not hold tensor z\.weight"),
    (index_lists_less, rf"{shard(2)} holds tensor b\.weight, which {INDEX} does not list"),
    (index_outside, r"a\.weight in '\.\./other\.safetensors'"),
    (index_not_json, rf"{INDEX} is not readable JSON"),
    (index_without_map, rf"{INDEX} has no weight_map"),
    (lost_index_and_shard, rf"{shard(3)} is missing \(there is no index"),
    (duplicate_tensor, rf"tensor a\.weight is in {shard(1)} and in {shard(2)}"),
    (integer_weight, r"tensor a\.weight is stored as int8"),
    (wrong_shape, r"tensor a\.weight has shape \[4, 6\], the config asks for \[6, 4\]"),
    (no_scales, r"tensor a\.weight is float8 but lacks its scales a\.weight_scale_inv"),
]


@pytest.mark.parametrize(("spoil", "message"), FAULTS, ids=[spoil.__name__ for spoil, _ in FAULTS])
def test_a_damaged_checkpoint_is_refused_with_the_reason(tmp_path, spoil, message):
    three_shards(tmp_path)
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(Checkpoint.open(tmp_path), ENTRIES)


def test_the_undamaged_checkpoint_loads(tmp_path):
    arrays = load(Checkpoint.open(three_shards(tmp_path)), ENTRIES)
    for name in SHAPES:
        np.testing.assert_array_equal(arrays[name.removesuffix(".weight")], values(name))


def test_truncation_states_both_sizes(tmp_path):
    size = (three_shards(tmp_path) / shard(2)).stat().st_size
    truncate(tmp_path)
    with pytest.raises(CheckpointError, match=f"expected {size} bytes, has {size - 1}"):
        check_checkpoint(Checkpoint.open(tmp_path), ENTRIES)


def test_all_faults_come_in_one_error(tmp_path):
    three_shards(tmp_path)
    truncate(tmp_path)
    delete(tmp_path)
    entries = [*ENTRIES, Entry("d", ("d.weight",), (2, 2)), Entry("a2", ("a.weight2",), (1,))]
    wrong_shape(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(Checkpoint.open(tmp_path), entries)
    lines = str(caught.value).splitlines()
    assert "5 faults" in lines[0]
    parts = (
        "is truncated",
        "is missing; it holds",
        "d lacks tensor d.weight",
        "a2 lacks tensor a.weight2",
        "has shape",
    )
    for part in parts:
        assert sum(part in line for line in lines) == 1
    assert len(lines) == 6, "a tensor of a damaged file is not reported a second time as missing"


def test_a_model_of_another_size_does_not_flood_the_terminal(tmp_path):
    three_shards(tmp_path)
    entries = [*ENTRIES, *(Entry(f"p{i}", (f"t{i}",), (1,)) for i in range(5000))]
    with pytest.raises(CheckpointError, match=r"5000 faults[\s\S]*and 4960 more like these") as caught:
        check_checkpoint(Checkpoint.open(tmp_path), entries)
    assert len(str(caught.value)) < 4000


def test_checking_reads_no_values(tmp_path):
    checkpoint = Checkpoint.open(three_shards(tmp_path))
    check_checkpoint(checkpoint, ENTRIES)
    assert checkpoint.files.bytes_read == 0


def test_a_tensor_of_a_damaged_file_cannot_be_read(tmp_path):
    three_shards(tmp_path)
    truncate(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names() == ["a.weight", "c.weight"]
    with pytest.raises(CheckpointError, match=r"b\.weight.*is truncated"):
        checkpoint.read("b.weight")


def test_a_file_that_shrinks_after_opening_is_an_error(tmp_path):
    checkpoint = Checkpoint.open(three_shards(tmp_path))
    truncate(tmp_path)
    with pytest.raises(CheckpointError, match=f"{shard(2)} ends at byte"):
        checkpoint.read("b.weight")


def test_a_folder_without_a_checkpoint_says_what_it_has(tmp_path):
    with pytest.raises(CheckpointError, match=r"no safetensors files$"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="pickled"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="msds convert"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint.open(tmp_path / "absent")


@pytest.mark.parametrize("bad", [header(x=1), header(x={"dtype": "F32"}), header(x={"dtype": "F32", "shape": [True]})])
def test_nonsense_entries_are_refused(tmp_path, bad):
    (tmp_path / "model.safetensors").write_bytes(bad)
    assert "tensor x" in Checkpoint.open(tmp_path).faults[0]
