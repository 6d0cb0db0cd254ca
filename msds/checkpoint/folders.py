"""A model folder as a whole: made under another name until it is complete, and what belongs beside the weights."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msds.errors import CheckpointError

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""Files, and a folder, that a folder made from another one keeps."""


def check_new_folder(target: Path) -> None:
    """CheckpointError unless `target` is an empty folder, or absent in one that may be written to: to be asked before
    the work, not after."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not an empty folder; name a new one")
    if (obstacle := obstacle_to(target.absolute().parent)) is not None:
        raise CheckpointError(f"{target} cannot be made: {obstacle} is no folder that may be written to")


def obstacle_to(folder: Path) -> Path | None:
    """What keeps an absolute path from being, or becoming, a folder to write to: the nearest that exists; else None."""
    nearest = next(one for one in (folder, *folder.parents) if one.exists())
    return None if nearest.is_dir() and os.access(nearest, os.W_OK) else nearest


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and is gone when it does not.

    CheckpointError as `check_new_folder`.
    """
    check_new_folder(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be made: {error.strerror}") from None
    with unfinished as scratch:
        folder = Path(scratch) / "folder"
        folder.mkdir()
        yield folder
        folder.rename(target)


def copy_companions(source: Path, folder: Path) -> None:
    """Copies those of `COMPANIONS` that `source` has and `folder` lacks."""
    for name in COMPANIONS:
        if (folder / name).exists():
            continue
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
        elif (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
