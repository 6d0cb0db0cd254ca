"""Estimated seconds: what must hold whatever the constants are, and one step by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msds.planning import make_demand, make_plan
from msds.planning.collectives import rules
from msds.planning.cost import LAYER_SECONDS, MEMORY_SHARE, decode_time, prefill_time, tokens_per_step
from msds.planning.links import LINK_SHARE, Links
from msds.planning.memory import Ledger
from msds.planning.search import rank_plans
from msds_graphs.sharding import ShardPlan


def ledger(model: str, mesh: str, plan: str, **options: Any) -> Ledger:
    return Ledger(make_demand(model, mesh, **options), ShardPlan.parse(plan))


def test_a_single_text_on_one_npu_reads_all_weights_and_its_cache() -> None:
    """Qwen 1.5B: 28 layers, all weights but the embedding, 28 KiB of cache per token."""
    step = decode_time(ledger("r1-distill-qwen-1.5b", "a2:1", "tp1"), 1, 1000)
    d, inner, vocab = 1536, 8960, 151936
    layer = (12 + 4) * 128 * (d + 1) + d * d + 3 * d * inner + 2 * d
    read = 2 * (28 * layer + vocab * d + d) + 1000 * 2 * 2 * 128 * 2 * 28
    assert step.memory == pytest.approx(read / (1.6e12 * MEMORY_SHARE))
    assert step.links == 0
    assert step.launch == pytest.approx(28 * LAYER_SECONDS)
    assert step.seconds == pytest.approx(step.memory + step.launch)


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    """One token of R1 reads 8 of 256 experts; a thousand read all."""
    r1 = ledger("deepseek-r1", "a2:32", "tp32.ep32", quant="w8a8")
    experts = r1.stage_weights[0]["routed_experts"]
    one, two = decode_time(r1, 1, 1).memory, decode_time(r1, 2, 1).memory
    share = 1.6e12 * MEMORY_SHARE
    assert (two - one) * share == pytest.approx(experts * (8 / 256) * (1 - 8 / 256), rel=0.02)
    many = decode_time(r1, 4096, 1).memory
    assert (many - one) * share == pytest.approx(experts * (1 - 8 / 256), rel=0.1)


PLANS = st.sampled_from(["tp16.ep16", "dp2.tp8.ep16", "dp16.ep16", "dp4.tp4.ep4", "tp8.pp2", "dp2.tp2.ep4.pp4"])


@settings(max_examples=10)
@given(PLANS, st.integers(1, 200), st.integers(1, 8192))
def test_more_work_never_takes_less_time(plan: str, texts: int, context: int) -> None:
    r1 = ledger("deepseek-r1", "a2:16", plan, quant="w8a8")
    step = decode_time(r1, texts, context).seconds
    assert decode_time(r1, 2 * texts, context).seconds >= step
    assert decode_time(r1, texts, 2 * context).seconds >= step
    assert prefill_time(r1, 4096 + context).seconds >= prefill_time(r1, 4096).seconds


def test_a_step_with_drafts_gives_more_tokens_for_more_time() -> None:
    plain = ledger("deepseek-r1", "a2:16", "tp16.ep16", quant="w8a8")
    drafts = ledger("deepseek-r1", "a2:16", "tp16.ep16", quant="w8a8", mtp=1)
    assert decode_time(drafts, 8, 4096).seconds > decode_time(plain, 8, 4096).seconds
    assert [round(tokens_per_step(k), 3) for k in (0, 1, 2)] == [1.0, 1.7, 2.19]


def test_stages_work_side_by_side() -> None:
    """Each of two stages has half of the layers and of the texts: as long per token as one rank with half the texts,
    while a text alone gains nothing."""
    one, two = ledger("r1-distill-llama-8b", "a2:1", "tp1"), ledger("r1-distill-llama-8b", "a2:2", "pp2")
    assert decode_time(two, 64, 4096).memory == pytest.approx(decode_time(one, 32, 4096).memory)
    assert decode_time(two, 64, 4096).launch == decode_time(one, 32, 4096).launch
    assert decode_time(two, 1, 4096).seconds > decode_time(one, 1, 4096).seconds
    assert prefill_time(two, 4096).seconds == pytest.approx(prefill_time(one, 4096).seconds / 2, rel=0.2)


def test_sums_over_a_node_by_hand() -> None:
    """Llama 70B, tp 8, 64 texts: two sums of 64 x 8192 bf16 values in each of 80 layers and one of the embedding, 7/8
    of them sent twice, three steps of latency; and the float32 logits of the others' rows of 128,256."""
    links = decode_time(ledger("r1-distill-llama-70b", "a2:8", "tp8"), 64, 100).links
    one = 2 * 7 / 8 * 64 * 8192 * 2 / (196e9 * LINK_SHARE) + 3 * 10e-6
    logits = 7 / 8 * 64 * 128256 * 4 / (196e9 * LINK_SHARE) + 3 * 10e-6
    assert links == pytest.approx((80 * 2 + 1) * one + logits)


