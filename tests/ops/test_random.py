"""Known answers, the written specification, and host = device for the counter-based generator."""

import numpy as np
import pytest

from msds_ops import random

# Random123, kat_vectors, threefry2x32 with 20 rounds: counter, key -> output
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
# enough words to meet every sign, carry and rotation; the same draw on every machine
EDGES = np.array([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF], np.uint32)
WORDS = np.concatenate([EDGES, np.random.default_rng(7).integers(0, 2**32, 120, dtype=np.uint32)])


def plain_block(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """The specification once more, in Python integers."""
    mask = 2**32 - 1
    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x0, x1 = (counter[0] + key[0]) & mask, (counter[1] + key[1]) & mask
    rotations = [13, 15, 26, 6, 17, 29, 16, 24] * 3
    for number in range(20):
        x0 = (x0 + x1) & mask
        x1 = ((x1 << rotations[number] | x1 >> 32 - rotations[number]) & mask) ^ x0
        if number % 4 == 3:
            group = number // 4 + 1
            x0 = (x0 + schedule[group % 3]) & mask
            x1 = (x1 + schedule[(group + 1) % 3] + group) & mask
    return x0, x1


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert tuple(int(word) for word in random.threefry2x32(key, counter)) == expected
    assert plain_block(key, counter) == expected


def test_arrays_equal_the_plain_specification():
    keys, counters = (WORDS, WORDS[::-1]), (np.roll(WORDS, 5), np.roll(WORDS, 11))
    x0, x1 = random.threefry2x32(keys, counters)
    expected = [plain_block((int(a), int(b)), (int(c), int(d))) for a, b, c, d in zip(*keys, *counters, strict=True)]
    assert list(zip(x0.tolist(), x1.tolist(), strict=True)) == expected


def test_uniform_is_the_specified_function():
    key = plain_block((0x89ABCDEF, 0x01234567), (3, 0))
    word = plain_block(key, (77, 0))[0]
    assert random.stream_key(0x0123456789ABCDEF, 3) == key
    assert random.uniform(0x0123456789ABCDEF, 3, 77) == (word >> 8) / 2**24


def test_seed_is_taken_modulo_two_to_the_64():
    assert random.stream_key(-1, 0) == random.stream_key(2**64 - 1, 0)
    assert random.stream_key(-1, 0) != random.stream_key(2**32 - 1, 0)


def test_uniform_is_exact_in_float32_and_below_one():
    draws = random.uniform_of_key(random.stream_key(1, 0), np.arange(100_000))
    assert draws.dtype == np.float32
    scaled = draws.astype(np.float64) * 2**24
    assert np.array_equal(scaled, np.floor(scaled))
    assert draws.min() >= 0
    assert draws.max() < 1


def test_streams_are_uniform_and_independent():
    positions = np.arange(65_536)
    first = random.uniform_of_key(random.stream_key(5, 0), positions)
    others = [
        random.uniform_of_key(random.stream_key(5, 1), positions),
        random.uniform_of_key(random.stream_key(6, 0), positions),
        random.uniform_of_key(random.stream_key(5, 0), positions, 1),
        random.uniform_of_key(random.stream_key(5, 0), positions + 1),
    ]
    counts = np.bincount((first * 256).astype(int), minlength=256)
    chi_square = ((counts - 256.0) ** 2 / 256.0).sum()
    assert 160 < chi_square < 370  # 255 degrees of freedom: five standard deviations
    for other in others:
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.02


def test_fractions_are_refused():
    with pytest.raises(TypeError, match="integers"):
        random.uniform_of_key((0, 0), 1.5)


def test_device_equals_host_bit_for_bit_in_a_compiled_graph():
    ms = pytest.importorskip("mindspore", reason="the device functions need MindSpore")
    from msds_ops import random_device

    def graph(k0, k1, position, index):
        x0, x1 = random_device.threefry2x32(k0, k1, position, index)
        return x0, x1, random_device.uniform_of_key(k0, k1, position, index)

    answers = np.array([(*key, *counter) for counter, key, _ in KNOWN_ANSWERS], np.uint32).T
    edges = np.stack([WORDS, WORDS[::-1], np.roll(WORDS, 5), np.roll(WORDS, 11)])
    inputs = np.concatenate([answers, edges], axis=1)  # [4, N]
    tensors = [ms.Tensor(np.ascontiguousarray(row).view(np.int32)) for row in inputs]
    x0, x1, draws = (out.asnumpy() for out in ms.jit(graph, fullgraph=True)(*tensors))

    expected0, expected1 = random.threefry2x32((inputs[0], inputs[1]), (inputs[2], inputs[3]))
    assert np.array_equal(x0.view(np.uint32), expected0)
    assert np.array_equal(x1.view(np.uint32), expected1)
    assert [(int(a), int(b)) for a, b in zip(expected0[:3], expected1[:3], strict=True)] == [
        answer for _, _, answer in KNOWN_ANSWERS
    ]
    host = random.uniform_of_key((inputs[0], inputs[1]), inputs[2], inputs[3])
    assert draws.dtype == np.float32
    assert np.array_equal(draws.view(np.uint32), host.view(np.uint32))
