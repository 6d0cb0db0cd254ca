"""The random numbers of the project: a counter-based generator, specified bit for bit.

A number is a pure function of (seed, choice, position, index); there is no state to advance, to share or
to lose. So a seeded text depends neither on the batch it ran in, nor on the shape bucket, the rank, a
preemption or the number of draft tokens that were accepted.

Specification
- The block function is Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
  easy as 1, 2, 3", SC 2011). All arithmetic is modulo 2^32. With key (k0, k1), k2 = k0 ^ k1 ^ 0x1BD11BDA and
  counter (x0, x1): x0 += k0, x1 += k1; then for g = 0..4 four rounds `x0 += x1; x1 = rotl(x1, r) ^ x0` with
  r = 13, 15, 26, 6 for even g and 17, 29, 16, 24 for odd g, each group followed by the key injection
  `x0 += k[(g+1) % 3]; x1 += k[(g+2) % 3] + g + 1`.
- The stream key of (seed, choice) is block(key = (seed mod 2^32, seed div 2^32), counter = (choice, 0)), with
  the seed taken modulo 2^64 and the choice modulo 2^32. For a fixed seed the block is a permutation of its
  counters, so two choices never share a stream.
- Word `index` of `position` is the first output of block(key = stream key, counter = (position, index)).
- The uniform number is (word >> 8) * 2^-24, in [0, 1). Twenty-four bits and not fifty-three, because every
  such number is exact in float32: host and device agree bit for bit also where the device has no float64.

`msds_ops.random_device` holds the same functions in MindSpore ops, equal to these bit for bit.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

Words: TypeAlias = npt.NDArray[np.uint32]


def threefry2x32(
    key: tuple[npt.ArrayLike, npt.ArrayLike], counter: tuple[npt.ArrayLike, npt.ArrayLike]
) -> tuple[Words, Words]:
    """One block per element: integers that broadcast together, taken modulo 2^32 -> two uint32 arrays."""
    k0, k1, x0, x1 = np.broadcast_arrays(*(_words(value) for value in (*key, *counter)))
    schedule = (k0, k1, k0 ^ k1 ^ np.uint32(PARITY))
    with np.errstate(over="ignore"):  # wrapping is the definition; NumPy warns about it for 0-d arrays only
        x0, x1 = x0 + k0, x1 + k1
        for group in range(5):
            for distance in ROTATIONS[group % 2]:
                x0 = x0 + x1
                x1 = ((x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance))) ^ x0
            x0 = x0 + schedule[(group + 1) % 3]
            x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return np.asarray(x0), np.asarray(x1)


def stream_key(seed: int, choice: int) -> tuple[int, int]:
    """Key of the stream of one choice, the n-th answer to one request; the seed -1 is the seed 2^64 - 1."""
    seed &= _MASK64
    k0, k1 = threefry2x32((seed & _MASK32, seed >> 32), (choice, 0))
    return int(k0), int(k1)


def uniform_of_key(
    key: tuple[npt.ArrayLike, npt.ArrayLike], position: npt.ArrayLike, index: npt.ArrayLike = 0
) -> npt.NDArray[np.float32]:
    """Uniform float32 numbers in [0, 1), multiples of 2^-24, for stream keys and positions that broadcast."""
    word, _ = threefry2x32(key, (position, index))
    # 24 bits convert to float32 exactly, and a power of two only moves the exponent
    return (word >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def uniform(seed: int, choice: int, position: int) -> float:
    """The uniform number with which the token at `position` of choice `choice` of a request is drawn."""
    return float(uniform_of_key(stream_key(seed, choice), position))


def _words(value: npt.ArrayLike) -> Words:
    """Integers modulo 2^32; negative ones wrap."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"random numbers are keyed by integers, got {array.dtype}")
    return array.astype(np.uint32)
