"""Slices of ranks joined by strategy files, against MindSpore's own joining of the same files."""

import json
import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from msds.checkpoint.reading import ShardFiles
from msds.errors import CheckpointError
from msds.layouts.locate import read_contents
from msds.layouts.strategy import Slicing, read_strategy
from tests.layouts.training import write_strategy

SHAPE = (8, 12)

# device matrix, tensor map, optimiser step and size
CUTS = {
    "rows": ([2], [0, -1]),
    "columns": ([2], [-1, 0]),
    "repeated": ([2, 2], [0, -1]),
    "repeated_inner": ([2, 2], [1, -1]),
    "both": ([2, 2], [1, 0]),
    "both_swapped": ([2, 2], [0, 1]),
    "three": ([2, 3, 2], [2, 1]),
    "optimiser": ([2, 2], [0, -1], 2, 2),
    "optimiser_all": ([4, 2], [-1, 0], 2, -1),
    "optimiser_half": ([4, 2], [0, -1], 2, 2),
    "optimiser_inner": ([2, 2], [1, -1], 1, 2),
}


def write_slices(folder: Path, name: str, values: np.ndarray) -> None:
    """What every rank holds, from MindSpore's description of a layout, not from our reading of it."""
    devices, axes, *optimiser = CUTS[name]
    free = [place for place in range(len(devices)) if len(devices) - 1 - place not in axes]
    for rank in range(int(np.prod(devices))):
        place = np.unravel_index(rank, devices)
        part = values
        for axis, mapped in enumerate(axes):
            if mapped != -1:
                where = len(devices) - 1 - mapped
                part = np.split(part, devices[where], axis)[place[where]]
        if optimiser:
            size = optimiser[1]
            replica = int(np.ravel_multi_index([place[i] for i in free], [devices[i] for i in free]))
            size = int(np.prod([devices[i] for i in free])) if size == -1 else size
            part = np.split(part, size)[replica % size]
        (folder / f"rank_{rank}").mkdir(parents=True)
        save_file({"w": np.ascontiguousarray(part)}, folder / f"rank_{rank}" / "c.safetensors")


@pytest.mark.parametrize("name", CUTS)
def test_joined_as_mindspore_joins(name, tmp_path, monkeypatch):
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    write_slices(tmp_path / "ranks", name, values)
    write_strategy({"w": CUTS[name]}, tmp_path / "ranks" / "strategy.ckpt")
    tensor = read_contents(tmp_path / "ranks").tensors["w"]
    np.testing.assert_array_equal(tensor.read_rows(ShardFiles(), 0, SHAPE[0]), values)
    np.testing.assert_array_equal(tensor.read_rows(ShardFiles(), 3, 6), values[3:6])
    # MindSpore's function would take every core of the machine for this process, and leave it so.
    monkeypatch.setattr("mindspore.parallel.transform_safetensors.set_affinity_pid", lambda: None)
    ms.unified_safetensors(
        str(tmp_path / "ranks"), str(tmp_path / "ranks" / "strategy.ckpt"), str(tmp_path / "unified")
    )
    (joined,) = (tmp_path / "unified").glob("part*.safetensors")
    np.testing.assert_array_equal(load_file(joined)["w"], values)


def test_json_is_read_like_protobuf(tmp_path):
    layout = {"dev_matrix": [2, 2], "tensor_map": [1, [0]], "opt_weight_shard_step": 0, "opt_weight_shard_size": 0}
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps({"parallel_layout_item": {"0-w": layout}}))
    write_strategy({"w": ([2, 2], [1, 0])}, tmp_path / "strategy.ckpt")
    assert read_strategy(path) == read_strategy(tmp_path / "strategy.ckpt")
    assert read_strategy(path).slicings == {"w": Slicing((2, 2), ((1,), (0,)))}


def test_stages_have_their_own_tensors(tmp_path):
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    for rank, name in enumerate(["a", "a", "b", "b"]):
        (tmp_path / f"rank_{rank}").mkdir()
        save_file({name: values[2 * (rank % 2) :][:2].copy()}, tmp_path / f"rank_{rank}" / "c.safetensors")
    (tmp_path / "strategy").mkdir()
    write_strategy({"a": ([2], [0, -1])}, tmp_path / "strategy" / "stage_0.ckpt")
    write_strategy({"b": ([2], [0, -1])}, tmp_path / "strategy" / "stage_1.ckpt", stage=1)
    tensors = read_contents(tmp_path).tensors
    for name in "ab":
        np.testing.assert_array_equal(tensors[name].read_rows(ShardFiles(), 0, 4), values)


@pytest.fixture
def rows(tmp_path):
    write_slices(tmp_path / "ranks", "rows", np.zeros(SHAPE, np.float32))
    write_strategy({"w": CUTS["rows"]}, tmp_path / "ranks" / "strategy.ckpt")
    return tmp_path / "ranks"


def test_a_missing_rank(rows):
    (rows / "rank_1" / "c.safetensors").unlink()
    (rows / "rank_1").rmdir()
    with pytest.raises(CheckpointError, match="rank"):
        read_contents(rows)


def test_no_strategy(rows):
    (rows / "strategy.ckpt").unlink()
    with pytest.raises(CheckpointError, match="--strategy"):
        read_contents(rows)


def test_another_runs_strategy(rows):
    write_strategy({"w": ([4], [0, -1])}, rows / "strategy.ckpt")
    with pytest.raises(CheckpointError, match="another run"):
        read_contents(rows)


def test_several_steps(rows):
    for rank in range(2):
        place = rows / f"rank_{rank}"
        (place / "c.safetensors").rename(place / "c-1_10.safetensors")
        save_file({"w": np.ones((4, 12), np.float32)}, place / "c-1_20.safetensors")
    with pytest.raises(CheckpointError, match="--suffix"):
        read_contents(rows)
    tensor = read_contents(rows, suffix="1_20").tensors["w"]
    assert tensor.read_rows(ShardFiles(), 0, 8).all()


def test_a_map_that_does_not_fit(rows):
    write_strategy({"w": ([2], [3, -1])}, rows / "strategy.ckpt")
    with pytest.raises(CheckpointError, match=r"tensor map .* does not fit"):
        read_contents(rows)


def test_bytes_that_are_no_strategy(rows):
    (rows / "strategy.ckpt").write_bytes(b"\x1a\xff\x01")
    with pytest.raises(CheckpointError, match=r"strategy\.ckpt"):
        read_contents(rows)


def test_slices_that_leave_a_gap(tmp_path):
    write_slices(tmp_path, "repeated_inner", np.zeros(SHAPE, np.float32))
    write_strategy({"w": CUTS["repeated_inner"]}, tmp_path / "strategy.ckpt")
    shutil.rmtree(tmp_path / "rank_0")
    read_contents(tmp_path)  # rank 1 repeats its slice
    shutil.rmtree(tmp_path / "rank_1")
    with pytest.raises(CheckpointError, match=r"tensor w \[8, 12\]: .* hold 48 of 96 numbers"):
        read_contents(tmp_path)
