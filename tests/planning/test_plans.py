"""What fits where: every number by arithmetic of its own on the published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msds.config import config_json, read_config
from msds.errors import ConfigError, OptionError
from msds.planning import make_demand, make_plan
from msds.planning.memory import GRAPH_BYTES
from msds.presets import PRESETS
from msds.pretrained import DEFAULT_MODEL
from msds_graphs.errors import GraphError
from msds_graphs.sharding import ShardPlan
from tests.planning.by_hand import (
    BUDGET,
    DENSE,
    GIB,
    dense_cache_bytes,
    dense_weight_bytes,
    v3_cache_bytes,
    v3_weight_bytes,
)


def planned(model: str, mesh: str, plan: str = "auto", **options: Any) -> Any:
    return make_plan(make_demand(model, mesh, **options), plan)


def remedy(report: Any, change: str) -> Any:
    return next(item for item in report.remedies if item.change.partition(" --plan ")[0] == change)


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-r1"])
def test_v3_in_bf16_is_too_large_for_two_a2_nodes(model: str) -> None:
    """671 billion parameters in bf16 are 1,250 GiB, sixteen NPUs have 1,024."""
    report = planned(model, "a2:16")
    assert not report.fits
    assert report.most_texts == report.longest_text == 0
    assert (report.plan.tp, report.plan.dp, report.plan.ep) == (16, 1, 16)
    assert report.memory.weight_bytes == v3_weight_bytes(16, 16, 16, int8=False)
    assert report.memory.budget == BUDGET
    assert report.memory.needed > v3_weight_bytes(16, 16, 16, int8=False) > 80 * GIB
    text = report.render()
    assert f"needs {report.memory.needed / GIB:.1f} GiB per NPU, has 57.6" in text
    assert "nothing was run on an NPU" in text
    for change in ("--quant w8a8", "--quant w8a16", "--mesh a2:32"):
        assert remedy(report, change).fits
        assert f"{remedy(report, change).needed / GIB:.1f} of 57.6" in text
    assert not any(item.status == "fits" for item in report.others)


@pytest.mark.parametrize("quant", ["w8a8", "w8a16"])
@pytest.mark.parametrize(
    ("plan", "tp", "ep", "dp"), [("tp16.ep16", 16, 16, 1), ("dp2.tp8.ep16", 8, 16, 2), ("dp4.tp4.ep8", 4, 8, 4)]
)
def test_r1_with_int8_weights_fits_two_a2_nodes(quant: str, plan: str, tp: int, ep: int, dp: int) -> None:
    report = planned("deepseek-r1", "a2:16", plan, quant=quant, concurrency=32)
    assert report.fits
    assert report.memory.weight_bytes == v3_weight_bytes(tp, ep, 16, int8=True) < 48 * GIB
    assert report.memory.cache_bytes == v3_cache_bytes(32 // dp, 4096)
    assert report.total_bytes["weights"] == 16 * report.memory.weight_bytes
    assert any("does not exist here yet" in note and quant in note for note in report.notes)


def test_r1_in_bf16_fits_four_a2_nodes() -> None:
    report = planned("deepseek-r1", "a2:32", "dp4.tp8.ep32")
    assert report.fits
    assert report.memory.weight_bytes == v3_weight_bytes(8, 32, 32, int8=False)
    assert report.memory.cache_bytes == v3_cache_bytes(2, 4096)  # eight texts over four replicas
    assert planned("deepseek-r1", "a2:32").fits


@pytest.mark.parametrize(
    ("plan", "options", "note"),
    [
        (
            "dp16.ep16",
            {},
            "decode sends tokens to their experts by operators of Ascend, which were compiled but never run",
        ),
        ("dp16.ep8", {}, "replicas gather each other's tokens for the experts, since ep is 8 and dp 16"),
        (
            "dp16.ep16",
            {"concurrency": 16 * 300},
            "for the experts, since 300 tokens per rank: on a2 the operators take",
        ),
    ],
)
def test_how_replicas_reach_experts_is_said(plan: str, options: dict[str, int], note: str) -> None:
    assert any(note in text for text in planned("deepseek-r1", "a2:16", plan, quant="w8a8", **options).notes)


def test_mtp_layers_are_counted_where_drafts_are_wanted() -> None:
    report = planned("deepseek-r1", "a2:16", "tp16.ep16", quant="w8a8", mtp=1)
    # the MTP layer's eh_proj stays bf16, and it has a cache layer of its own
    assert report.memory.weight_bytes == v3_weight_bytes(16, 16, 16, int8=True, mtp=True)
    assert report.memory.cache_bytes == v3_cache_bytes(8, 4096, layers=62)


@pytest.mark.parametrize(
    ("name", "ranks", "tp", "fits"),
    [
        ("r1-distill-qwen-1.5b", 1, 1, True),
        ("r1-distill-qwen-1.5b", 2, 2, True),
        ("r1-distill-qwen-7b", 1, 1, True),
        ("r1-distill-qwen-7b", 4, 4, True),
        ("r1-distill-qwen-14b", 1, 1, True),
        ("r1-distill-qwen-14b", 8, 8, True),
        ("r1-distill-qwen-32b", 1, 1, False),  # 65.5 GB of weights alone
        ("r1-distill-qwen-32b", 2, 2, True),
        ("r1-distill-qwen-32b", 8, 8, True),
        ("r1-distill-llama-8b", 1, 1, True),
        ("r1-distill-llama-8b", 8, 8, True),
        ("r1-distill-llama-70b", 1, 1, False),
        ("r1-distill-llama-70b", 2, 2, False),  # 65.7 GiB on each
        ("r1-distill-llama-70b", 4, 4, True),
        ("r1-distill-llama-70b", 8, 8, True),
    ],
)
def test_distilled_models(name: str, ranks: int, tp: int, fits: bool) -> None:
    report = planned(name, f"a2:{ranks}", f"tp{tp}", concurrency=4)
    weights, cache = dense_weight_bytes(name, tp), dense_cache_bytes(name, tp, 4, 4096)
    assert report.memory.weight_bytes == weights
    assert report.memory.cache_bytes == cache
    assert report.fits is fits
    assert (weights + cache + report.memory.other_bytes <= BUDGET) is fits
    assert planned(name, f"a2:{ranks}").fits is fits
    if not fits:
        assert remedy(report, f"--mesh a2:{2 if '32b' in name else 4}").fits


def test_a_model_has_a_plan_for_every_part_of_a_node() -> None:
    """Heads limit tp, so the rest of the NPUs are replicas or stages: 12 heads and two of keys allow tp 2 at most."""
    for name in DENSE:
        for ranks in (1, 2, 4, 8):
            plan = planned(name, f"a2:{ranks}").plan
            assert plan.ranks == ranks
            assert DENSE[name][4] % plan.tp == 0


def test_room_for_texts_is_the_largest_that_fits() -> None:
    report = planned("r1-distill-qwen-7b", "a2:1")
    most = report.most_texts
    assert planned("r1-distill-qwen-7b", "a2:1", concurrency=most).fits
    over = planned("r1-distill-qwen-7b", "a2:1", concurrency=most + 1)
    assert not over.fits
    assert over.memory.cache_bytes == dense_cache_bytes("r1-distill-qwen-7b", 1, most + 1, 4096)
    assert remedy(over, f"--concurrency {most}").fits
    longest = planned("r1-distill-qwen-32b", "a2:2", max_model_len=131072, concurrency=1).longest_text
    assert longest == 131072  # all of its context: 32 GiB of cache over two NPUs, beside 30.5 GiB of weights
    short = planned("r1-distill-llama-70b", "a2:4", max_model_len=131072, concurrency=2)
    assert (short.memory.needed <= BUDGET) is short.fits


def test_tables_have_a_unit_in_which_no_part_vanishes() -> None:
    tiny = planned("tiny-r1", "cpu:1").render()
    assert "MiB of one process" in tiny
    assert " 0.000" not in tiny
    memory = planned("tiny-r1", "cpu:1").memory
    for size in memory.weights.values():
        value = size / 2**20
        assert f" {value:.1f}" in tiny if value >= 1 else f" {value:.3f}" in tiny
    assert f"the whole process {(memory.needed + memory.other_bytes) / 2**20:>17,.1f}" in tiny
    assert "GiB of one NPU" in planned("deepseek-v2-lite", "a2:1").render()


def test_what_serving_runs_is_said() -> None:
    for mesh in ("cpu:2", "a2:2"):
        (said,) = (note for note in planned("deepseek-v2-lite", mesh).notes if "msds serve runs" in note)
        assert "runs dp, tp and ep over CPU processes in float32 today, not pp" in said
        assert ("NPU" in said) is (mesh == "a2:2")


def test_a_text_that_is_too_long_is_met_with_its_length() -> None:
    report = planned("r1-distill-qwen-14b", "a2:1", max_model_len=131072, concurrency=2)
    assert not report.fits  # 2 x 131,072 tokens of 192 KiB are 48 GiB, beside 27.5 GiB of weights
    assert report.memory.cache_bytes == dense_cache_bytes("r1-distill-qwen-14b", 1, 2, 131072)
    assert remedy(report, "--concurrency 1").fits


def test_shapes_are_those_of_one_replica() -> None:
    """Of 512 texts over 16 replicas each compiles for 32: decode of 1, 8 and 32 instead of 1, 8, 32, 128 and 512."""
    one, sixteen = (planned("r1-distill-qwen-1.5b", "a2:16", plan, concurrency=512) for plan in ("tp2.pp8", "dp16"))
    lengths = len(sixteen.demand.ladders(4096, 1)[1])
    assert one.memory.runtime - sixteen.memory.runtime == 2 * lengths * GRAPH_BYTES
    assert planned("r1-distill-qwen-1.5b", "a2:16", "dp16").memory.runtime < sixteen.memory.runtime


def test_texts_that_replicas_cannot_share_evenly_are_said() -> None:
    said = [note for note in planned("deepseek-v2-lite", "a2:16", "dp16.ep16").notes if "--max-num-seqs" in note]
    assert len(said) == 1
    assert "those of --max-num-seqs 16" in said[0]
    assert not any("--max-num-seqs" in note for note in planned("deepseek-v2-lite", "a2:4", "dp4.ep4").notes)


def test_redundant_experts_are_held_by_every_rank() -> None:
    """R1 on 32 NPUs with 32 replicas: nine experts of a layer on each instead of eight."""
    plain, spare = (
        planned("deepseek-r1", "a2:32", "dp4.tp8.ep32", **options)
        for options in ({}, {"eplb_step_interval": 100, "num_redundant_experts": 32})
    )
    expert = 3 * 7168 * 2048 * 2
    experts = plain.memory.weights["routed_experts"]
    assert experts == 58 * 8 * expert
    assert spare.memory.weights["routed_experts"] == 58 * 9 * expert
    # int32: an expert's slots (at most one on each of the 32 ranks), how many they are, how often it was chosen
    assert spare.memory.weights["balancing"] == 58 * 256 * (32 + 1 + 1) * 4
    assert spare.memory.weight_bytes == v3_weight_bytes(8, 32, 32, int8=False) + 58 * (expert + 256 * 34 * 4)
    assert spare.speed.decode.links > plain.speed.decode.links  # choices are gathered to be counted
    assert any("9 slots of a rank in each MoE layer for 288 over ep = 32, 32 more" in note for note in spare.notes)
    text = spare.render()
    assert "balancing" in text
    assert "balancing" not in plain.render()


def test_redundant_experts_in_int8_and_of_mtp() -> None:
    spare = planned(
        *("deepseek-r1", "a2:16", "tp16.ep16"),
        quant="w8a8",
        mtp=1,
        eplb_step_interval=100,
        num_redundant_experts=16,
    )
    expert = 3 * 7168 * 2048 + 4 * (2 * 2048 + 7168)
    want = v3_weight_bytes(16, 16, 16, int8=True, mtp=True) + 59 * (expert + 256 * (16 + 2) * 4)
    assert spare.memory.weight_bytes == want


def test_replicas_that_do_not_fit_have_a_remedy() -> None:
    report = planned("deepseek-r1", "a2:32", "tp32.ep32", eplb_step_interval=9, num_redundant_experts=256)
    assert not report.fits
    assert remedy(report, "--num-redundant-experts 0").fits
    assert remedy(report, "--num-redundant-experts 0").needed == planned(
        "deepseek-r1", "a2:32", "tp32.ep32", eplb_step_interval=9
    ).memory.needed  # fmt: skip


@pytest.mark.parametrize(
    ("model", "plan", "options", "message"),
    [
        (
            "deepseek-r1",
            "tp16.ep16",
            {"eplb_step_interval": 9, "num_redundant_experts": 3},
            "256 experts and 3.*use 16",
        ),
        ("deepseek-r1", "tp16", {"eplb_step_interval": 9}, "plan tp16 has no ep"),
        ("deepseek-v2-lite", "tp2.ep2", {"eplb_step_interval": 9, "num_redundant_experts": 66}, "with 64 each of 2"),
        ("r1-distill-llama-70b", "tp8", {"eplb_step_interval": 9}, "no routed experts"),
        ("deepseek-r1", "tp16.ep16", {"num_redundant_experts": 16}, "16 without eplb_step_interval"),
        ("deepseek-r1", "tp16.ep16", {"eplb_step_interval": -1}, "eplb_step_interval is -1"),
    ],
)
def test_what_cannot_be_balanced_is_refused(model: str, plan: str, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        planned(model, f"a2:{ShardPlan.parse(plan).ranks}", plan, **options)


def test_the_best_plan_with_replicas_can_hold_them() -> None:
    report = planned("deepseek-r1", "a2:32", eplb_step_interval=9, num_redundant_experts=16)
    assert (256 + 16) % report.plan.ep == 0
    assert report.plan.ep > 1
    assert any(item.status == "illegal" and "272" not in item.reason for item in report.others)


def test_pipeline_stages_hold_their_own_layers() -> None:
    """The last stage has the head and the first the embedding, 80 layers are 40 and 40: the stages weigh the same but
    for the final norm."""
    report = planned("r1-distill-llama-70b", "a2:4", "tp2.pp2", concurrency=1)
    whole = dense_weight_bytes("r1-distill-llama-70b", 2)
    assert report.memory.weight_bytes == (whole + 2 * 8192) // 2
    assert report.total_bytes["weights"] == 2 * whole
    assert report.memory.stage == 1


def test_ranking_is_by_fit_then_time_and_says_why() -> None:
    report = planned("deepseek-r1", "a2:32")
    ranks = {"fits": 0, "too large": 1, "illegal": 2}
    order = [ranks[item.status] for item in report.others]
    assert order == sorted(order)
    assert all(item.reason for item in report.others)
    assert len({str(item.plan) for item in report.others} | {str(report.plan)}) == len(report.others) + 1
    fitting = [item for item in report.others if item.status == "fits"]
    assert [item.plan.pp > 1 for item in fitting] == sorted(item.plan.pp > 1 for item in fitting)
    assert min(item.decode.seconds for item in fitting if item.plan.pp == 1) > 0.9 * report.speed.decode.seconds
    assert all("stages are planned, not executed" in item.reason for item in fitting if item.plan.pp > 1)
    # every pp * dp * tp = 32 with every ep that divides dp * tp: 2^5 in three factors, and 1 + log2(dp * tp) eps each
    assert len(report.others) + 1 == sum((k + 1) * (k + 1) for k in range(6))


def test_stages_are_chosen_only_where_nothing_else_fits_and_said_to_be_planned() -> None:
    report = planned("deepseek-v3", "a2:16", quant="w8a8", concurrency=224)
    assert report.plan.pp == 2
    assert not any(item.status == "fits" and item.plan.pp == 1 for item in report.others)
    assert any("2 pipeline stages are planned, not executed" in note for note in report.notes)
    assert not any("pipeline stages are planned" in note for note in planned("deepseek-v3", "a2:32").notes)


def test_gathered_tokens_are_held() -> None:
    """Each of eight replicas holds the tokens of all, and room for all their pairs."""
    one, eight = (planned("deepseek-r1", "a3:128", plan) for plan in ("tp128.ep128", "dp8.tp16.ep128"))
    tokens = 512
    more = 7 * tokens * 8 * (2 * 7168 + 3 * 2048) * 2 + 2 * 8 * tokens * 7168 * 2
    assert eight.memory.activations - one.memory.activations > more


def test_illegal_plans_are_refused_with_the_reason() -> None:
    with pytest.raises(OptionError, match=r"dp2.tp4.ep8 for deepseek-r1 on a2:16.*= 1 \* 2 \* 4 = 8 ranks, .* has 16"):
        planned("deepseek-r1", "a2:16", "dp2.tp4.ep8")
    with pytest.raises(OptionError, match="number of key/value heads 2 cannot be cut by tp = 4"):
        planned("r1-distill-qwen-1.5b", "a2:4", "tp4")
    with pytest.raises(GraphError, match=r"'a2:13'.*nearest are a2:8 and a2:16"):
        planned("deepseek-r1", "a2:13")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4': use one of bf16, fp16, fp32"),
        ({"quant": "w4a8"}, "quant is 'w4a8': use one of none, w8a8, w8a16"),
        ({"mtp": -1}, "mtp is -1"),
        ({"mtp": 9}, "mtp is 9: it must be 0 .* at most 8"),
        ({"mtp": 1}, "mtp is 1, but r1-distill-qwen-7b has no MTP layer"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"max_model_len": 131073}, "max_model_len is 131073: the model's context is 131072"),
        ({"max_model_len": 0}, "max_model_len is 0"),
    ],
)
def test_bad_options_are_named(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_demand("r1-distill-qwen-7b", "a2:1", **options)


def test_what_a_cpu_does_not_have_is_refused() -> None:
    with pytest.raises(OptionError, match=r"dtype is 'bf16': on a CPU .*; use fp32, or a2 or a3"):
        make_demand("r1-distill-qwen-7b", "cpu:1", dtype="bf16")
    assert make_demand("r1-distill-qwen-7b", "cpu:1", dtype="fp32").dtype == "float32"
    with pytest.raises(OptionError, match="quant is 'w8a8': on a CPU"):
        make_demand("r1-distill-qwen-7b", "cpu:1", quant="w8a8")


def test_unknown_models_name_the_presets() -> None:
    for name in ("deepseek-r9", ""):
        with pytest.raises(
            ConfigError, match=rf"'{name}' is neither a folder.*tiny-r1 ships .*deepseek-v3, .*r1-distill-llama-70b"
        ):
            make_demand(name, "a2:16")


def test_the_shipped_model_has_a_name_unless_something_here_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_demand("tiny-r1", "cpu:1", mtp=1).config == read_config(DEFAULT_MODEL)
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-r1", "deepseek-v3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config_json(PRESETS["deepseek-v2-lite"]())))
        assert make_demand(name, "cpu:1").config == PRESETS["deepseek-v2-lite"]()


@pytest.mark.parametrize(("dtype", "item"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_number_types_scale_weights_and_cache(dtype: str, item: int) -> None:
    report = planned("r1-distill-llama-8b", "a2:1", dtype=dtype, concurrency=1)
    assert report.memory.weight_bytes == dense_weight_bytes("r1-distill-llama-8b", 1) * item // 2
    assert report.memory.cache_bytes == dense_cache_bytes("r1-distill-llama-8b", 1, 1, 4096) * item // 2
