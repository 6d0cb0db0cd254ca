"""What we write: read equal by the safetensors library, aligned, sharded, and whole or not at all."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from msds.checkpoint import Checkpoint, TensorSource, raw_source, tensor_source, write_checkpoint, write_file
from msds.errors import CheckpointError

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "uint8", "bool"])


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda t: t != "__metadata__"),
        st.tuples(shapes, dtypes),
        max_size=6,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_library_reads_what_we_write(tmp_path, tensors):
    arrays = {name: np.full(shape, 1.5, np.float32) for name, (shape, _) in tensors.items()}
    path = tmp_path / "x.safetensors"
    write_file(path, [tensor_source(name, arrays[name], dtype) for name, (_, dtype) in tensors.items()])
    read = load_file(path)
    assert read.keys() == arrays.keys()
    for name, tensor in read.items():
        expected = torch.from_numpy(arrays[name]).to(tensor.dtype)
        assert str(tensor.dtype).removeprefix("torch.") == tensors[name][1]
        assert torch.equal(tensor.float(), expected.float())


def test_every_tensor_is_aligned_to_its_type(tmp_path):
    sources = [
        tensor_source("a", np.zeros(3, np.uint8)),
        tensor_source("b", np.zeros(5), "bfloat16"),
        tensor_source("c", np.zeros(1)),
    ]
    write_checkpoint(tmp_path, sources)
    checkpoint = Checkpoint.open(tmp_path)
    for name, size in (("a", 1), ("b", 2), ("c", 8)):
        assert checkpoint.info(name).offsets[0] % size == 0


def test_shards_keep_the_order_and_the_limit(tmp_path):
    sources = [tensor_source(f"t{i}", np.full(10, i, np.float32)) for i in range(7)]
    paths = write_checkpoint(tmp_path, sources, max_shard_bytes=85)
    assert [path.name for path in paths[:4]] == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 280
    assert index["weight_map"]["t2"] == "model-00002-of-00004.safetensors"
    checkpoint = Checkpoint.open(tmp_path)
    assert not checkpoint.faults
    assert all((checkpoint.read(f"t{i}") == i).all() for i in range(7))


@pytest.mark.parametrize("problem", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupt_leaves_nothing_behind(tmp_path, problem):
    def fail():
        raise problem

    sources = [tensor_source("a", np.ones(4)), TensorSource("b", "float32", (4,), fail)]
    with pytest.raises(problem):
        write_checkpoint(tmp_path, sources, max_shard_bytes=8)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, [tensor_source("a", np.ones(4, np.float32))])
    with pytest.raises(CheckpointError, match=r"announced float32 \[5\], made float64 \[4\]"):
        write_file(path, [TensorSource("a", "float32", (5,), lambda: np.ones(4))])
    assert load_file(path)["a"].tolist() == [1, 1, 1, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_only_one_tensor_is_alive_at_a_time(tmp_path):
    alive = []

    def make():
        import weakref

        assert not any(reference() is not None for reference in alive)
        array = np.ones(1000, np.float32)
        alive.append(weakref.ref(array))
        return array

    write_checkpoint(tmp_path, [TensorSource(f"t{i}", "float32", (1000,), make) for i in range(4)])
    assert len(alive) == 4


def test_a_folder_with_a_checkpoint_is_not_mixed_with_another(tmp_path):
    write_checkpoint(tmp_path, [tensor_source("a", np.ones(4))])
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors"):
        write_checkpoint(tmp_path, [tensor_source("b", np.ones(4))])


def test_a_full_disk_is_noticed_before_writing(tmp_path):
    huge = TensorSource("a", "float32", (1 << 60,), lambda: pytest.fail("must not be made"))
    with pytest.raises(CheckpointError, match="needs 4611686018427387904 bytes"):
        write_checkpoint(tmp_path, [huge])


def test_a_name_given_twice_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="a is given twice"):
        write_file(tmp_path / "x.safetensors", [tensor_source("a", np.ones(4)), tensor_source("a", np.ones(4))])


def test_raw_bits_must_have_the_type_that_holds_them():
    with pytest.raises(CheckpointError, match="held as uint16, got float32"):
        raw_source("a", np.ones(4, np.float32), "bfloat16")
