"""The counter counts MindSpore's own compilations, whoever asks for them."""

from __future__ import annotations

import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from msds_graphs.counter import compile_count, count_compiles


class Doubler(nn.Cell):
    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return x * 2


def relu(x: ms.Tensor) -> ms.Tensor:
    return ops.relu(x)


def broken(x: ms.Tensor) -> ms.Tensor:
    return ops.matmul(x, ops.ones((7, 7)))


def test_compilations_that_are_not_ours_count_too() -> None:
    three, four = ms.Tensor(np.ones(3, np.float32)), ms.Tensor(np.ones(4, np.float32))
    start = compile_count()
    with count_compiles() as seen:
        compiled = ms.jit(relu)
        assert seen.count == 0
        compiled(three)
        compiled(three)
        assert seen.count == 1
        compiled(four)  # a shape that a jit function has not met is compiled behind one's back
        assert seen.count == 2
        cell = Doubler()
        cell.construct = ms.jit(cell.construct)
        cell(three)
        assert seen.count == 3
    compiled(ms.Tensor(np.ones(5, np.float32)))
    assert seen.count == 3
    assert compile_count() == start + 4


def test_other_threads_and_failed_compilations_count() -> None:
    with count_compiles() as seen:
        thread = threading.Thread(target=lambda: ms.jit(relu)(ms.Tensor(np.ones(6, np.float32))))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError):
            ms.jit(broken)(ms.Tensor(np.ones((3, 3), np.float32)))
    assert seen.count == 2
