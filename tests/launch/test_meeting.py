"""Several launchers, as on several nodes: they start together or not at all, and tell each other why they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from msds.errors import OptionError, RankError
from msds.launch import Cluster, launch
from msds.launch.meeting import Links, News, meet
from msds.launch.wire import Connection, Limit, accept, connect
from tests.launch.test_processes import ENTRIES, children, pids, until

SECRET = "a" * 32


def free_port() -> int:
    """It and, most likely, the next one."""
    while True:
        with socket.socket() as probe, socket.socket() as following:
            probe.bind(("127.0.0.1", 0))
            with contextlib.suppress(OSError):
                following.bind(("127.0.0.1", probe.getsockname()[1] + 1))
                return int(probe.getsockname()[1])


@dataclass
class Node:
    """A launcher in a process of its own, which ends as `msds` would."""

    process: subprocess.Popen[str]
    log: Path

    def ends(self) -> int:
        return self.process.wait(30)

    @property
    def said(self) -> str:
        return self.log.read_text()


class Nodes:
    """Launchers of one program, `PORT` of whose master is the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.started: list[Node] = []

    def start(self, number: int, entry: str, facts: dict[str, str] | None = None, **cluster: Any) -> Node:
        cluster = {"ranks": 2, "nodes": 2, "secret": SECRET, "startup_seconds": 30, **cluster}
        settings = cluster | {"node_rank": number, "master": f"127.0.0.1:{self.port}"}
        code = (
            "import json, sys\nimport msds.launch.supervise\n"
            "from msds.errors import MsdsError\nfrom msds.launch import Cluster, launch\n"
            "msds.launch.supervise.AFTERMATH_SECONDS = 1.0\n"
            "entry, settings, facts, arguments = json.loads(sys.argv[1])\n"
            "try:\n    launch(entry, arguments, Cluster(**settings), facts=facts, collectives=False, stop_seconds=5, "
            "drains=True)\n"
            "except MsdsError as error:\n    print(f'error: {error}', file=sys.stderr)\n"
            "    sys.exit(getattr(error, 'exit_code', 2))"
        )
        job = json.dumps([f"{ENTRIES}:{entry}", settings, facts or {}, {"folder": str(self.folder)}])
        log = self.folder / f"node-{len(self.started)}.log"
        with log.open("w") as output:
            environment = os.environ | {"TMPDIR": str(self.folder)}
            process = subprocess.Popen([sys.executable, "-c", code, job], stderr=output, text=True, env=environment)
        self.started.append(Node(process, log))
        return self.started[-1]

    def logs(self) -> list[str]:
        """Folders of ranks' logs that are there."""
        return [path.name for path in self.folder.glob("msds-ranks-*")]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    found = Nodes(tmp_path)
    yield found
    for node in found.started:
        node.process.kill()
        node.process.wait()


def test_nodes_that_agree_are_one_program(nodes: Nodes) -> None:
    facts = {"--plan": "tp4"}
    started = [nodes.start(number, "write_place", facts, ranks=6, nodes=3) for number in (2, 0, 1)]
    assert [node.ends() for node in started] == [0, 0, 0], [node.said for node in started]
    assert sorted(path.name for path in nodes.folder.glob("*-of-6")) == [f"{rank}-of-6" for rank in range(6)]
    assert nodes.logs() == []


@pytest.mark.parametrize(
    ("there", "cluster", "names"),
    [
        ({"--plan": "dp2"}, {}, ["--plan is tp2 on node 0 and dp2 on node 1"]),
        ({}, {}, ["--plan is tp2 on node 0 and absent on node 1"]),
        ({"--plan": "tp2"}, {"ranks": 4}, ["ranks is 2 on node 0 and 4 on node 1"]),
        ({"--plan": "tp2"}, {"ranks": 3, "nodes": 3}, ["--nodes is 2 on node 0 and 3 on node 1"]),
    ],
)
def test_nodes_that_differ_are_refused_on_both_sides(
    nodes: Nodes, there: dict[str, str], cluster: dict[str, Any], names: list[str]
) -> None:
    both = [nodes.start(0, "write_place", {"--plan": "tp2"}), nodes.start(1, "write_place", there, **cluster)]
    for node in both:
        assert node.ends() == 2
        assert "Traceback" not in node.said
        for name in names:
            assert f"error: nodes 0 and 1 differ: {name}" in node.said
    assert not list(nodes.folder.glob("*-of-*"))
    assert nodes.logs() == []


def test_a_wrong_secret_is_said_on_both_sides_and_does_not_end_the_wait(nodes: Nodes) -> None:
    first = nodes.start(0, "write_place")
    stranger = nodes.start(1, "write_place", secret="b" * 32)
    assert stranger.ends() == 2
    assert f"127.0.0.1:{nodes.port + 1} sent node 1 away, which failed its secret check" in stranger.said
    assert "set the same MSDS_CLUSTER_SECRET on every node" in stranger.said
    until(lambda: "is refused: it failed the secret check for node 1" in first.said)
    friend = nodes.start(1, "write_place")
    assert [first.ends(), friend.ends()] == [0, 0]