def test_tokens_to_experts_and_back_by_hand() -> None:
    """R1 over 16 replicas on two nodes, 4 texts each: every layer with experts gathers the bf16 tokens of all and their
    8 ids and weights in float32, and scatters the sums. One part comes from the other node, then 7 pairs of parts from
    inside. At the end all have the float32 logits, bf16 states and whether these are finite, of all."""
    node, between = 196e9 * LINK_SHARE, 25e9 * LINK_SHARE
    latency = 3 * 10e-6 + 25e-6
    tokens, routing = 4 * 7168 * 2, 4 * 2 * 8 * 4

    def gathered(*sizes: int) -> float:
        return sum(7 * 2 * size / node + size / between + latency for size in sizes)

    total = 58 * gathered(tokens, routing, tokens) + gathered(4 * 129280 * 4, tokens, 4)
    for plan in ("dp16.ep4", "dp16"):
        assert decode_time(ledger("deepseek-r1", "a2:16", plan), 64, 100).links == pytest.approx(total)
    # activations travel as they are, whatever the weights are kept in
    assert decode_time(ledger("deepseek-r1", "a2:16", "dp16.ep4", quant="w8a8"), 64, 100).links == pytest.approx(total)


def test_tokens_sent_to_their_experts_by_hand() -> None:
    """R1 over 16 replicas with 16 whole experts each: of a token's 8 copies in bf16 half go to the 8 ranks of the other
    node and 7/16 to the 7 others of its own, meanwhile; every layer with experts twice, there and back. No routing
    travels. A3 has all 16 in one node. Prompts come in chunks that are too large for that."""
    rows, tokens = 4 * 8 * 7168 * 2, 4 * 7168 * 2

    def ends(*steps: tuple[int, float, float]) -> float:
        """(parts of a group less one, parts that come of each, link): the results of all replicas, at the end."""
        return sum(
            sum(parts * size / (bandwidth * LINK_SHARE) for parts, bandwidth, _ in steps)
            + sum(latency for _, _, latency in steps)
            for size in (4 * 129280 * 4, tokens, 4)
        )

    far = rows / 2 / (25e9 * LINK_SHARE) + 25e-6
    assert far > rows * 7 / 16 / (196e9 * LINK_SHARE) + 10e-6
    two = ledger("deepseek-r1", "a2:16", "dp16.ep16")
    results = ends((14, 196e9, 3 * 10e-6), (1, 25e9, 25e-6))
    assert decode_time(two, 64, 100).links == pytest.approx(58 * 2 * far + results)
    inside = rows * 15 / 16 / (196e9 * LINK_SHARE) + 10e-6
    one = ledger("deepseek-r1", "a3:16", "dp16.ep16", quant="w8a8")
    assert decode_time(one, 64, 100).links == pytest.approx(58 * 2 * inside + ends((15, 196e9, 4 * 10e-6)))
    kinds = {rule.kind for rule in rules(two.demand, two.plan, "prefill", {"S": 1, "Q": 512})}
    assert "dispatch" not in kinds
    assert kinds >= {"all_gather", "reduce_scatter"}


def test_buffers_of_the_exchange_are_in_the_memory() -> None:
    """Its group beside those of the world, dp and ep: two buffers of what the largest step that uses it wants."""
    sizes = {}
    for plan in ("dp16.ep8", "dp16.ep16"):
        one = ledger("deepseek-r1", "a2:16", plan, quant="w8a8")
        sizes[plan] = one.stage(0, 4, 4096).communication
    domain = 400 << 20
    assert sizes["dp16.ep8"] == 4 * domain  # and one of ep_rest
    prefill = [bucket["S"] * bucket["Q"] for bucket in one.demand.ladders(4096, 4)[0]]
    tokens = max(size for size in prefill if size <= 256)
    assert sizes["dp16.ep16"] == 3 * domain + 2 * (2 * (16 * tokens * 8 * 7168 * 2 + (2 << 20)))


