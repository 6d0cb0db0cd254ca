"""The generator of `msds_ops.random` in MindSpore ops, for compiled graphs; equal to it bit for bit.

Words are int32 tensors that hold the bits of the unsigned words: int32 addition wraps modulo 2^32, and a
logical right shift is an arithmetic one with the copies of the sign masked away. Shifts are calls to
`ops.bitwise_*`, because graph mode refuses the `<<` operator on tensors.
"""

from mindspore import Tensor, ops
from mindspore import dtype as mstype

from msds_ops.random import PARITY, ROTATIONS


def threefry2x32(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """One block per element: key (k0, k1), counter (x0, x1), int32 of one shape -> two int32 tensors."""
    schedule = (k0, k1, ops.bitwise_xor(ops.bitwise_xor(k0, k1), PARITY))
    x0, x1 = x0 + k0, x1 + k1
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ops.bitwise_xor(_rotate_left(x1, distance), x0)
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + (group + 1)
    return x0, x1


def uniform_of_key(k0: Tensor, k1: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Uniform float32 numbers in [0, 1) for stream keys (from `msds_ops.random.stream_key`) and positions."""
    word, _ = threefry2x32(k0, k1, position, index)
    return _shift_right(word, 8).astype(mstype.float32) * 2.0**-24


def _rotate_left(x: Tensor, distance: int) -> Tensor:
    return ops.bitwise_or(ops.bitwise_left_shift(x, distance), _shift_right(x, 32 - distance))


def _shift_right(x: Tensor, distance: int) -> Tensor:
    return ops.bitwise_and(ops.bitwise_right_shift(x, distance), (1 << (32 - distance)) - 1)