def test_a_number_that_is_taken_is_refused(nodes: Nodes) -> None:
    settings = {"ranks": 3, "nodes": 3}
    nodes.start(0, "write_place", **settings)
    two = [nodes.start(1, "write_place", **settings) for _ in range(2)]
    until(lambda: any(node.process.poll() is not None for node in two))
    refused = next(node for node in two if node.process.poll() is not None)
    assert refused.ends() == 2
    assert "there is a node 1 already: give every node a --node-rank of its own" in refused.said
    two.remove(refused)
    two[0].process.terminate()  # who waits can be told to end, and replaced
    assert two[0].ends() == -signal.SIGTERM
    rest = [nodes.start(number, "write_place", **settings) for number in (1, 2)]
    assert [node.ends() for node in rest] == [0, 0], [node.said for node in rest]


@pytest.mark.parametrize(("node", "missing"), [(0, "rank 1 of node 1"), (1, "rank 0 of node 0")])
def test_who_is_waited_for_is_said_at_once_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], node: int, missing: str
) -> None:
    monkeypatch.setattr("msds.launch.meeting.REMIND_SECONDS", 0.5)
    port = free_port()
    cluster = Cluster(2, 2, node, f"127.0.0.1:{port}", SECRET, startup_seconds=2)
    before = children()
    with pytest.raises(RankError, match=rf"{missing} did not come to 127.0.0.1:{port + 1} within 2 s.*--startup-timeo"):
        launch(f"{ENTRIES}:write_place", {}, cluster, collectives=False)
    said = capsys.readouterr().err
    assert said.startswith(f"msds: waiting for {missing} at 127.0.0.1:{port + 1}, up to 2 s")
    assert said.count("waiting for") >= 2
    assert children() == before


@pytest.mark.parametrize("taken", [0, 1])
def test_an_address_that_is_taken_is_refused_before_anything_is_started(tmp_path: Path, taken: int) -> None:
    port = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port + taken))
        other.listen()
        with pytest.raises(OptionError, match=rf"127.0.0.1:{port + taken} cannot be listened on .*in use.*--master"):
            launch(
                f"{ENTRIES}:write_place",
                {},
                Cluster(2, 2, 0, f"127.0.0.1:{port}", SECRET),
                logs=tmp_path,
                collectives=False,
            )


@pytest.mark.parametrize("told", [0, 1])
def test_a_node_that_is_told_to_end_ends_all_and_is_named(nodes: Nodes, told: int) -> None:
    both = [nodes.start(number, "leave_well") for number in range(2)]
    pids(nodes.folder, 2)
    both[told].process.terminate()
    codes = [node.ends() for node in both]
    assert all((nodes.folder / f"left-{rank}").exists() for rank in range(2))
    assert codes == ([0, 0] if told == 0 else [1, 0])  # node 0 is the service, which was not told to end
    why = f"rank {told} of node {told} left, told to end by SIGTERM"
    assert why in both[1 - told].said
    if told == 1:
        assert f"error: {why}: this node has ended too\n" in both[0].said
    assert "the end of" not in both[0].said + both[1].said
    assert nodes.logs() == []


def test_a_rank_that_is_killed_is_named_on_the_other_node(nodes: Nodes) -> None:
    both = [nodes.start(number, "leave_well") for number in range(2)]
    os.kill(pids(nodes.folder, 2)[1], signal.SIGKILL)
    assert [node.ends() for node in both] == [1, 1]
    assert "error: node 1: rank 1 was ended by SIGKILL\n" in both[0].said
    assert "error: rank 1 was ended by SIGKILL" in both[1].said
    assert len(nodes.logs()) == 2
    for node in both:
        assert "msds: the logs of the ranks stay in " in node.said


def test_a_launcher_that_is_killed_is_missed(nodes: Nodes) -> None:
    both = [nodes.start(number, "leave_well") for number in range(2)]
    pids(nodes.folder, 2)
    both[1].process.kill()
    assert both[0].ends() == 1
    assert "error: rank 1 of node 1 went without a word: look there\n" in both[0].said


def test_who_waits_can_be_told_to_end(nodes: Nodes) -> None:
    for number in range(2):
        node = nodes.start(number, "write_place", nodes=3, ranks=3, startup_seconds=600)
        until(lambda node=node: "waiting for" in node.said)
        node.process.terminate()
        assert node.ends() == -signal.SIGTERM


def two_nodes(node: int) -> Cluster:
    """The cluster of one of two nodes, which meet on this machine."""
    return Cluster(2, 2, node, f"127.0.0.1:{free_port()}", SECRET, startup_seconds=30)


