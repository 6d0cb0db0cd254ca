"""What is refused before anything is compiled, and which ranks are chosen."""

from __future__ import annotations

import sys

import pytest

from msds.dryrun import run
from msds.dryrun.job import Job
from msds.dryrun.roles import roles
from msds.dryrun.run import DryRunOptions, make_job
from msds.errors import MsdsError, OptionError
from msds_graphs.errors import GraphError
from msds_graphs.trees import tree_items
from tests.dryrun.made import config_file, tiny_job
from tests.reference.variants import LLAMA


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plan": "tp8"}, "number of heads 4 cannot be cut by tp = 8"),
        ({"mesh": "a2:16", "plan": "tp4"}, "has 16"),
        ({"plan": "dp8.ep3"}, "ep 3 does not divide"),
        ({"mesh": "cpu:8", "plan": "dp8"}, "cpu:8 has no NPU"),
        ({"plan": "tp4.pp2"}, "2 pipeline stages"),
        ({"plan": "dp2.tp4", "steps": ("prefil",)}, "'prefil' does not exist"),
        ({"plan": "dp2.tp4", "steps": ("draft",), "mtp": 0}, "needs draft tokens"),
        ({"plan": "dp2.tp4", "dtype": "int4"}, "'int4'"),
        ({"plan": "dp2.tp4", "concurrency": 3}, "concurrency is 3, and the 2 replicas .*: use 2 or 4"),
        ({"plan": "dp8", "concurrency": 3}, "concurrency is 3, and the 8 replicas .*: use 8$"),
        ({"plan": "dp2.tp4", "mtp": 99}, "mtp is 99"),
        ({"plan": "dp2.tp4", "max_model_len": 1 << 30}, "context"),
        ({"plan": "tp4.dp2", "eplb_step_interval": 9}, "plan dp2.tp4 has no ep"),
        ({"plan": "tp4.dp2.ep8", "eplb_step_interval": 9, "num_redundant_experts": 3}, "16 experts and 3.*use 8"),
        ({"plan": "tp4.dp2.ep8", "num_redundant_experts": 8}, "8 without eplb_step_interval"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, text, tmp_path):
    with pytest.raises((OptionError, GraphError), match=text):
        make_job(DryRunOptions(model=config_file(tmp_path), **{"mesh": "a2:8", **options}))


def test_layouts_are_for_deepseek(tmp_path):
    with pytest.raises(OptionError, match="llama"):
        make_job(DryRunOptions(model=config_file(tmp_path, LLAMA), mesh="a2:2", plan="tp2", layouts=True))


def test_auto_takes_a_plan_that_runs(tmp_path):
    job = tiny_job(config_file(tmp_path), "a2:8", "auto")
    assert job.shards.pp == 1
    assert job.shards.ranks == 8
    for texts in (3, 8):
        assert texts % tiny_job(config_file(tmp_path), "a2:4", "auto", concurrency=texts).shards.dp == 0
    assert tiny_job("tiny-r1", "a2:2", "auto").demand.config.num_hidden_layers == 4


def test_steps_and_drafts_follow_the_model(tmp_path):
    assert tiny_job(config_file(tmp_path), "a2:1", "tp1").steps == ("prefill", "decode", "draft", "head")
    assert tiny_job(config_file(tmp_path, num_nextn_predict_layers=0), "a2:1", "tp1").steps == (
        *("prefill", "decode", "head"),
    )


def test_a_job_survives_its_journey(tmp_path):
    job = tiny_job(config_file(tmp_path), "a2:4", "dp2.tp2", all_buckets=True)
    assert Job.from_json(job.to_json()) == job
    assert [len(job.buckets(step)) for step in job.steps] == [3, 4, 2, 1]


def test_local_trees_are_the_slices(tmp_path):
    job = tiny_job(config_file(tmp_path), "a2:4", "dp2.tp2.ep4")
    held = job.weights(0)
    assert {path: spec.shape for path, spec in tree_items(job.local_weights())} == {
        path: piece.shape for path, piece in held.items()
    }
    assert held["layers.1.mlp.experts.gate_proj"].shape == (4, 32, 64)


def test_local_trees_of_balanced_experts_are_the_slices(tmp_path):
    """What the loader's account gives a rank is what the plan's does: more slots, and whole tables."""
    balancing = {"eplb_step_interval": 9, "num_redundant_experts": 4}
    job = tiny_job(config_file(tmp_path), "a2:4", "dp2.tp2.ep4", **balancing)
    assert Job.from_json(job.to_json()) == job
    held = job.weights(3)
    local = {path: (spec.shape, spec.dtype) for path, spec in tree_items(job.local_weights())}
    assert local == {path: (piece.shape, piece.dtype) for path, piece in held.items()}
    assert held["layers.1.mlp.experts.gate_proj"].shape == (5, 32, 64)
    assert local["mtp.0.mlp.experts.slot_table"] == ((16, 4), "int32")
    without = tiny_job(config_file(tmp_path), "a2:4", "dp2.tp2.ep4")
    assert "layers.1.mlp.experts.slot_table" not in without.weights(3)


def test_ranks_of_equal_slices_are_one_role(tmp_path):
    job = tiny_job(config_file(tmp_path), "a2:4", "dp2.tp2.ep4")
    (role,) = roles(job, "auto")
    assert (role.ranks, role.compiled) == ((0, 1, 2, 3), (0, 3))
    assert roles(job, "all")[0].compiled == (0, 1, 2, 3)
    assert roles(job, "2,1")[0].compiled == (1, 2)
    for wrong, text in (("4", "4 are outside"), ("x", "auto, all")):
        with pytest.raises(OptionError, match=text):
            roles(job, wrong)


def test_a_process_without_a_report_is_an_error(tmp_path, monkeypatch):
    job = tiny_job(config_file(tmp_path), "a2:1", "tp1")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    stubs = run.StubLibraries(tmp_path, was_built=False)
    with pytest.raises(MsdsError, match="rank 0 ended with 1 and no report"):
        run.compile_rank(job, stubs)
