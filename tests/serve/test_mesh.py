"""Options of several processes: what cannot be is refused in one line, before anything is launched."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msds.launch import SECRET_VARIABLE
from msds_serve.cli import main


@pytest.fixture(autouse=True)
def _nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("processes would have been started")

    monkeypatch.setattr("subprocess.Popen", launched)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.mark.parametrize("command", [["serve"], ["generate", "--token-ids", "1"]], ids=["serve", "generate"])
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--mesh", "cpu"], ["mesh 'cpu' is not one of cpu:N"]),
        (["--mesh", "cpu:2", "--plan", "tp4"], ["plan tp4 needs", "= 4 ranks, mesh cpu:2 has 2"]),
        (["--mesh", "cpu:2", "--plan", "xp2"], ["axis", "dp, tp, ep and pp"]),
        (
            ["--mesh", "cpu:2", "--plan", "dp2", "--max-num-seqs", "3"],
            ["max_num_seqs is 3", "2 replicas", "use 2 or 4"],
        ),
        (["--mesh", "cpu:2", "--plan", "ep2"], ["ep 2 does not divide dp * tp", "write tp2.ep2 or dp2.ep2"]),
        (["--mesh", "cpu:2", "--plan", "dp2", "--max-num-seqs", "1"], ["max_num_seqs is 1", "use 2\n"]),
        (["--mesh", "cpu:2", "--plan", "pp2"], ["plan pp2 does not fit", "pp is planned but not executed"]),
        (["--mesh", "cpu:3"], ["plan tp3 does not fit", "heads"]),
        (["--mesh", "a2:2"], ["mesh a2:2", "cpu:N"]),
        (["--mesh", "cpu:2", "--step-timeout", "0"], ["step_timeout is 0"]),
        (["--mesh", "cpu:2", "--nodes", "3"], ["2 ranks on 3 nodes"]),
        (["--mesh", "cpu:2", "--nodes", "2"], ["2 nodes need --master HOST:PORT"]),
        (["--mesh", "cpu:2", "--nodes", "2", "--master", "there"], ["master is 'there'", "HOST:PORT"]),
        (["--mesh", "cpu:2", "--nodes", "2", "--master", "there:1"], ["common secret", SECRET_VARIABLE]),
        (["--mesh", "cpu:2", "--node-rank", "1"], ["node_rank is 1"]),
        (["--mesh", "cpu:2", "--master", "there:1"], ["there is one node"]),
        (["--plan", "tp2"], ["--plan is for several processes: give --mesh too"]),
        (["--step-timeout", "3"], ["--step-timeout is for several processes"]),
        (["--rank-logs", "logs"], ["--rank-logs is for several processes"]),
        (["--mesh", "cpu:2", "--shard-cache", ""], ["shard_cache is ''", "name a folder"]),
        (["--mesh", "cpu:2", "--shard-cache", __file__], ["shard_cache is '", "test_mesh.py is a file"]),
        (["--shard-cache", __file__], ["shard_cache is '", "test_mesh.py is a file"]),
        (["--mesh", "cpu:2", "--rank-logs", "/proc/foo"], ["rank_logs is '/proc/foo', where no logs can be written"]),
        (["--mesh", "cpu:2", "--rank-logs", __file__], ["test_mesh.py', where no logs can be written (File exists)"]),
        (["--mesh", "cpu:2", "--startup-timeout", "0"], ["startup_timeout is 0: it must be from 1 to 86400 seconds"]),
        (["--startup-timeout", "5"], ["--startup-timeout is for several processes"]),
    ],
)
def test_what_cannot_be_is_refused(
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    arguments: list[str],
    names: list[str],
) -> None:
    name, *others = command
    assert main([name, str(tiny("v3_base")), *others, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("msds: error: ")
    assert captured.err.count("\n") == 1
    for part in names:
        assert part in captured.err


@pytest.mark.parametrize("variant", ["llama_base", "v3_all_dense"])
@pytest.mark.parametrize("plan", ["ep2", "tp2.ep2"])
def test_experts_that_are_not_there_are_not_spread(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str], variant: str, plan: str
) -> None:
    assert main(["serve", str(tiny(variant)), "--mesh", "cpu:2", "--plan", plan]) == 2
    assert f"plan {plan} has ep, but" in (said := capsys.readouterr().err)
    assert "has no routed experts to spread: leave ep out" in said


@pytest.mark.parametrize("command", [["serve"], ["generate", "--token-ids", "1"]], ids=["serve", "generate"])
@pytest.mark.parametrize(("plan", "wanted"), [("dp3", 9), ("dp2", None)])
def test_the_default_of_max_num_seqs_fits_the_replicas(
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    plan: str,
    wanted: int | None,
) -> None:
    launched: list[Any] = []
    monkeypatch.setattr("msds_serve.cli.launch_ranks", lambda entry, arguments, *_, **__: launched.append(arguments))
    name, *others = command
    given = [name, str(tiny("llama_base")), *others, "--mesh", f"cpu:{plan[2]}", "--plan", plan]
    assert main(given) == 0
    (arguments,) = launched
    engine = arguments["engine"] if name == "generate" else arguments["arguments"]["engine"]
    assert engine.get("max_num_seqs") == wanted
    said = capsys.readouterr().err
    assert said.startswith("msds: max_num_seqs is 9, not the usual 8: 3 replicas") == (wanted is not None), said
    if wanted is not None:
        assert main([*given, "--max-num-seqs", "8"]) == 2
        assert "max_num_seqs is 8, and 3 replicas (dp)" in (said := capsys.readouterr().err)
        assert "use 6 or 9" in said


EP = ["--mesh", "cpu:2", "--plan", "tp2.ep2"]
EVERY = ["--eplb-step-interval", "100"]


@pytest.mark.parametrize(
    ("variant", "arguments", "names"),
    [
        ("v3_base", [*EVERY], ["plan tp1 has no ep", "tp2.ep2"]),
        ("v3_base", ["--mesh", "cpu:2", *EVERY], ["plan tp2 has no ep", "tp2.ep2"]),
        ("v3_all_dense", [*EP, *EVERY], ["no routed experts"]),
        ("llama_base", ["--mesh", "cpu:2", *EVERY], ["llama as configured has no routed experts"]),
        ("v3_base", [*EP, "--eplb-step-interval", "-1"], ["eplb_step_interval is -1"]),
        ("v3_base", [*EP, *EVERY, "--num-redundant-experts", "-2"], ["num_redundant_experts is -2"]),
        ("v3_base", [*EP, *EVERY, "--num-redundant-experts", "3"], ["16 experts and 3 replicas", "2 ranks", "use 4"]),
        ("v3_base", [*EP, *EVERY, "--num-redundant-experts", "18"], ["num_redundant_experts is 18: with 16 each of 2"]),
        ("v3_base", [*EP, "--num-redundant-experts", "2"], ["num_redundant_experts is 2 without eplb_step_interval"]),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    variant: str,
    arguments: list[str],
    names: list[str],
) -> None:
    assert main(["serve", str(tiny(variant)), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    for part in names:
        assert part in captured.err


def test_balancing_reaches_every_rank(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr("msds_serve.cli.launch_ranks", lambda entry, arguments, *_, **__: launched.append(arguments))
    assert main(["serve", str(tiny("v3_base")), *EP, *EVERY, "--num-redundant-experts", "2"]) == 0
    (arguments,) = launched
    assert (
        arguments["arguments"]["engine"] | {"eplb_step_interval": 100, "num_redundant_experts": 2}
        == (arguments["arguments"]["engine"])
    )


def test_the_service_is_checked_first(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny("v3_base")), "--mesh", "cpu:2", "--port", "99999"]) == 2
    assert "port is 99999" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused_before_ranks_are_started(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", str(tiny("v3_base")), "--mesh", "cpu:2", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"msds: error: host 127.0.0.1 with port {port} cannot be served on" in said
    assert "logs of" not in said


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["serve"], "--plan", "tp2"),
        (["serve", "--max-model-len", "64"], "--max-model-len", "64"),
        (["generate", "--token-ids", "1"], "the command", "generate"),
    ],
)
def test_nodes_are_to_have_the_command_line_in_common(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, arguments: list[str], option: str, value: str
) -> None:
    launched: list[Any] = []
    monkeypatch.setenv(SECRET_VARIABLE, "s" * 20)
    monkeypatch.setattr("msds.launch.launch", lambda *given, **options: launched.append((*given, options)))
    command, *others = arguments
    several = ["--mesh", "cpu:2", "--nodes", "2", "--node-rank", "1", "--master", "here:5000", "--startup-timeout", "7"]
    assert main([command, str(tiny("v3_base")), *others, *several]) == 0
    ((_, _, cluster, options),) = launched
    assert options["facts"][option] == value
    assert options["drains"] == (command == "serve")
    assert cluster.startup_seconds == 7
