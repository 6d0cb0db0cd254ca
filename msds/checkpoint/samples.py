"""A cheap digest of a file: enough to tell checkpoints apart, not to prove them equal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from msds.errors import CheckpointError

HEAD_BYTES = 256 << 10
"""Read of the beginning, where safetensors have their names, types and shapes."""
SAMPLES, SAMPLE_BYTES = 32, 4096


@dataclass(frozen=True)
class FileSample:
    """size and modified_ns: as the file system says. digest: sha256 of the samples."""

    size: int
    modified_ns: int
    digest: str


def sample_file(path: Path) -> FileSample:
    """The beginning of a file and blocks spread evenly over all of it, its last bytes among them, as one digest.

    What is nowhere sampled is not noticed: of a large file, a change of fewer bytes than 1/31 of it may not be, such as
    a single tensor or a flipped bit. A manifest of sha256 notices those. CheckpointError for what cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            found = path.stat()
            digest.update(file.read(HEAD_BYTES))
            for place in range(SAMPLES):
                file.seek(max(0, found.st_size - SAMPLE_BYTES) * place // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return FileSample(found.st_size, found.st_mtime_ns, digest.hexdigest())
