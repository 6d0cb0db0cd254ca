"""Rank 0 and those that follow it, as real processes: they do the same, and one that does not is named in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msds.errors import RankError
from msds.launch import Cluster, launch


def run(tmp_path: Path, ranks: int, **arguments: Any) -> None:
    launch(
        "tests.launch.team_entries:add_up",
        {"folder": str(tmp_path), **arguments},
        Cluster(ranks),
        logs=tmp_path / "logs",
        collectives=False,
    )


@pytest.mark.parametrize(("trouble", "calls"), [("", 3), ("all raise", 2)])
def test_all_do_what_rank_0_does(tmp_path: Path, trouble: str, calls: int) -> None:
    run(tmp_path, 3, trouble=trouble)
    assert (tmp_path / "agreed").read_text() == "8"
    for rank in (1, 2):
        assert json.loads((tmp_path / f"sum-{rank}").read_text()) == [0, calls, 2 * calls]


@pytest.mark.parametrize(
    ("trouble", "names"),
    [
        ("stop", ["rank 0 failed: rank 1 did not finish step add within 4 s"]),
        ("raise", ["rank 0 failed: rank 1 failed in step add, the others did not: index 7 is out of range"]),
        ("kill", ["rank 1 was ended by SIGKILL", "rank 0: rank 1 has ended (in step add)"]),
    ],
)
def test_a_rank_that_does_not_keep_up_ends_all_and_is_named(tmp_path: Path, trouble: str, names: list[str]) -> None:
    with pytest.raises(RankError) as caught:
        run(tmp_path, 3, trouble=trouble, timeout=4.0)
    for name in names:
        assert name in str(caught.value)
    assert caught.value.exit_code == 1