Leading = tuple[Cluster, list[object], threading.Thread]


@pytest.fixture
def leading() -> Iterator[Leading]:
    """Node 0 of two, which waits in a thread; what it has `received`."""
    cluster = two_nodes(0)
    received: list[object] = []
    with cluster.leader_listener() as listener:

        def lead() -> None:
            with meet(cluster, listener, {}, received):
                pass

        thread = threading.Thread(target=lead, daemon=True)
        thread.start()
        yield cluster, received, thread
        received.append("the end")
        thread.join(20)


def test_who_proves_the_secret_and_stalls_is_sent_away(leading: Leading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msds.launch.wire.HANDSHAKE_SECONDS", 0.3)
    cluster, _, thread = leading
    stalled = connect(cluster.leader_address(), SECRET, 1, time.monotonic() + 20, kind="node")
    answer = stalled.receive(Limit(time.monotonic() + 20))
    assert answer is not None
    assert (answer.kind, answer.fields["problem"]) == (
        "refused",
        "node 1 did not say in time what it is to run: start it again",
    )
    stalled.close()
    monkeypatch.undo()
    meet(replace(cluster, node_rank=1), None, {}, []).__exit__(None, None, None)
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("has_proved", [False, True])
def test_who_stalls_does_not_make_deaf(leading: Leading, monkeypatch: pytest.MonkeyPatch, has_proved: bool) -> None:
    monkeypatch.setattr("msds.launch.wire.HANDSHAKE_SECONDS", 600)
    cluster, received, thread = leading
    if has_proved:
        stalled = connect(cluster.leader_address(), SECRET, 1, time.monotonic() + 20, kind="node")
    else:
        raw = socket.create_connection(cluster.leader_address())
        raw.recv(1)
        stalled = Connection(raw)
    received.append("a signal")
    thread.join(20)
    assert not thread.is_alive()
    stalled.close()


def test_a_meeting_that_fails_leaves_no_connection() -> None:
    cluster = Cluster(3, 3, 0, f"127.0.0.1:{free_port()}", SECRET, startup_seconds=1)
    failed: list[Exception] = []
    with cluster.leader_listener() as listener:

        def lead() -> None:
            try:
                meet(cluster, listener, {}, [])
            except RankError as error:
                failed.append(error)

        thread = threading.Thread(target=lead, daemon=True)
        thread.start()
        with pytest.raises(RankError, match="node 0 has left"):
            meet(replace(cluster, node_rank=1, startup_seconds=30), None, {}, [])
        thread.join(20)
        assert "rank 2 of node 2 did not come" in str(failed[0])


def test_what_follows_the_start_at_once_is_heard() -> None:
    cluster = two_nodes(1)
    with socket.create_server(cluster.leader_address()) as listener:

        def lead() -> None:
            _, connection = accept(listener, SECRET, time.monotonic() + 20, kind="node")
            connection.receive()
            connection.send("go")
            connection.send("failed", {"problem": "no space", "exit_code": 1})
            connection.receive()
            connection.close()

        leader = threading.Thread(target=lead, daemon=True)
        leader.start()
        with meet(cluster, None, {}, []) as links:
            one = links.next(20)
        leader.join()
    assert one is not None
    assert (one.kind, one.fields["problem"]) == ("failed", "no space")


@pytest.fixture
def following() -> Iterator[tuple[Cluster, list[News]]]:
    """Node 0 of two, for the main thread, and what node 1 hears of it after the start."""
    cluster = two_nodes(0)
    heard: list[News] = []

    def follow() -> None:
        with meet(replace(cluster, node_rank=1), None, {}, []) as links:
            while (one := links.next(20)) is not None and one.kind != "gone":
                heard.append(one)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    yield cluster, heard
    thread.join(20)


def test_a_node_that_cannot_start_its_ranks_says_so(
    following: tuple[Cluster, list[News]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    cluster, heard = following
    with pytest.raises(OptionError, match="no temporary folder can be made"):
        launch(f"{ENTRIES}:write_place", {}, cluster, collectives=False)
    until(lambda: heard)
    assert (heard[0].kind, heard[0].fields["exit_code"]) == ("failed", 2)
    assert "its ranks could not be run: no temporary folder can be made" in heard[0].fields["problem"]


def test_a_node_that_is_told_to_end_before_it_starts_ranks_says_so(
    following: tuple[Cluster, list[News]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, heard = following

    def met_too_late(*arguments: Any) -> Links:
        links = meet(*arguments)
        arguments[-1].append(signal.SIGINT)
        return links

    monkeypatch.setattr("msds.launch.processes.meet", met_too_late)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(f"{ENTRIES}:write_place", {}, cluster, collectives=False)
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: heard)
    assert (heard[0].kind, heard[0].fields["why"]) == ("leaving", "rank 0 of node 0 left, told to end by SIGINT")
