"""The launcher: ranks start, end together, and the one that failed is named. No MindSpore here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msds.errors import OptionError, RankError
from msds.launch import Cluster, launch
from msds.launch.meeting import Links
from msds.launch.supervise import Process, Supervision

ENTRIES = "tests.launch.entries"


def run(entry: str, ranks: int, tmp_path: Path, **arguments: Any) -> None:
    launch(f"{ENTRIES}:{entry}", arguments, Cluster(ranks), logs=tmp_path / "logs", collectives=False)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Ended; where its parent was killed, it may wait in vain to be asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def pids(folder: Path, ranks: int) -> list[int]:
    files = [folder / f"pid-{rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_every_rank_runs_once_and_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = children()
    run("write_place", 3, tmp_path, folder=str(tmp_path))
    assert {path.name: path.read_text() for path in tmp_path.glob("*-of-*")} == {
        "0-of-3": "0",
        "1-of-3": "1",
        "2-of-3": "2",
    }
    for rank in range(3):
        assert f"rank {rank} speaks" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    shown = capsys.readouterr().err
    assert str(tmp_path / "logs") in shown
    assert "rank 0 speaks" in shown
    assert "rank 1 speaks" not in shown
    assert children() == before


@pytest.mark.parametrize(
    ("how", "rank", "names", "code"),
    [
        ("raise", 1, ["rank 1 failed: RuntimeError: a fault of ours", "the last thing it said"], 1),
        ("exit", 2, ["rank 2 ended with exit code 7", "the last thing it said", "rank-2.log"], 1),
        ("kill", 1, ["rank 1 was ended by SIGKILL", "the last thing it said"], 1),
        ("refuse", 1, ["block_size is 0: it must be at least 1"], 2),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, rank: int, names: list[str], code: int
) -> None:
    monkeypatch.setattr("msds.launch.supervise.AFTERMATH_SECONDS", 0.1)
    before = children()
    with pytest.raises(RankError) as caught:
        run("fail_in_one", 3, tmp_path, rank=rank, how=how)
    for name in names:
        assert name in str(caught.value)
    assert caught.value.exit_code == code
    assert children() == before


def test_a_last_rank_that_fails_while_it_is_asked_is_noticed(tmp_path: Path) -> None:
    class Ending(subprocess.Popen[bytes]):
        """Runs when it is asked for the first time."""

        def __init__(self) -> None:
            super().__init__([sys.executable, "-c", "raise SystemExit(7)"])
            self.wait()
            self.asked = 0

        def poll(self) -> int | None:
            self.asked += 1
            return None if self.asked == 1 else super().poll()

    log = tmp_path / "log"
    log.write_text("the last thing it said")
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        process = Process(1, Ending(), log, reading)
        with pytest.raises(RankError, match="rank 1 ended with exit code 7"):
            Supervision([process], Cluster(2), Links({}), [], 1.0).run()
    finally:
        os.close(reading)
        os.close(writing)


def test_the_log_of_rank_0_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("msds.launch.supervise.AFTERMATH_SECONDS", 0.1)
    with pytest.raises(RankError, match=r"rank 0 was ended by SIGKILL$"):
        run("fail_in_one", 2, tmp_path, rank=0, how="kill")
    assert capsys.readouterr().err.count("the last thing it said") == 1


def test_a_rank_that_does_not_report_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # two seconds are too few to import MindSpore

    with pytest.raises(RankError, match="ranks 0, 1 did not report within 2 s of starting"):
        launch(
            f"{ENTRIES}:write_place",
            {"folder": str(tmp_path)},
            Cluster(2, startup_seconds=2),
            logs=tmp_path / "logs",
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_ranks_which_may_end_well(tmp_path: Path, number: signal.Signals) -> None:
    program = _program(tmp_path, "leave_well", folder=str(tmp_path))
    ranks = pids(tmp_path, 2)
    program.send_signal(number)
    assert program.wait(30) == (-signal.SIGTERM if number == signal.SIGTERM else 130)
    assert all((tmp_path / f"left-{rank}").exists() for rank in range(2))
    assert all(is_gone(pid) for pid in ranks)


def test_a_rank_that_will_not_end_is_killed(tmp_path: Path) -> None:
    program = _program(tmp_path, "wait", folder=str(tmp_path), deaf=True)
    ranks = pids(tmp_path, 2)
    program.terminate()
    assert program.wait(30) == -signal.SIGTERM
    assert all(is_gone(pid) for pid in ranks)


@pytest.mark.parametrize(
    ("entry", "number", "code"),
    [
        ("leave_well", signal.SIGTERM, 0),  # a service that has drained
        ("leave_well", signal.SIGINT, 130),
        ("wait", signal.SIGTERM, -signal.SIGTERM),  # one that had not begun to serve
    ],
)
def test_a_service_that_drained_has_ended_well(tmp_path: Path, entry: str, number: signal.Signals, code: int) -> None:
    program = _program(tmp_path, entry, drains=True, folder=str(tmp_path))
    pids(tmp_path, 2)
    program.send_signal(number)
    assert program.wait(30) == code


def test_who_is_killed_and_why_is_said(tmp_path: Path) -> None:
    program = _program(tmp_path, "leave_alone", folder=str(tmp_path), stop_seconds=60)
    pids(tmp_path, 2)
    program.terminate()
    assert program.wait(30) == -signal.SIGTERM
    said = (tmp_path / "stderr").read_text()
    assert "msds: SIGTERM: ranks 0, 1 are told to end, within 60 s" in said
    assert "msds: rank 1 killed: rank 0 had ended 3 s before, and a graph" in said


@pytest.mark.parametrize(
    ("entry", "arguments", "stays"),
    [("write_place", {}, False), ("fail_in_one", {"rank": 1, "how": "exit"}, True)],
)
def test_logs_stay_where_something_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    entry: str,
    arguments: dict[str, Any],
    stays: bool,
) -> None:
    monkeypatch.setattr("msds.launch.supervise.AFTERMATH_SECONDS", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arguments = arguments or {"folder": str(tmp_path)}
    with pytest.raises(RankError) if stays else contextlib.nullcontext():
        launch(f"{ENTRIES}:{entry}", arguments, Cluster(2), collectives=False)
    folders = list(tmp_path.glob("msds-ranks-*"))
    assert len(folders) == stays
    if stays:
        assert f"msds: the logs of the ranks stay in {folders[0]}\n" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["/proc/foo", "/proc/self", "a file", "a file/logs", "rank-1.log is a folder"])
def test_logs_that_cannot_be_written_are_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "rank-1.log is a folder" / "rank-1.log").mkdir(parents=True)
    before = children()
    with pytest.raises(OptionError, match=rf"rank_logs is '.*{place}', where no logs can be written \(.*name a folder"):
        launch(f"{ENTRIES}:write_place", {}, Cluster(2), logs=tmp_path / place, collectives=False)
    assert children() == before


def test_ranks_end_with_their_parent_however_it_ends(tmp_path: Path) -> None:
    program = _program(tmp_path, "wait", folder=str(tmp_path), deaf=True)
    ranks = pids(tmp_path, 2)
    program.kill()
    program.wait(30)
    until(lambda: all(is_gone(pid) for pid in ranks))


def _program(
    tmp_path: Path, entry: str, *, drains: bool = False, stop_seconds: float = 1, **arguments: Any
) -> subprocess.Popen[bytes]:
    """A launcher in a process of its own, whose ranks have a second to end."""
    code = (
        "import signal\nimport sys\nfrom pathlib import Path\nfrom msds.launch import Cluster, launch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background shell has it ignored
        f"try:\n    launch('{ENTRIES}:{entry}', {arguments!r}, Cluster(2), logs=Path({str(tmp_path)!r}, 'logs'),"
        f" collectives=False, stop_seconds={stop_seconds}, drains={drains})\n"
        "except KeyboardInterrupt:\n    sys.exit(130)"
    )
    assert threading.current_thread() is threading.main_thread()
    with (tmp_path / "stderr").open("w") as errors:
        return subprocess.Popen([sys.executable, "-c", code], stderr=errors)
