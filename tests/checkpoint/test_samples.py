"""Samples of a file: what they notice, and what they do not claim to."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.checkpoint.samples import SAMPLES, sample_file
from msds.errors import CheckpointError

SIZE = 3_000_000
LONGEST_UNSEEN = SIZE // (SAMPLES - 1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "weights"
    path.write_bytes(np.random.default_rng(1).integers(1, 256, SIZE, np.uint8).tobytes())
    return path


@given(st.integers(LONGEST_UNSEEN, SIZE), st.integers(0, SIZE))
def test_a_run_of_zeros_is_noticed_wherever_it_is(file: Path, length: int, start: int) -> None:
    whole, start = file.read_bytes(), min(start, SIZE - length)
    other = file.with_name("spoilt")
    other.write_bytes(whole[:start] + bytes(length) + whole[start + length :])
    assert sample_file(other).size == sample_file(file).size
    assert sample_file(other).digest != sample_file(file).digest


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_short_files_are_read_whole(tmp_path_factory: pytest.TempPathFactory, size: int, place: int) -> None:
    path = tmp_path_factory.getbasetemp() / "short"
    path.write_bytes(bytes(size))
    before = sample_file(path)
    if place < size:
        path.write_bytes(bytes(place) + b"\1" + bytes(size - place - 1))
        assert sample_file(path).digest != before.digest
    assert sample_file(path).size == before.size == size


def test_a_copy_has_the_same_digest(file: Path, tmp_path: Path) -> None:
    assert sample_file(Path(shutil.copy(file, tmp_path))).digest == sample_file(file).digest


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing cannot be read"):
        sample_file(tmp_path / "nothing")
