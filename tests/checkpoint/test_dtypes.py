"""bfloat16 and float8 e4m3fn without a NumPy type: published values, torch's conversions, round trips."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msds.checkpoint.dtypes import (
    E4M3FN_VALUES,
    STORED_TYPES,
    decode,
    encode,
    encode_bfloat16,
    encode_e4m3fn,
    stored_type,
)
from msds.errors import CheckpointError

BF16, E4M3 = STORED_TYPES["BF16"], STORED_TYPES["F8_E4M3"]

any_float32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


def decoded(raw, stored):
    out = np.empty(raw.shape, np.float32)
    decode(raw, stored, out)
    return out


@pytest.mark.parametrize(("bits", "value"), [(0x3F80, 1.0), (0x4049, 3.140625), (0xFF80, -np.inf), (0x8000, -0.0)])
def test_bfloat16_bits_have_their_values(bits, value):
    got = decoded(np.array([bits], np.uint16), BF16)[0]
    assert got == value
    assert np.signbit(got) == np.signbit(value)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0x00, 0.0),
        (0x01, 2.0**-9),
        (0x07, 7 * 2.0**-9),
        (0x08, 2.0**-6),
        (0x38, 1.0),
        (0x7E, 448.0),
        (0xBC, -1.5),
    ],
)
def test_e4m3fn_codes_have_their_values(code, value):
    assert E4M3FN_VALUES[code] == value


def test_e4m3fn_has_two_nans_a_negative_zero_and_no_infinity():
    assert np.flatnonzero(np.isnan(E4M3FN_VALUES)).tolist() == [0x7F, 0xFF]
    assert E4M3FN_VALUES[0x80] == 0
    assert np.signbit(E4M3FN_VALUES[0x80])
    assert not np.isinf(E4M3FN_VALUES).any()


def test_e4m3fn_table_equals_torch():
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3FN_VALUES, expected)


def test_every_bfloat16_survives_a_round_trip():
    bits = np.arange(1 << 16, dtype=np.uint16)
    back = encode_bfloat16(decoded(bits, BF16))
    is_nan = (bits & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(back[~is_nan], bits[~is_nan])
    assert ((back[is_nan] & 0x7FFF) > 0x7F80).all()


def test_every_e4m3fn_code_survives_a_round_trip():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(encode_e4m3fn(E4M3FN_VALUES), codes)


@given(st.lists(any_float32, min_size=1, max_size=40))
def test_encoding_bfloat16_equals_torch(values):
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).bfloat16().float().numpy()
    np.testing.assert_array_equal(decoded(encode_bfloat16(array), BF16), expected)


@given(st.lists(st.floats(-464, 464, width=32), min_size=1, max_size=40))
def test_encoding_e4m3fn_equals_torch_within_its_range(values):
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(encode_e4m3fn(array), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.nextafter(np.float32(464), np.float32(500)), 1e30])
def test_e4m3fn_beyond_its_range_is_nan(value):
    assert encode_e4m3fn(np.array([value], np.float32))[0] & 0x7F == 0x7F


def test_e4m3fn_rounds_half_way_cases_to_the_even_code():
    halves = (E4M3FN_VALUES[:0x7E].astype(np.float64) + E4M3FN_VALUES[1:0x7F]) / 2
    codes = encode_e4m3fn(halves.astype(np.float32))
    assert (codes % 2 == 0).all()
    assert encode_e4m3fn(np.float32([464.0]))[0] == 0x7E


def test_encoding_in_pieces_equals_encoding_at_once():
    values = np.random.default_rng(0).standard_normal((3, 700_001)).astype(np.float32)
    np.testing.assert_array_equal(encode(values, "bfloat16"), encode_bfloat16(values))


def test_an_unknown_type_is_named_with_the_known_ones():
    with pytest.raises(CheckpointError, match=r"'int4'.*bfloat16"):
        stored_type("int4")


def test_e5m2_is_refused_as_a_weight():
    with pytest.raises(CheckpointError, match="F8_E5M2"):
        decoded(np.zeros(3, np.uint8), STORED_TYPES["F8_E5M2"])
    with pytest.raises(CheckpointError, match="float8_e5m2"):
        encode(np.zeros(3, np.float32), "float8_e5m2")


def test_scalars_keep_their_shape():
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        assert encode(np.array(1.0, np.float32), dtype).shape == ()
