"""One rank's converted weights in one file, so that later loads read them as they are instead of converting again.

A file is made for a key: a digest of everything that shaped its numbers (`shard_key`). It is used only if it is whole:
its header says which key it was made for and the checksum of every tensor, the header has a checksum itself, and all of
them are compared while reading. Anything else is said in the log and made anew.

A name ends in two digests: of what the file is for (`shard_file`'s `purpose`) and of its key. A file of one purpose is
superseded by one of another key: the checkpoint has changed, or the code. It is removed when the other one is whole.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from msds.checkpoint.dtypes import Array, stored_type
from msds.checkpoint.header import Header, read_header
from msds.checkpoint.progress import Progress, byte_progress
from msds.checkpoint.reading import ShardFiles
from msds.checkpoint.samples import sample_file
from msds.checkpoint.save import raw_source, write_file
from msds.checkpoint.shards import Checkpoint
from msds.errors import CheckpointError, OptionError

logger = logging.getLogger("msds")

FORMAT = 1
"""Of the files below. With another number all of them are made anew."""
PIECE_BYTES = 4 << 20
"""Read, summed and shown at a time."""

_KEY, _SUMS, _DIGEST = "msds_key", "msds_crc32", "msds_header_sha256"


@dataclass(frozen=True)
class Held:
    """Type and shape of an array that a rank holds; bfloat16 is held as uint16."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardCache:
    """The file of one key; it need not exist. `write` and `read` never raise for what the file or its disk does."""

    path: Path
    key: str

    def read(self, wanted: Mapping[str, Held], *, progress: bool | None = None) -> dict[str, Array] | None:
        """Path -> array for all of `wanted`, or None: there is no file, or none that can be used, which is logged.

        Memory is that of the result.
        """
        if not self.path.exists():
            return None
        try:
            return self._read(wanted, progress)
        except CheckpointError as error:
            logger.warning("shard cache: %s is not used and will be made anew: %s", self.path, error)
            return None

    def write(self, arrays: Mapping[str, tuple[Array, str]], *, progress: bool | None = None) -> None:
        """Path -> (raw numbers, dtype), in one step: two processes that write the same file both leave a whole one.

        An interrupt leaves nothing; what a killed process left unfinished is removed, and what this file supersedes
        when it is whole. A disk that is full or not to be written to leaves nothing new and a line in the log.
        """
        sums = {path: _checksum(array) for path, (array, _) in arrays.items()}
        held = {path: Held(dtype, array.shape) for path, (array, dtype) in arrays.items()}
        metadata = {_KEY: self.key, _SUMS: json.dumps(sums), _DIGEST: _digest(self.key, held, sums)}
        try:
            self._remove_left_over()
            sources = [raw_source(path, array, dtype) for path, (array, dtype) in arrays.items()]
            write_file(self.path, sources, metadata=metadata, progress=progress)
        except OSError as error:
            logger.warning("shard cache: %s cannot be written: %s", self.path, error.strerror or error)
        else:
            logger.info("shard cache: wrote %s", self.path)
            self._remove_superseded()

    def _alike(self) -> str:
        """The pattern of names of files for the same purpose, but for its start and end."""
        return glob.escape(self.path.name.rsplit(".", 2)[0]) + ".*"

    def _remove_superseded(self) -> None:
        """Files for the same purpose, of other keys."""
        for other in sorted(self.path.parent.glob(f"{self._alike()}.safetensors")):
            if other == self.path:
                continue
            try:
                size = other.stat().st_size
                other.unlink()
            except FileNotFoundError:
                continue  # another process was faster
            except OSError as error:
                logger.warning("shard cache: superseded %s cannot be removed: %s", other, error.strerror or error)
            else:
                logger.info("shard cache: removed %s (%.1f MiB), superseded", other, size / 2**20)

    def _remove_left_over(self) -> None:
        """Unfinished files for the same purpose whose writers are gone from this machine."""
        for unfinished in self.path.parent.glob(f".{self._alike()}.partial"):
            writer = unfinished.name.split(".")[-2]
            if not Path("/proc", writer).exists():
                unfinished.unlink(missing_ok=True)

    def _read(self, wanted: Mapping[str, Held], progress: bool | None) -> dict[str, Array]:
        header = read_header(self.path)
        sums = self._checked_sums(header)
        held = {name: Held(info.dtype, info.shape) for name, info in header.tensors.items()}
        if held != wanted:
            odd = [name for name in (*wanted, *held) if held.get(name) != wanted.get(name)]
            raise CheckpointError(f"{odd[0]} is {held.get(odd[0])} there, {wanted.get(odd[0])} is needed")
        arrays = {name: np.empty(one.shape, stored_type(one.dtype).raw) for name, one in wanted.items()}
        bar = byte_progress("load cached", sum(array.nbytes for array in arrays.values()), progress)
        files = ShardFiles()
        try:
            for info in sorted(header.tensors.values(), key=lambda info: info.offsets):
                if _fill(arrays[info.name], files, self.path, info.offsets[0], bar) != sums[info.name]:
                    raise CheckpointError(f"the bytes of {info.name} have another checksum than when they were written")
        finally:
            bar.close()
            files.close()
        logger.info("shard cache: read %s", self.path)
        self._remove_superseded()
        return arrays

    def _checked_sums(self, header: Header) -> dict[str, int]:
        """Checksum of each tensor, if the header is whole and this file's."""
        if header.faults:
            raise CheckpointError("; ".join(header.faults[:3]))
        key = header.metadata.get(_KEY)
        if key != self.key:
            raise CheckpointError(f"it was made for key {key}, this load has {self.key}")
        try:
            sums = json.loads(header.metadata.get(_SUMS, ""))
        except (ValueError, RecursionError):
            raise CheckpointError("its header has no checksums") from None
        held = {name: Held(info.dtype, info.shape) for name, info in header.tensors.items()}
        if header.metadata.get(_DIGEST) != _digest(self.key, held, sums) or sums.keys() != held.keys():
            raise CheckpointError("its header has another checksum than when it was written")
        return {name: int(value) for name, value in sums.items()}


