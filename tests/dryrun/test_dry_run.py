"""Tiny models compiled for Ascend: they communicate as the plan says, and what is broken on purpose is found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from msds.dryrun.checks import checks
from msds.dryrun.job import bucket_size
from msds.dryrun.opinion import bucket_of
from msds.dryrun.run import DryRunError, DryRunOptions, compile_rank, dry_run
from msds_serve.cli import main
from tests.dryrun.made import config_file, made_report, tiny_job
from tests.reference.variants import LLAMA


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return config_file(tmp_path_factory.mktemp("tiny"))


def broken(job, stubs, monkeypatch, what, ranks=(0,)):
    """The faults of a job whose processes are broken."""
    monkeypatch.setenv("BREAK", what)
    reports = [compile_rank(replace(job, rank=rank), stubs, "tests.dryrun.broken") for rank in ranks]
    return {check.what: check.faults for check in checks(job, reports) if not check.passed}


def test_replicas_that_share_experts(model, stubs, stub_cache):
    """dp2.tp2.ep4, both ranks of every group: shapes and collectives as the rules say, in every step."""
    said = []
    report = dry_run(
        DryRunOptions(
            model=model, mesh="a2:4", plan="dp2.tp2.ep4", max_model_len=64, mtp=2, cache=stub_cache, layouts=True
        ),
        said.append,
    )
    assert report.passed, report.render()
    assert [rank.rank for rank in report.ranks] == [0, 3]
    assert said[1:3] == [f"compiling prefill, decode, draft, head for rank {rank} of 4" for rank in (0, 3)]
    assert {rank.soc for rank in report.ranks} == {"Ascend910B3"}
    for rank in report.ranks:
        want = made_report(report.job, rank.rank)
        for step, rule in zip(rank.steps, want.steps, strict=True):
            assert step.num_nodes > (3 if step.name == "head" else 100)
            assert step.parameters.keys() <= rule.parameters.keys()
            assert len(step.collectives) == len(rule.collectives) > 0
    decode = json.loads(json.dumps(report.to_json()))["ranks"][1]["steps"][1]
    sums = decode["collectives"][0]
    assert (sums["kind"], sums["axis"], sums["ranks"], sums["shape"]) == ("all_reduce", "tp", [2, 3], [12, 64])
    assert sums["places"] == {"ends": 2, "layers.0": 2, "layers.1": 2, "layers.2": 2}
    assert sums["bytes"] == 12 * 64 * 2
    text = report.render()
    assert "compiled for Ascend without hardware" in text
    assert "2 at the ends, 2 in each of 3 layers (embedding, embedding of MTP entries, heads, MLP)" in text
    assert "layers.*.mlp.experts.gate_proj               bfloat16  [4, 32, 64] of [16, 32, 64]" in text
    _check_opinion(report)


def _check_opinion(report):
    """AutoParallel puts the two sums of a dense layer where we do, and makes its result whole at the end."""
    (chunk, _) = bucket_size(bucket_of(report.job))
    opinions = json.loads(json.dumps(report.to_json()))["layouts"]
    for opinion, others, replicas in zip(opinions, ([0, 1], [2, 3]), ([0, 2], [1, 3]), strict=True):
        forward, backward = opinion["steps"]
        assert forward["error"] is backward["error"] is None
        assert [(item["kind"], item["ranks"], item["count"]) for item in forward["collectives"]] == [
            ("all_reduce", others, 2 * 3),
            ("all_gather", replicas, 1),
        ]
        (last,) = opinion["differences"]
        assert (last["verdict"], last["kind"], last["shape"]) == ("more", "all_gather", [chunk, 64])
        sums = {tuple(item["ranks"]): item["count"] for item in backward["collectives"]}
        # a layer's cut weights over replicas; those that all ranks hold whole over all ranks
        assert sums[tuple(replicas)] == sums[0, 1, 2, 3] == 6 * 3


def test_steps_that_count_experts(stubs, tmp_path):
    """What serving with balanced experts compiles: five slots a rank, tables, and choices gathered to be counted."""
    balancing = {"eplb_step_interval": 9, "num_redundant_experts": 4}
    job = tiny_job(config_file(tmp_path), "a2:4", "dp2.tp2.ep4", steps=("decode", "draft"), mtp=1, **balancing)
    report = compile_rank(replace(job, rank=3), stubs)
    assert [check.faults for check in checks(job, [report])] == [()] * 8
    decode, draft = report.steps
    assert decode.parameters["layers.1.mlp.experts.gate_proj"][1] == (5, 32, 64)
    assert decode.parameters["layers.2.mlp.experts.slot_table"] == ("int32", (16, 4))
    assert [sum(call.dtype == "int32" for call in step.collectives) for step in report.steps] == [2, 2]
    counted = [call for call in draft.collectives if (call.dtype, len(call.shape)) == ("int32", 2)]
    assert len(counted) == 1  # the drafts themselves, [1, texts, drafts] of each replica, are no counts


def test_experts_cut_in_width_and_a_padded_vocabulary(stubs, tmp_path):
    """tp4.ep2 on A3: every rank has all tokens, so experts need no message of their own."""
    job = tiny_job(config_file(tmp_path, vocab_size=510), "a3:4", "tp4.ep2", steps=("decode",), mtp=0)
    report = compile_rank(replace(job, rank=3), stubs)
    assert [check.faults for check in checks(job, [report])] == [()] * 4
    assert report.soc == "Ascend910_9392"
    assert report.steps[0].parameters["layers.1.mlp.experts.gate_proj"][1] == (8, 16, 64)
    assert {call.kind for call in report.steps[0].collectives} == {"all_reduce", "all_gather"}
    assert report.steps[0].collectives[-1].result == (512, 8)


def test_tokens_are_sent_to_their_experts(model, stubs, stub_cache):
    """dp16.ep16: the operators of Ascend in every layer with experts, in a group of their own, and no other message."""
    report = dry_run(DryRunOptions(model=model, mesh="a2:16", plan="dp16.ep16", max_model_len=64, cache=stub_cache))
    assert report.passed, report.render()
    assert [rank.rank for rank in report.ranks] == [0, 15]
    prefill, decode, draft, _ = json.loads(json.dumps(report.to_json()))["ranks"][1]["steps"]
    for step, places in ((prefill, ("layers.1", "layers.2")), (decode, ("layers.1", "layers.2")), (draft, ("mtp.0",))):
        bucket = step["bucket"]
        own = [bucket["S"] * (1 if step is draft else bucket["Q"]), 64]
        sent, back = (item for item in step["collectives"] if item["axis"] == "exchange")
        assert (sent["kind"], sent["shape"], sent["result"]) == ("dispatch", own, [16 * own[0], 64])
        assert (back["kind"], back["shape"], back["result"]) == ("combine", [16 * own[0], 64], own)
        assert sent["places"] == back["places"] == dict.fromkeys(places, 1)
        assert sent["ranks"] == list(range(16))
        assert {item["places"].get("ends", 0) for item in step["collectives"]} <= {0, 1}
    text = report.render()
    assert "2 x dispatch over exchange (0-15) of bfloat16" in text
    assert "MiB: 1 in each of 2 layers (tokens to their experts, " in text
    assert "tokens go to their experts by operators of Ascend, whose group wants two buffers of" in text


def test_tokens_are_sent_to_their_experts_on_a3(stubs, tmp_path):
    model = config_file(tmp_path, hidden_size=7168)
    job = tiny_job(model, "a3:8", "dp8.ep8", steps=("decode",), mtp=0)
    report = compile_rank(replace(job, rank=3), stubs)
    assert [check.faults for check in checks(job, [report])] == [()] * 4
    assert [call.kind for call in report.steps[0].collectives if call.group.startswith("msds_exchange")] == [
        *("dispatch", "combine", "dispatch", "combine"),
    ]


@pytest.mark.parametrize("what", ["experts without an exchange", "exchange among others"])
def test_another_exchange_is_found(model, stubs, monkeypatch, what):
    job = tiny_job(model, "a2:16", "dp16.ep16", steps=("decode",), mtp=0)
    found = broken(job, stubs, monkeypatch, what)
    assert set(found) == {"communicates as the plan says"}
    faults = found["communicates as the plan says"]
    assert {fault.partition(", ")[2].partition(":")[0] for fault in faults} == {"layers.1", "layers.2"}
    assert any(
        "0 dispatch over exchange" in fault and "the plan says 1 (tokens to their experts)" in fault for fault in faults
    )


def test_a_dense_family(stubs, tmp_path):
    job = tiny_job(config_file(tmp_path, LLAMA), "a2:2", "tp2")
    report = compile_rank(replace(job, rank=1), stubs)
    assert [check.faults for check in checks(job, [report])] == [()] * 12


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("no sum of experts", ["layers.1", "layers.2"]),
        ("no sum of heads", ["layers.0", "layers.1", "layers.2"]),
        ("wide tokens", ["layers.1", "layers.2"]),
    ],
)
def test_other_communication_is_found(model, stubs, monkeypatch, what, where):
    job = tiny_job(model, "a2:4", "dp2.tp2.ep4", steps=("decode",), mtp=0)
    found = broken(job, stubs, monkeypatch, what)
    assert set(found) == {"communicates as the plan says"}
    places = {fault.partition(", ")[2].partition(":")[0] for fault in found["communicates as the plan says"]}
    assert places == set(where)


def test_ranks_that_would_wait_for_each_other_are_found(model, stubs, monkeypatch):
    job = tiny_job(model, "a2:2", "tp2", steps=("decode",), mtp=0)
    found = broken(job, stubs, monkeypatch, "rank 1 sums twice", (0, 1))
    (text,) = found["all ranks communicate alike"]
    assert text.startswith("ranks 0 and 1 would wait for each other: collective ")
    assert set(found) == {"all ranks communicate alike", "communicates as the plan says"}


def test_a_graph_that_does_not_compile_is_reported(model, stubs, monkeypatch):
    job = tiny_job(model, "a2:2", "tp2", steps=("decode",), mtp=0)
    found = broken(job, stubs, monkeypatch, "whole heads")
    assert set(found) == {"compiles"}
    assert found["compiles"][0].startswith("rank 0: compiling decode [")


def test_no_value_leaves_the_process(model, stubs, monkeypatch):
    job = tiny_job(model, "a2:1", "tp1", steps=("decode",), mtp=0)
    with pytest.raises(DryRunError, match="a value was asked for in a dry run"):
        broken(job, stubs, monkeypatch, "value")
    monkeypatch.setenv("BREAK", "run")
    assert compile_rank(job, stubs, "tests.dryrun.broken").steps == ()


def test_without_stub_libraries_the_child_refuses():
    done = subprocess.run(
        [sys.executable, "-c", "from msds_graphs.dryrun import simulate; simulate.start()"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "this process has no stub libraries" in done.stderr


def test_the_command(model, stubs, stub_cache, capsys, monkeypatch):
    command = ["compile", model, "--mesh", "a2:1", "--plan", "tp1", "--steps", "draft", "--cache", str(stub_cache)]
    assert main(command) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert main([*command, "--dry-run", "--plan", "tp3"]) == 2
    assert main([*command, "--dry-run", "--json", "--max-model-len", "64"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["passed"], answer["label"]) == (True, "compiled for Ascend without hardware")
    monkeypatch.setattr("msds.dryrun.checks.rules", lambda *_: ())
    monkeypatch.setattr("msds.dryrun.checks.disagreements", lambda *_: ["no"])
    assert main([*command, "--dry-run", "--max-model-len", "64"]) == 1
    assert "FAIL draft" in capsys.readouterr().out
