"""The number types of safetensors, and the two that NumPy lacks: bfloat16 and float8 e4m3fn.

Stored bytes of those two are handled as `uint16` bit patterns and `uint8` codes; values are float32, which
holds both exactly. Going back rounds to nearest, ties to even.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msds.errors import CheckpointError

Array = NDArray[Any]

CHUNK_BYTES = 512 << 10
"""Conversions and reads go in pieces of about this many bytes, so that their temporaries stay small."""


@dataclass(frozen=True)
class StoredType:
    """One number type: its safetensors name, our name, and the NumPy type that holds its raw bytes."""

    name: str
    dtype: str
    raw: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes per element."""
        return self.raw.itemsize

    @property
    def is_coded(self) -> bool:
        """Whether raw bytes are bit patterns without a NumPy type, which have to be decoded."""
        return self.dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2")

    @property
    def is_float(self) -> bool:
        """Whether values are floating point, and so can be loaded as weights."""
        return self.is_coded or self.raw.kind == "f"


STORED_TYPES = {
    stored.name: stored
    for stored in (
        StoredType("F64", "float64", np.dtype("<f8")),
        StoredType("F32", "float32", np.dtype("<f4")),
        StoredType("F16", "float16", np.dtype("<f2")),
        StoredType("BF16", "bfloat16", np.dtype("<u2")),
        StoredType("F8_E4M3", "float8_e4m3fn", np.dtype("u1")),
        StoredType("F8_E5M2", "float8_e5m2", np.dtype("u1")),
        StoredType("I64", "int64", np.dtype("<i8")),
        StoredType("I32", "int32", np.dtype("<i4")),
        StoredType("I16", "int16", np.dtype("<i2")),
        StoredType("I8", "int8", np.dtype("i1")),
        StoredType("U64", "uint64", np.dtype("<u8")),
        StoredType("U32", "uint32", np.dtype("<u4")),
        StoredType("U16", "uint16", np.dtype("<u2")),
        StoredType("U8", "uint8", np.dtype("u1")),
        StoredType("BOOL", "bool", np.dtype("?")),
    )
}
"""The number types we know, by their names in a safetensors header."""

_BY_DTYPE = {stored.dtype: stored for stored in STORED_TYPES.values()}


def stored_type(dtype: str) -> StoredType:
    """The stored type with our name `dtype` (`float32`, `bfloat16`, `float8_e4m3fn`, ...)."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        known = ", ".join(_BY_DTYPE)
        raise CheckpointError(f"number type {dtype!r} cannot be stored; choose one of {known}") from None


def _e4m3fn_values() -> NDArray[np.float32]:
    """Sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinities, 0x7F and 0xFF are NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 0xF, (codes & 7).astype(np.float64)
    magnitude = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7)
    )
    magnitude[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


E4M3FN_VALUES = _e4m3fn_values()
"""float32 [256]: the value of each float8 e4m3fn code."""
E4M3FN_VALUES.setflags(write=False)

E4M3FN_MAX = 448.0
"""The largest finite e4m3fn value, code 0x7E."""


def decode_bfloat16(bits: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
    """Writes the values of bf16 `bits` into `out` (same shape): a bf16 is the upper half of a float32."""
    words = out.view(np.uint32)
    words[...] = bits
    np.left_shift(words, 16, out=words)


def encode_bfloat16(values: Array) -> NDArray[np.uint16]:
    """bf16 bit patterns of `values`, rounded to nearest even; NaN stays NaN, overflow becomes infinity."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(-1)
    # Adding 0x7FFF, plus one where the kept part is odd, carries into the upper half exactly when it must
    # round up.
    rounded = ((words + (0x7FFF + ((words >> 16) & 1))) >> 16).astype(np.uint16)
    is_nan = (words & 0x7FFF_FFFF) > 0x7F80_0000
    if is_nan.any():
        # Rounding could carry a NaN into infinity or zero: keep its upper half and force a quiet mantissa
        # bit.
        rounded[is_nan] = (words[is_nan] >> 16).astype(np.uint16) | np.uint16(0x40)
    return rounded.reshape(np.shape(values))


def encode_e4m3fn(values: Array) -> NDArray[np.uint8]:
    """float8 e4m3fn codes of `values`, rounded to nearest even; what is too large becomes NaN.

    The last value that still rounds to 448 is 464, half way to the missing 480, which ties to the even code
    0x7E.
    """
    wide = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    positive = E4M3FN_VALUES[:0x7F].astype(np.float64)  # strictly rising with the code
    magnitude = np.abs(wide).astype(np.float64)
    upper = np.clip(np.searchsorted(positive, magnitude), 1, 0x7E)
    lower = upper - 1
    middle = (positive[lower] + positive[upper]) / 2  # exact in float64
    take_upper = (magnitude > middle) | ((magnitude == middle) & (upper % 2 == 0))
    codes = np.where(take_upper, upper, lower).astype(np.uint8)
    codes[~(magnitude <= 464.0)] = 0x7F
    codes[np.signbit(wide)] |= 0x80
    return codes.reshape(np.shape(values))


def decode(raw: Array, stored: StoredType, out: NDArray[np.float32]) -> None:
    """Writes the values of `raw` (as stored) into float32 `out` of the same shape.

    float64 and wide integers are rounded to float32; all other types are exact.
    """
    if stored.dtype == "bfloat16":
        decode_bfloat16(raw, out)
    elif stored.dtype == "float8_e4m3fn":
        np.take(E4M3FN_VALUES, raw, out=out, mode="clip")  # "clip" writes to `out` without a buffer; codes are in range
    elif stored.is_coded:
        raise CheckpointError(f"{stored.name} numbers can only be read raw; as weights use F8_E4M3, BF16 or F32")
    else:
        with np.errstate(over="ignore"):
            out[...] = raw


_ENCODERS = {"bfloat16": encode_bfloat16, "float8_e4m3fn": encode_e4m3fn}


def encode(values: Array, dtype: str) -> Array:
    """`values` as raw bytes of `dtype` are held in memory: bit patterns for bf16, codes for float8 e4m3fn.

    A whole array at a time would need several times its size in temporaries, so it goes in pieces.
    """
    stored = stored_type(dtype)
    if not stored.is_coded:
        with np.errstate(over="ignore"):
            return np.asarray(values, dtype=stored.raw, order="C")
    if dtype not in _ENCODERS:
        raise CheckpointError(f"values cannot be written as {dtype}; use float8_e4m3fn")
    convert = _ENCODERS[dtype]
    flat = np.ascontiguousarray(values).reshape(-1)
    raw = np.empty(flat.size, stored.raw)
    step = CHUNK_BYTES // 8
    for start in range(0, flat.size, step):
        raw[start : start + step] = convert(flat[start : start + step])
    return raw.reshape(np.shape(values))