@pytest.mark.parametrize("plan", ["dp2.tp8.ep16", "tp16.ep16", "dp16.ep16"])
@pytest.mark.parametrize("mtp", [0, 2])
def test_a_step_has_the_messages_that_the_dry_run_checks(plan: str, mtp: int) -> None:
    """The seconds of a step's messages are those of the rules of its pass and of its drafts, nothing else."""
    one = ledger("deepseek-r1", "a2:16", plan, mtp=mtp)
    links = Links(one.demand.mesh, one.plan)
    steps = [("decode", {"S": 8 // one.plan.dp or 1, "Q": 1 + mtp})]
    steps += [("draft", {"S": 8 // one.plan.dp or 1, "Q": 1})] if mtp else []
    found = [rule for name, bucket in steps for rule in rules(one.demand, one.plan, name, bucket)]
    total = sum(rule.count * len(rule.places) * links.seconds(rule) for rule in found)
    assert decode_time(one, 8, 100).links == pytest.approx(total)
    bucket = {"S": 1, "Q": 512}
    total = sum(
        rule.count * len(rule.places) * links.seconds(rule) for rule in rules(one.demand, one.plan, "prefill", bucket)
    )
    assert prefill_time(one, 4096).links == pytest.approx(total)


def test_stages_have_the_messages_of_the_whole() -> None:
    """But for handing over: each layer's are counted in one stage, embedding and logits once."""
    whole = decode_time(ledger("deepseek-r1", "a3:16", "tp8.dp2.ep16"), 8, 100).links
    staged = ledger("deepseek-r1", "a3:32", "tp8.dp2.ep16.pp2")
    per_hand_over = staged.links.hand_over(4 * 7168 * 2 / 8)
    assert decode_time(staged, 16, 100).links == pytest.approx(whole + 2 * per_hand_over)


def test_processes_of_a_cpu_make_every_message_of_sums() -> None:
    """They have no other collective for a part of them: a gather moves twice what it would."""
    cpu = ledger("deepseek-r1", "cpu:4", "dp4.ep4")
    gather = next(rule for rule in rules(cpu.demand, cpu.plan, "decode", {"S": 2, "Q": 1}) if rule.kind == "all_gather")
    size = 4 * 2 * 7168 * 4
    assert cpu.links.seconds(gather) == pytest.approx(2 * 3 / 4 * size / (2e9 * LINK_SHARE) + 2 * 1e-3)


def test_groups_inside_a_node_talk_faster() -> None:
    inside = decode_time(ledger("deepseek-r1", "a2:16", "dp2.tp8.ep16", quant="w8a8"), 64, 4096)
    across = decode_time(ledger("deepseek-r1", "a2:16", "tp16.ep16", quant="w8a8"), 64, 4096)
    assert inside.links != across.links
    one = decode_time(ledger("r1-distill-llama-70b", "a2:8", "tp8"), 64, 4096)
    two = decode_time(ledger("r1-distill-llama-70b", "a2:16", "dp2.tp8"), 128, 4096)
    # replicas of a dense model talk at the end alone: each has the other's logits, states, and whether they are finite
    results = sum(size / (25e9 * LINK_SHARE) + 25e-6 for size in (64 * 128256 * 4, 64 * 8192 * 2, 64))
    assert two.links == pytest.approx(one.links + results)


@pytest.mark.parametrize(
    ("mesh", "quant", "texts", "best"),
    [
        ("a2:16", "w8a8", None, "tp16.ep16"),
        ("a2:32", "none", None, "tp32.ep32"),
        ("a2:32", "w8a8", 256, "dp32.ep32"),
        ("a3:16", "w8a8", None, "tp16.ep16"),
        ("a3:128", "none", None, "dp2.tp64.ep128"),
    ],
)
def test_the_best_plan_of_v3_runs_and_has_whole_experts(mesh: str, quant: str, texts: int | None, best: str) -> None:
    """Nothing speaks for cutting experts; and more texts want more replicas, whose tokens go to their experts."""
    found = rank_plans(make_demand("deepseek-v3", mesh, quant=quant, concurrency=texts))[0]
    assert (str(found.plan), found.status) == (best, "fits")


def test_published_figures_stand_beside_the_estimates() -> None:
    report = make_plan(make_demand("deepseek-v3", "a2:32", quant="w8a8", concurrency=512))
    best = report.comparisons[0]
    assert best.anchor.tokens_per_second == 808
    assert best.estimate is not None
    assert best.ratio == pytest.approx(best.estimate / 808)
    text = report.render()
    assert "published decode at 100 ms: 808 tok/s per NPU; this plan, estimated" in text
    assert "an estimate" in text.splitlines()[0]
    alone = make_plan(make_demand("r1-distill-qwen-1.5b", "a2:1")).comparisons
    assert [item.anchor.tokens_per_second for item in alone] == [168.9]
    assert make_plan(make_demand("deepseek-v2", "a2:16")).comparisons == ()
    per_die = make_plan(make_demand("deepseek-r1", "a3:16", quant="w8a8")).comparisons
    assert 1943 / 2 in [item.anchor.tokens_per_second for item in per_die]
