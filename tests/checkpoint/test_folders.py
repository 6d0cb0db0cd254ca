"""Folders that appear when they are whole."""

from pathlib import Path

import pytest

from msds.checkpoint.folders import check_new_folder, new_folder
from msds.errors import CheckpointError


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "deep" / "made") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "deep" / "made").exists()
    assert (tmp_path / "deep" / "made" / "file").read_text() == "x"
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "failed"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_what_cannot_be_made_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    check_new_folder(tmp_path / "absent" / "below")
    for name, reason in (("file", "is not an empty folder"), ("file/below", "file is no folder")):
        with pytest.raises(CheckpointError, match=reason):
            check_new_folder(tmp_path / name)
