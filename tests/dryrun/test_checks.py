"""What the checks find, on reports made from the rules: nothing where nothing is changed, and any single change."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds.dryrun.checks import MAX_FAULTS, checks
from msds.planning.collectives import place_of
from tests.dryrun.made import config_file, made_report, tiny_job, with_step
from tests.reference.variants import LLAMA

PLANS = {
    "dp2.tp2.ep4": "a2:4",
    "tp4.ep2": "a2:4",
    "dp4.ep4": "a2:4",
    "tp4": "a2:4",
    "dp2.tp2": "a2:4",
    "dp16.ep16": "a2:16",
}
"""With their meshes; of each, four ranks are looked at."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    model = config_file(tmp_path_factory.mktemp("tiny"))
    return {plan: tiny_job(model, mesh, plan) for plan, mesh in PLANS.items()}


@pytest.fixture(scope="module")
def made(jobs):
    """What all ranks of each plan would report."""
    return {plan: [made_report(job, rank) for rank in range(4)] for plan, job in jobs.items()}


def faults(job, reports):
    return {(check.step.split(" [")[0], check.what): check.faults for check in checks(job, reports) if not check.passed}


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_found_where_nothing_is_wrong(jobs, made, plan):
    job, reports = jobs[plan], made[plan]
    assert faults(job, reports) == {}
    assert len(list(checks(job, reports))) == 4 * len(job.steps)
    assert all(
        step.collectives for report in reports for step in report.steps if step.name != "head" or job.shards.tp > 1
    )


@given(st.sampled_from(list(PLANS)), st.integers(0, 3), st.integers(0, 2), st.integers(0, 1 << 30))
def test_a_missing_collective_is_found(jobs, made, plan, rank, index, choice):
    job, reports = jobs[plan], list(made[plan])
    step = reports[rank].steps[index]
    calls = list(step.collectives)
    lost = calls.pop(choice % len(calls))
    reports[rank] = with_step(reports[rank], index, collectives=tuple(calls))
    found = faults(job, reports)
    assert set(found) == {(step.name, "all ranks communicate alike"), (step.name, "communicates as the plan says")}
    (text,) = found[step.name, "communicates as the plan says"]
    assert text.startswith(f"rank {rank}, {place_of(lost.after)}: ")
    assert lost.kind in text


@given(st.sampled_from(list(PLANS)), st.integers(0, 2), st.integers(0, 1 << 30))
def test_a_collective_too_many_on_all_ranks_is_found(jobs, made, plan, index, choice):
    job = jobs[plan]
    reports = []
    for report in made[plan]:
        calls = report.steps[index].collectives
        reports.append(with_step(report, index, collectives=(*calls, calls[choice % len(calls)])))
    found = faults(job, reports)
    assert set(found) == {(reports[0].steps[index].name, "communicates as the plan says")}  # they do agree
    assert len(next(iter(found.values()))) == 4


@given(st.sampled_from(list(PLANS)), st.integers(1, 3), st.randoms(use_true_random=False))
def test_another_order_on_one_rank_is_found(jobs, made, plan, rank, shuffle: random.Random):
    job, reports = jobs[plan], list(made[plan])
    calls = list(reports[rank].steps[0].collectives)
    shuffle.shuffle(calls)
    axes = reports[rank].axes
    same = [(axes[call.group], *call.signature) for call in calls] == [
        (axes[call.group], *call.signature) for call in reports[rank].steps[0].collectives
    ]
    reports[rank] = with_step(reports[rank], 0, collectives=tuple(calls))
    found = faults(job, reports)
    assert set(found) == (set() if same else {("prefill", "all ranks communicate alike")})


def test_a_wrong_slice_is_named(jobs):
    job = jobs["tp4"]
    report = made_report(job, 0)
    path = "layers.0.self_attn.q_b_proj.weight"
    held = dict(report.steps[1].parameters) | {path: ("bfloat16", (96, 24))}
    found = faults(job, [with_step(report, 1, parameters=held)])
    assert found == {
        ("decode", "holds its slices of the weights"): (
            f"rank 0: {path} is [96, 24] in the graph, the plan gives [24, 24]",
        )
    }


def test_a_step_that_did_not_compile_is_only_that(jobs):
    job = jobs["tp4"]
    reports = [made_report(job, 0), with_step(made_report(job, 1), 0, collectives=(), error="no")]
    assert faults(job, reports) == {("prefill", "compiles"): ("rank 1: no",)}
    reports[0] = with_step(reports[0], 0, collectives=(), error="no")
    assert faults(job, reports) == {("prefill", "compiles"): ("rank 0: no", "rank 1: no")}


def test_many_faults_are_cut_short(jobs):
    job = jobs["tp4"]
    report = made_report(job, 0)
    held = {path: (dtype, (1, *shape)) for path, (dtype, shape) in report.steps[0].parameters.items()}
    (found,) = faults(job, [with_step(report, 0, parameters=held)]).values()
    assert len(found) == MAX_FAULTS + 1
    assert found[-1] == f"and {len(held) - MAX_FAULTS} more"


