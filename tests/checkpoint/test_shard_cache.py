"""The file of a rank's converted weights: what is written is read, and nothing but that is ever used."""

from __future__ import annotations

import json
import logging
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.checkpoint import (
    Checkpoint,
    Held,
    ShardCache,
    check_shard_folder,
    shard_file,
    shard_key,
    tensor_source,
    write_checkpoint,
)
from msds.errors import OptionError

KEY, OTHER = "0" * 64, "1" * 64
PURPOSE = {"model": "m", "rank": 0}
ARRAYS = {
    "layers.0.weight": (np.arange(24, dtype=np.float32).reshape(4, 6), "float32"),
    "layers.0.bits": (np.arange(10, dtype=np.uint16), "bfloat16"),
    "table": (np.array([[3, 1]], np.int32), "int32"),
    "empty": (np.empty((0, 4), np.float32), "float32"),
}
WANTED = {path: Held(dtype, array.shape) for path, (array, dtype) in ARRAYS.items()}


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    """One that is written."""
    found = shard_file(tmp_path / "caches", "model.tp1.rank0", PURPOSE, KEY)
    found.write(ARRAYS)
    return found


def test_what_is_written_is_read_bit_for_bit(cache: ShardCache) -> None:
    read = cache.read(WANTED)
    assert read is not None
    assert read.keys() == ARRAYS.keys()
    for path, (array, _) in ARRAYS.items():
        assert read[path].dtype == array.dtype
        assert read[path].flags.writeable  # bound without a copy
        assert read[path].tobytes() == array.tobytes()


def test_no_file_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert shard_file(tmp_path, "model", PURPOSE, KEY).read(WANTED) is None
    assert caplog.records == []


