"""The .ckpt reader against files that MindSpore writes and reads itself."""

import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore.train.checkpoint_pb2 import Checkpoint

from msds.checkpoint.reading import ShardFiles
from msds.errors import CheckpointError
from msds.layouts.ckpt import read_ckpt
from msds.layouts.stored import whole

KINDS = ["float32", "float16", "float64", "int32", "int64", "int8", "uint8", "bool"]


def write(path: Path, values: dict, **options) -> Path:
    tensors = [{"name": name, "data": ms.Tensor(value)} for name, value in values.items()]
    ms.save_checkpoint(tensors, str(path), **options)
    return path


def rows(path: Path, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
    tensor = whole(read_ckpt(path)[0][name])
    stop = stop if stop is not None else (tensor.shape[0] if tensor.shape else 1)
    return tensor.read_rows(ShardFiles(), start, stop)


@pytest.mark.parametrize("crc", [False, True])
def test_every_number_type(tmp_path, crc):
    rng = np.random.default_rng(0)
    values = {f"a.{kind}": (rng.standard_normal((3, 5)) * 50).astype(kind) for kind in KINDS}
    path = write(tmp_path / "all.ckpt", values, crc_check=crc)
    tensors, others = read_ckpt(path)
    assert tensors.keys() == values.keys() == ms.load_checkpoint(str(path)).keys()
    assert not others
    for name, value in values.items():
        assert tensors[name].dtype == name.removeprefix("a.")
        np.testing.assert_array_equal(rows(path, name), value)


def test_bfloat16_bits(tmp_path):
    values = np.array([[1.0, -2.5], [3.140625, 0.0]], np.float32)
    ms.save_checkpoint([{"name": "w", "data": ms.Tensor(values, ms.bfloat16)}], str(tmp_path / "b.ckpt"))
    assert read_ckpt(tmp_path / "b.ckpt")[0]["w"].dtype == "bfloat16"
    np.testing.assert_array_equal(rows(tmp_path / "b.ckpt", "w"), (values.view(np.uint32) >> 16).astype(np.uint16))


def test_scalars_and_texts(tmp_path):
    appended = {"epoch_num": 3, "loss_scale": 0.5, "ckpt_version": "one"}
    path = write(tmp_path / "s.ckpt", {"w": np.ones((2, 2), np.float32)}, append_dict=appended)
    tensors, others = read_ckpt(path)
    assert rows(path, "epoch_num").item() == 3
    assert rows(path, "loss_scale").item() == 0.5
    assert others == {"ckpt_version": "a text"}
    assert "ckpt_version" not in tensors


@given(data=st.data())
def test_rows_of_a_tensor_in_many_pieces(data, tmp_path_factory):
    shape = (data.draw(st.integers(2, 9)), data.draw(st.integers(100, 400)))
    start = data.draw(st.integers(0, shape[0] - 1))
    stop = data.draw(st.integers(start + 1, shape[0]))
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    folder = tmp_path_factory.mktemp("pieces")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mindspore.train.serialization.SLICE_SIZE", 1)  # KiB: several pieces for each of these
            path = write(folder / "p.ckpt", {"a": values, "b": values + 1})
        assert len(read_ckpt(path)[0]["a"].extents) > (values.nbytes > 2048)
        np.testing.assert_array_equal(rows(path, "a", start, stop), values[start:stop])
        np.testing.assert_array_equal(rows(path, "b", start, stop), values[start:stop] + 1)
    finally:
        shutil.rmtree(folder)


@given(data=st.data())
def test_a_damaged_file_is_named(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage")
    path = write(folder / "d.ckpt", {"first": np.ones((4, 4), np.float32), "second": np.zeros(3, np.float32)})
    whole_file = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole_file[: data.draw(st.integers(0, len(whole_file) - 1))])
    try:
        tensors, _ = read_ckpt(path)
        assert len(tensors) < 2  # cut between two tensors: what is there is whole
    except CheckpointError as error:
        assert "d.ckpt" in str(error)  # noqa: PT017 (either outcome is right)
    shutil.rmtree(folder)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "x.ckpt"
    path.write_bytes(content)
    try:
        read_ckpt(path)
    except CheckpointError as error:
        assert "x.ckpt" in str(error)  # noqa: PT017


def test_a_scalar_whose_one_dimension_is_zero(tmp_path):
    """How older versions write scalars; MindSpore's reader takes it for one, too."""
    message = Checkpoint()
    value = message.value.add(tag="step_num")
    value.tensor.dims.append(0)
    value.tensor.tensor_type = "Int32"
    value.tensor.tensor_content = np.int32(7).tobytes()
    path = tmp_path / "old.ckpt"
    path.write_bytes(message.SerializeToString())
    assert rows(path, "step_num").item() == ms.load_checkpoint(str(path))["step_num"].asnumpy().item() == 7
    assert read_ckpt(path)[0]["step_num"].shape == ()


def test_a_type_that_is_not_known(tmp_path):
    message = Checkpoint()
    value = message.value.add(tag="model.w")
    value.tensor.dims.append(1)
    value.tensor.tensor_type = "Int4"
    value.tensor.tensor_content = b"\x00"
    (tmp_path / "q.ckpt").write_bytes(message.SerializeToString())
    with pytest.raises(CheckpointError, match=r"q\.ckpt: tensor model\.w \[1\] is stored as 'Int4'"):
        read_ckpt(tmp_path / "q.ckpt")