def test_rules_by_hand(tmp_path):
    """Two sums per layer, one of the embedding, one gather of logits; with replicas three more per MoE layer, and one
    of each result."""
    job = tiny_job(config_file(tmp_path), "a2:4", "dp2.tp2.ep4", mtp=0)
    calls = made_report(job, 0).steps[0].collectives
    kinds = [(call.kind, call.shape) for call in calls]
    bucket = job.buckets("prefill")[0]
    tokens = bucket["S"] * bucket["Q"]
    assert kinds.count(("all_reduce", (tokens, 64))) == 1 + 2 * 3
    assert kinds.count(("all_gather", (tokens, 64))) == kinds.count(("reduce_scatter", (2 * tokens, 64))) == 2
    assert kinds.count(("all_gather", (tokens, 6))) == 2
    assert kinds.count(("all_gather", (256, bucket["S"]))) == 1
    assert len(kinds) == 1 + 6 + 6 + 1 + 3
    shape, vocab = (bucket["S"], bucket["Q"]), job.demand.config.vocab_size
    assert [(call.dtype, call.shape, call.result) for call in calls[-3:]] == [
        ("float32", (1, bucket["S"], 1, vocab), (2, bucket["S"], 1, vocab)),
        ("bfloat16", (1, *shape, 64), (2, *shape, 64)),
        ("int8", (1, *shape), (2, *shape)),
    ]


def test_counting_gathers_the_choices_of_replicas(tmp_path):
    """Once in each MoE layer, those of drafts too; nothing where one replica has all tokens."""
    model, balancing = config_file(tmp_path), {"eplb_step_interval": 9, "num_redundant_experts": 4}
    for plan, steps in (("dp2.tp2.ep4", (2, 2, 2, 0)), ("tp4.ep4", (0, 0, 0, 0))):
        plain = made_report(tiny_job(model, "a2:4", plan, mtp=2), 0)
        counting = made_report(tiny_job(model, "a2:4", plan, mtp=2, **balancing), 0)
        for count, before, after in zip(steps, plain.steps, counting.steps, strict=True):
            more = list(after.collectives)
            for call in before.collectives:
                more.remove(call)
            assert [(call.kind, call.dtype, call.shape[1]) for call in more] == [("all_gather", "int32", 3)] * count


def test_rules_of_an_exchange_by_hand(tmp_path):
    """Each of 16 ranks holds one of 16 experts, so of 3 copies of a token it gets one: A = 16 * tokens."""
    job = tiny_job(config_file(tmp_path), "a2:16", "dp16.ep16", mtp=0)
    report = made_report(job, 5)
    for step in report.steps[:2]:
        tokens = step.bucket["S"] * step.bucket["Q"]
        kinds = [(call.kind, call.shape, call.result) for call in step.collectives]
        assert (
            kinds[:4]
            == [("dispatch", (tokens, 64), (16 * tokens, 64))] * 2 + [("combine", (16 * tokens, 64), (tokens, 64))] * 2
        )
        assert len(kinds) == 4 + 3  # and the results of replicas
        assert report.axes[step.collectives[0].group] == "exchange"
    balancing = {"eplb_step_interval": 9, "num_redundant_experts": 16}  # two slots on each rank
    counting = made_report(tiny_job(config_file(tmp_path), "a2:16", "dp16.ep16", mtp=0, **balancing), 5).steps[1]
    tokens = counting.bucket["S"] * counting.bucket["Q"]
    sent = [call for call in counting.collectives if call.kind == "dispatch"]
    assert [call.result for call in sent] == [(2 * 16 * tokens, 64)] * 2
    assert sum(call.dtype == "int32" for call in counting.collectives) == 2
    wide = tiny_job(config_file(tmp_path), "a2:16", "dp16.ep16", mtp=0, dtype="fp32")
    assert {call.kind for call in made_report(wide, 0).steps[1].collectives} == {"all_gather", "reduce_scatter"}


def test_rules_of_a_dense_family(tmp_path):
    job = tiny_job(config_file(tmp_path, LLAMA, vocab_size=509), "a2:2", "tp2")
    kinds = [(call.kind, call.result) for call in made_report(job, 1).steps[1].collectives]
    texts = job.buckets("decode")[0]["S"]
    assert kinds == [("all_reduce", (texts, 64))] * (1 + 2 * 2) + [("all_gather", (510, texts))]
    assert job.steps == ("prefill", "decode", "head")
    (head,) = made_report(job, 1).steps[2].collectives
    assert (head.kind, head.result) == ("all_gather", (510, 64))


def test_drafts_repeat_their_rules(tmp_path):
    model = config_file(tmp_path)
    once, twice = (made_report(tiny_job(model, "a2:4", "tp4", mtp=mtp), 0).steps[2] for mtp in (1, 2))
    assert len(twice.collectives) == 2 * len(once.collectives)
    assert replace(once.collectives[0]) == twice.collectives[0]