def check_shard_folder(folder: Path | str) -> None:
    """OptionError unless this names a folder, or what can become one."""
    if folder == "":
        raise OptionError("shard_cache is '': name a folder, or leave it out")
    for path in (Path(folder), *Path(folder).parents):
        if os.path.isdir(path):  # unlike Path's, it takes what may not be looked into for nothing
            return
        if os.path.exists(path):
            raise _no_folder(folder, f"{path} is a file")


def shard_file(folder: Path | str, label: str, purpose: Mapping[str, object], key: str) -> ShardCache:
    """The file of a key in `folder`, which is made if need be. label: for people who look at the folder.

    purpose: JSON types that tell what supersedes each other from what is wanted side by side. OptionError where there
    can be no such folder.
    """
    check_shard_folder(folder)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_folder(folder, error.strerror or str(error)) from None
    return ShardCache(Path(folder) / f"{label}.{_hash(purpose)[:12]}.{key[:24]}.safetensors", key)


def _no_folder(folder: Path | str, why: str) -> OptionError:
    return OptionError(
        f"shard_cache is {str(folder)!r}, which is no folder and cannot become one ({why}): name a folder that may be "
        "written to"
    )


def shard_key(checkpoint: Checkpoint, ingredients: Mapping[str, object]) -> str:
    """A digest of the files of a checkpoint and of all else that shapes what is made of them (JSON types)."""
    content = {"format": FORMAT, "files": _fingerprints(checkpoint), "tensors": list(checkpoint.facts()), **ingredients}
    return _hash(content)


def _hash(content: object) -> str:
    """Of JSON types."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fingerprints(checkpoint: Checkpoint) -> list[tuple[str, int, int, str]]:
    """Name, size, time and a digest of samples of each file."""
    sampled = [(path.name, sample_file(path)) for path in sorted(checkpoint.stored_in())]
    return [(name, one.size, one.modified_ns, one.digest) for name, one in sampled]


def _fill(out: Array, files: ShardFiles, path: Path, offset: int, bar: Progress) -> int:
    """Fills an array from `offset` of a file on; the checksum of its bytes."""
    flat, total = out.reshape(-1).view(np.uint8), 0
    for start in range(0, flat.size, PIECE_BYTES):
        piece = flat[start : start + PIECE_BYTES]
        files.read_into(path, offset + start, piece)
        total = zlib.crc32(piece.data, total)
        bar.update(piece.size)
    return total


def _checksum(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _digest(key: str, held: Mapping[str, Held], sums: object) -> str:
    """Of what a header says."""
    entries = sorted((name, one.dtype, list(one.shape)) for name, one in held.items())
    return _hash([key, entries, sums])
