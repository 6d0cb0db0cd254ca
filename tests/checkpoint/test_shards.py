"""Reading tensors and slices: equal to what was written, by us or by others, and no byte too many."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from msds.checkpoint import Checkpoint, raw_source, tensor_source, write_checkpoint
from msds.errors import CheckpointError
from tests.checkpoint.damage import INDEX, SHAPES, shard, three_shards, values

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_torch_wrote_is_read_equal(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(3, 5, 7, generator=generator) * 10).to(dtype)
    save_file(
        {"x": tensor, "scalar": tensor[0, 0, 0].clone(), "empty": tensor[:0].clone()},
        tmp_path / "model.safetensors",
    )
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.info("x").shape == (3, 5, 7)
    raw = checkpoint.read("x", raw=True)
    assert raw.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert checkpoint.read("scalar", raw=True).shape == ()
    assert checkpoint.read("empty", raw=True).shape == (0, 5, 7)
    if dtype is torch.bfloat16:
        np.testing.assert_array_equal(checkpoint.read("x"), tensor.float().numpy())
    elif not dtype.is_floating_point or dtype.itemsize > 1:
        np.testing.assert_array_equal(checkpoint.read("x"), tensor.numpy())


@pytest.mark.parametrize("options", [{}, {"shards": 3, "dtype": "bfloat16"}], ids=["one file", "bf16 shards"])
def test_what_transformers_wrote_is_read_equal(tiny, options):
    folder = tiny("v3_base", **options)
    checkpoint = Checkpoint.open(folder)
    assert not checkpoint.faults
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                np.testing.assert_array_equal(checkpoint.read(name), file.get_tensor(name).float().numpy())
                count += 1
    assert count == len(checkpoint.names()) > 100


@pytest.fixture(scope="module")
def cube(tmp_path_factory):
    """One tensor [5, 6, 7], in a type without conversion and in one with, and its values."""
    array = np.arange(5 * 6 * 7, dtype=np.float32).reshape(5, 6, 7)
    folder = tmp_path_factory.mktemp("cube")
    write_checkpoint(folder, [tensor_source("float32", array), tensor_source("bfloat16", array, "bfloat16")])
    return Checkpoint.open(folder), array


def parts(size):
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: slice(min(ends), max(ends)))


@given(
    st.sampled_from(["float32", "bfloat16"]),
    st.one_of(st.tuples(parts(5)), st.tuples(parts(5), parts(6)), st.tuples(parts(5), parts(6), parts(7))),
)
def test_any_slice_equals_the_slice_of_the_whole_and_reads_only_its_bytes(cube, name, index):
    checkpoint, array = cube
    before = checkpoint.files.bytes_read
    got = checkpoint.read(name, index)
    np.testing.assert_array_equal(got, array[index])
    item = 4 if name == "float32" else 2
    assert checkpoint.files.bytes_read - before == got.size * item


@pytest.mark.parametrize(
    "index", [(slice(0, 6),), (slice(-1, None),), (slice(0, 4, 2),), (slice(None),) * 4, (slice(3, 1),)]
)
def test_a_slice_outside_the_tensor_is_refused(cube, index):
    with pytest.raises(CheckpointError, match="float32"):
        cube[0].read("float32", index)


def test_tensors_larger_than_a_piece(tmp_path):
    array = np.random.default_rng(0).standard_normal((1500, 2003)).astype(np.float32)
    write_checkpoint(tmp_path, [tensor_source("x", array, "bfloat16"), tensor_source("y", array)])
    checkpoint = Checkpoint.open(tmp_path)
    expected = torch.from_numpy(array).bfloat16().float().numpy()
    np.testing.assert_array_equal(checkpoint.read("x"), expected)
    np.testing.assert_array_equal(checkpoint.read("x", (slice(7, 1499), slice(1, 2002))), expected[7:1499, 1:2002])
    np.testing.assert_array_equal(checkpoint.read("y", (slice(None), slice(1000, None))), array[:, 1000:])


def test_without_an_index_all_files_count(tmp_path):
    (three_shards(tmp_path) / INDEX).unlink()
    checkpoint = Checkpoint.open(tmp_path)
    assert not checkpoint.faults
    for name in SHAPES:
        np.testing.assert_array_equal(checkpoint.read(name), values(name))


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path):
    three_shards(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not for us")
    assert not Checkpoint.open(tmp_path).faults


def test_info_says_where_a_tensor_lies(tmp_path):
    info = Checkpoint.open(three_shards(tmp_path)).info("b.weight")
    assert (info.dtype, info.shape, info.file, info.nbytes) == ("float32", (3, 8), tmp_path / shard(2), 96)
    start, stop = info.offsets
    assert info.file.read_bytes()[start:stop] == values("b.weight").tobytes()


def test_reading_into_a_wrong_array_is_refused(cube):
    checkpoint, _ = cube
    with pytest.raises(CheckpointError, match="shape"):
        checkpoint.read_into("float32", np.empty((5, 6), np.float32), "float32")
    with pytest.raises(CheckpointError, match="uint16"):
        checkpoint.read_into("float32", np.empty((5, 6, 7), np.float32), "bfloat16")


def test_closing_is_not_the_end(cube):
    checkpoint, array = cube
    checkpoint.read("float32")
    checkpoint.close()
    np.testing.assert_array_equal(checkpoint.read("float32"), array)


def test_block_sizes_must_be_two_positive_numbers(tmp_path):
    write_checkpoint(tmp_path, [raw_source("w", np.zeros((2, 2), np.uint8), "float8_e4m3fn")])
    with pytest.raises(CheckpointError, match=r"weight_block_size.*\(128, 0\)"):
        Checkpoint.open(tmp_path, weight_block_size=(128, 0))