@given(st.data())
def test_no_changed_byte_is_ever_used(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any one byte, of lengths, header or tensors: refused."""
    cache = shard_file(tmp_path_factory.mktemp("caches"), "model", PURPOSE, KEY)
    cache.write(ARRAYS)
    content = bytearray(cache.path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    cache.path.write_bytes(content)
    assert cache.read(WANTED) is None


@pytest.mark.parametrize("size", [0, 7, 100, -1, -5])
def test_a_short_file_is_not_used_and_said(cache: ShardCache, caplog: pytest.LogCaptureFixture, size: int) -> None:
    cache.path.write_bytes(cache.path.read_bytes()[:size])
    assert cache.read(WANTED) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(cache.path) in record.getMessage()
    assert "made anew" in record.getMessage()


def test_a_file_of_another_key_is_not_used(cache: ShardCache, caplog: pytest.LogCaptureFixture) -> None:
    other = ShardCache(cache.path, "1" * 64)
    assert other.read(WANTED) is None
    assert "was made for key 000" in caplog.text


@pytest.mark.parametrize(
    "wanted",
    [
        WANTED | {"table": Held("int32", (2, 1))},
        WANTED | {"table": Held("float32", (1, 2))},
        WANTED | {"more": Held("float32", (1,))},
        {path: held for path, held in WANTED.items() if path != "table"},
    ],
)
def test_arrays_that_are_not_those_wanted_are_not_used(
    cache: ShardCache, wanted: dict[str, Held], caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.read(wanted) is None
    assert ("more" if "more" in wanted else "table") in caplog.text


def test_a_header_that_was_rewritten_is_not_used(cache: ShardCache, caplog: pytest.LogCaptureFixture) -> None:
    """Well formed, with sums that agree with its bytes, but not as it was written."""
    content = cache.path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["msds_crc32"] = header["__metadata__"]["msds_crc32"].replace('"table"', '"elbat"')
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    cache.path.write_bytes(content[:8] + text + content[8 + length :])
    assert cache.read(WANTED) is None
    assert "another checksum" in caplog.text


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shard_file(tmp_path, "model", PURPOSE, KEY)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("msds.checkpoint.save._write_tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.write(ARRAYS)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(cache: ShardCache) -> None:
    superseded = shard_file(cache.path.parent, "model.tp1.rank0", PURPOSE, OTHER).path
    gone, old, alive, other = (
        cache.path.with_name(f".{name}.{process}.partial")
        for name, process in (
            (cache.path.name, 2**22 + 1),  # above all process ids
            (superseded.name, 2**22 + 1),
            (cache.path.name, os.getppid()),
            ("other", 2**22 + 1),
        )
    )
    for path in (gone, old, alive, other):
        path.write_text("")
    cache.write(ARRAYS)
    assert (gone.exists(), old.exists(), alive.exists(), other.exists()) == (False, False, True, True)
    assert cache.read(WANTED) is not None


def neighbours(cache: ShardCache) -> list[Path]:
    """Files of other purposes, and a user's own."""
    folder, label = cache.path.parent, "model.tp1.rank0"
    others = [shard_file(folder, label, PURPOSE | {"model": name}, OTHER).path for name in ("n", "m.1", "")]
    others += [shard_file(folder, "model.tp1.rank01", PURPOSE | {"rank": 1}, KEY).path]
    others += [folder / "model.safetensors", cache.path.with_suffix(".json"), folder / f"{label}.safetensors"]
    for path in others:
        path.write_text("mine")
    return others


@pytest.mark.parametrize("how", ["write", "read"])
def test_what_is_superseded_is_removed_when_its_successor_is_whole_and_nothing_else(
    cache: ShardCache, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.INFO, "msds")
    others = neighbours(cache)
    newer = shard_file(cache.path.parent, "model.tp1.rank0", PURPOSE, OTHER)
    assert newer.read(WANTED) is None
    assert cache.path.exists()
    newer.write(ARRAYS)
    assert not cache.path.exists()
    size = newer.path.stat().st_size
    if how == "read":  # as after a crash before the removal
        cache.path.write_bytes(newer.path.read_bytes())
        caplog.clear()
        assert newer.read(WANTED) is not None
    assert f"removed {cache.path} ({size / 2**20:.1f} MiB), superseded" in caplog.messages[-1]
    assert sorted(cache.path.parent.iterdir()) == sorted([*others, newer.path])
    assert all(path.read_text() == "mine" for path in others)


def test_an_unfinished_successor_supersedes_nothing(cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = shard_file(cache.path.parent, "model.tp1.rank0", PURPOSE, OTHER)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("msds.checkpoint.save._write_tensor", full)
    newer.write(ARRAYS)
    assert list(cache.path.parent.iterdir()) == [cache.path]
    newer.path.write_bytes(cache.path.read_bytes()[:-1])  # nor does a damaged one
    assert newer.read(WANTED) is None
    assert cache.read(WANTED) is not None


def test_what_cannot_be_removed_is_said(
    cache: ShardCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newer = shard_file(cache.path.parent, "model.tp1.rank0", PURPOSE, OTHER)

    real = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self == cache.path:
            raise PermissionError(13, "Permission denied")
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    newer.write(ARRAYS)
    monkeypatch.undo()
    assert newer.read(WANTED) is not None
    assert f"superseded {cache.path} cannot be removed: Permission denied" in caplog.text


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = shard_file(tmp_path, "model", PURPOSE, KEY)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("msds.checkpoint.save._write_tensor", full)
    cache.write(ARRAYS)
    assert list(tmp_path.iterdir()) == []
    assert "cannot be written: No space left on device" in caplog.text


def test_one_that_reads_while_others_write_finds_a_whole_file(cache: ShardCache) -> None:
    """Other processes have other process ids; what they share is the one rename."""
    stop = threading.Event()

    def write_again() -> None:
        while not stop.is_set():
            cache.write(ARRAYS)

    writer = threading.Thread(target=write_again)
    writer.start()
    try:
        assert all(cache.read(WANTED) is not None for _ in range(20))
    finally:
        stop.set()
        writer.join()


def test_memory_is_that_of_the_result(tmp_path: Path) -> None:
    cache = shard_file(tmp_path, "model", PURPOSE, KEY)
    arrays = {f"w.{index}": (np.ones((1024, 1024), np.float32), "float32") for index in range(3)}
    size = 3 << 22
    tracemalloc.start()
    cache.write(arrays)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    cache.read({path: Held(dtype, array.shape) for path, (array, dtype) in arrays.items()})
    read = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert written < 1 << 20
    assert read < size + (1 << 20)


def test_progress_is_shown_when_asked(cache: ShardCache, capsys: pytest.CaptureFixture[str]) -> None:
    cache.read(WANTED)
    assert capsys.readouterr().err == ""
    cache.read(WANTED, progress=True)
    assert "load cached: 100%" in capsys.readouterr().err


def test_no_folder_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        with pytest.raises(OptionError, match=r"shard_cache is '.*file.*file is a file.*name a folder"):
            shard_file(tmp_path / name, "model", PURPOSE, KEY)
    with pytest.raises(OptionError, match="shard_cache is ''"):
        shard_file("", "model", PURPOSE, KEY)
    check_shard_folder(tmp_path / "not" / "yet")
    check_shard_folder("relative")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_key_is_of_the_files_content_even_at_one_size_and_time(tmp_path: Path) -> None:
    """Written over in place with the time put back, as careless copying does."""
    values = np.arange(100_000, dtype=np.float32)
    write_checkpoint(tmp_path, [tensor_source("w", values)])
    path = tmp_path / "model.safetensors"
    before, first = path.stat(), shard_key(Checkpoint.open(tmp_path), {})
    assert shard_key(Checkpoint.open(tmp_path), {}) == first
    assert shard_key(Checkpoint.open(tmp_path), {"dtype": "float32"}) != first
    path.unlink()
    write_checkpoint(tmp_path, [tensor_source("w", values + 1)])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert shard_key(Checkpoint.open(tmp_path), {}) != first
