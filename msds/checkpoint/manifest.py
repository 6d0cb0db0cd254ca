"""Checking the files of a checkpoint against the digests that came with them.

Three kinds of manifest are known: `SHA256SUMS` in the format of the `sha256sum` program, the records that
`huggingface_hub` leaves beside a download, and its cache, where large files are named by their digest. We
found no JSON manifest in common use.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from msds.checkpoint.dtypes import CHUNK_BYTES
from msds.checkpoint.progress import Progress, byte_progress
from msds.errors import CheckpointError

MANIFEST_NAME = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def read_manifest(folder: Path | str) -> dict[str, str]:
    """File name -> sha256 for every file of `folder` whose digest is known; empty if there is no manifest.

    Where several manifests speak of a file, `SHA256SUMS` counts. Raises CheckpointError for a line it cannot
    read.
    """
    folder = Path(folder)
    return {**_hub_cache(folder), **_hub_records(folder), **_sums(folder)}


def verify_manifest(folder: Path | str, *, progress: bool | None = None) -> int:
    """Compares every file that a manifest names, and returns their number; 0 means that there is no manifest.

    Raises one CheckpointError that lists all files that are missing or differ.
    """
    folder = Path(folder)
    expected = read_manifest(folder)
    faults = [f"{name} is missing" for name in expected if not (folder / name).is_file()]
    present = [name for name in expected if (folder / name).is_file()]
    bar = byte_progress("sha256", sum((folder / name).stat().st_size for name in present), progress)
    try:
        for name in present:
            digest = _sha256(folder / name, bar)
            if digest != expected[name]:
                faults.append(f"{name} has sha256 {digest}, expected {expected[name]}")
    finally:
        bar.close()
    if faults:
        title = f"{folder} is not what its manifest says; fetch these files again:"
        raise CheckpointError("\n  ".join([title, *faults]))
    return len(expected)


def write_manifest(folder: Path | str, *, progress: bool | None = None) -> Path:
    """Writes `SHA256SUMS` for all files directly in `folder`, for `sha256sum -c` and `verify_manifest`."""
    folder = Path(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file() and _belongs(path.name))
    bar = byte_progress("sha256", sum(path.stat().st_size for path in files), progress)
    try:
        lines = [f"{_sha256(path, bar)}  {path.name}\n" for path in files]
    finally:
        bar.close()
    target = folder / MANIFEST_NAME
    partial = folder / f".{MANIFEST_NAME}.partial"
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(target)
    return target


def _belongs(name: str) -> bool:
    return name != MANIFEST_NAME and not name.startswith(".")


def _sha256(path: Path, bar: Progress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            bar.update(len(piece))
    return digest.hexdigest()


def _sums(folder: Path) -> dict[str, str]:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return {}
    digests = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        name = match[2].removeprefix("./") if match else ""
        if match is None or Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{path}, line {number}: expected a sha256 and a file of this folder, got {line!r}")
        digests[name] = match[1].lower()
    return digests


def _hub_records(folder: Path) -> dict[str, str]:
    """`.cache/huggingface/download/<file>.metadata`: revision, ETag (a large file's sha256), time."""
    records = folder / ".cache" / "huggingface" / "download"
    digests = {}
    for record in sorted(records.glob("*.metadata")):
        lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
        name = record.name.removesuffix(".metadata")
        if len(lines) > 1 and _DIGEST.fullmatch(lines[1]) and (folder / name).exists():
            digests[name] = lines[1]
    return digests


def _hub_cache(folder: Path) -> dict[str, str]:
    """`snapshots/<revision>/<file>` links to `blobs/<sha256>` where the file is large."""
    digests = {}
    links: Iterable[Path] = sorted(path for path in folder.iterdir() if path.is_symlink())
    for link in links:
        blob = link.resolve()
        if blob.parent.name == "blobs" and _DIGEST.fullmatch(blob.name):
            digests[link.name] = blob.name
    return digests
