"""Block-scaled float8: hand-computed tiles, ragged edges, slices off the block grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.checkpoint import Checkpoint, raw_source, tensor_source, write_checkpoint
from msds.checkpoint.dtypes import E4M3FN_VALUES
from msds.checkpoint.quantisation import dequantise, scale_grid
from msds.errors import CheckpointError
from tests.reference.checkpoints import to_numpy_tensors

ONE = 0x38  # the e4m3fn code of 1.0
BLOCK = (128, 128)


def ones(rows, columns):
    return np.full((rows, columns), ONE, np.uint8)


def stored(folder, codes, scales, block=BLOCK):
    write_checkpoint(folder, [raw_source("w", codes, "float8_e4m3fn"), tensor_source("w_scale_inv", scales)])
    return Checkpoint.open(folder, weight_block_size=block)


def test_rows_that_are_not_a_multiple_of_the_block(tmp_path):
    rows, columns = np.ogrid[:5, :56]
    scales = (100 * rows + columns).astype(np.float32)
    checkpoint = stored(tmp_path, ones(576, 7168), scales)
    weight = checkpoint.read("w")
    assert weight.dtype == np.float32
    assert (weight[511, 0], weight[512, 0], weight[575, 7167]) == (300, 400, 455)
    np.testing.assert_array_equal(weight, np.repeat(np.repeat(scales, 128, 0), 128, 1)[:576])


def test_the_grid_is_ceil_divided_and_anything_else_is_refused():
    assert scale_grid((300, 200), BLOCK) == (3, 2)
    assert dequantise(ones(300, 200), np.ones((3, 2), np.float32), BLOCK).shape == (300, 200)
    with pytest.raises(CheckpointError, match=r"layers\.0\.o.*\[300, 200\].*\[3, 2\].*\[2, 2\]"):
        dequantise(ones(300, 200), np.ones((2, 2), np.float32), BLOCK, "layers.0.o")


def test_the_block_is_not_guessed_from_shapes():
    # 1000 rows and 8 scales would divide evenly into blocks of 125
    weight = dequantise(ones(1000, 1), np.arange(8, dtype=np.float32)[:, None], BLOCK)
    assert (weight[127, 0], weight[128, 0], weight[999, 0]) == (0, 1, 7)


def test_without_a_block_size_float8_is_refused(tmp_path):
    stored(tmp_path, ones(4, 4), np.ones((1, 1), np.float32))
    with pytest.raises(CheckpointError, match=r"w is float8.*weight_block_size"):
        Checkpoint.open(tmp_path).read("w")


TILES = np.array([[2, 3, 5], [7, 11, 13]], np.float32)


def test_all_tiles_also_after_row_and_column_shards_and_transposition(tmp_path):
    checkpoint = stored(tmp_path, ones(256, 384), TILES)
    whole = checkpoint.read("w")
    for i in range(2):
        for j in range(3):
            tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert (whole[tile] == TILES[i, j]).all()
            assert (whole.T[tile[::-1]] == TILES[i, j]).all()
            assert (checkpoint.read("w", tile) == TILES[i, j]).all()
    assert (checkpoint.read("w", (slice(128, 256),)) == np.repeat(TILES[1], 128)).all()
    assert (checkpoint.read("w", (slice(None), slice(256, 384)))[[0, 255], 0] == [5, 13]).all()


def test_a_square_grid_is_not_transposed(tmp_path):
    weight = stored(tmp_path, ones(256, 256), np.array([[1, 2], [3, 4]], np.float32)).read("w")
    assert (weight[0, 255], weight[255, 0]) == (2, 3)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    """A weight of 37 x 50 random codes in blocks of 16 x 8, as a checkpoint, and its values."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 0x7F, (37, 50), np.uint8) | (rng.integers(0, 2, (37, 50), np.uint8) << 7)
    scales = rng.uniform(0.5, 2, (3, 7)).astype(np.float32)
    row, column = np.ogrid[:37, :50]
    values = E4M3FN_VALUES[codes] * scales[row // 16, column // 8]
    return stored(tmp_path_factory.mktemp("ragged"), codes, scales, (16, 8)), values


@given(st.tuples(st.integers(0, 37), st.integers(0, 37)), st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_any_slice_equals_the_slice_of_the_whole(ragged, rows, columns):
    checkpoint, values = ragged
    index = (slice(min(rows), max(rows)), slice(min(columns), max(columns)))
    np.testing.assert_array_equal(checkpoint.read("w", index), values[index])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_is_an_error_with_its_position(tmp_path, code):
    codes = ones(40, 40)
    codes[33, 20] = code
    checkpoint = stored(tmp_path, codes, np.ones((3, 3), np.float32), (16, 16))
    with pytest.raises(CheckpointError, match=r"tensor w .*NaN at \[33, 20\]"):
        checkpoint.read("w")
    with pytest.raises(CheckpointError, match=r"NaN at \[33, 20\]"):
        checkpoint.read("w", (slice(20, 40), slice(10, 30)))
    assert checkpoint.read("w", raw=True)[33, 20] == code


def test_a_scale_that_is_not_finite_is_an_error(tmp_path):
    checkpoint = stored(tmp_path, ones(4, 4), np.full((1, 1), np.inf, np.float32))
    with pytest.raises(CheckpointError, match="w_scale_inv"):
        checkpoint.read("w")


def test_scales_may_be_stored_in_bfloat16(tmp_path):
    sources = [
        raw_source("w", ones(4, 4), "float8_e4m3fn"),
        tensor_source("w_scale_inv", np.full((1, 1), 1.5), "bfloat16"),
    ]
    write_checkpoint(tmp_path, sources)
    assert (Checkpoint.open(tmp_path, weight_block_size=BLOCK).read("w") == 1.5).all()


def test_the_reference_checkpoint_is_read_as_its_own_definition_says(tiny):
    folder = tiny("v3_fp8")
    expected = to_numpy_tensors(folder)
    checkpoint = Checkpoint.open(folder, weight_block_size=(16, 16))
    assert not checkpoint.faults
    scaled = 0
    for name in checkpoint.names():
        if not name.endswith("_scale_inv"):
            np.testing.assert_allclose(checkpoint.read(name), expected[name], rtol=1e-6, err_msg=name)
            scaled += checkpoint.scale_name(name) is not None
    assert scaled > 10
