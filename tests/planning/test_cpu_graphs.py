"""What compiled shapes keep on a CPU: the rates against MindSpore itself, and the counts by hand."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from msds.planning import cpu_graphs, make_demand, make_plan
from msds.planning.collectives import rules
from msds.planning.cpu_graphs import (
    COMMUNICATION_BYTES,
    CONSTANT,
    GATHER_BYTES,
    PROCESS_BYTES,
    REPEATED,
    SELECTED,
    TRANSPOSED,
    collectives_bytes,
    graphs_bytes,
)
from msds.pretrained import TINY_R1
from msds_graphs.sharding import ShardPlan
from tests.reference.variants import LLAMA, V3

ROWS, COLUMNS, TIMES = 512, 512, 16


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "top",
        )
    ]


def bytes_in_use() -> int:
    """Of the C allocator, its mapped pieces included."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    gc.collect()
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def doubled(x: Tensor) -> Any:
    return x * 2.0


def repeated_row(x: Tensor, row: Tensor, column: Tensor) -> Any:
    for _ in range(TIMES):
        x = x * row
    return x


def repeated_column(x: Tensor, row: Tensor, column: Tensor) -> Any:
    for _ in range(TIMES):
        x = x + column
    return x


def transposed(x: Tensor, row: Tensor, column: Tensor) -> Any:
    for _ in range(TIMES):
        x = x.reshape(16, 32, 512).transpose(1, 0, 2).reshape(512, 512)
    return x


def selected(x: Tensor, row: Tensor, column: Tensor) -> Any:
    is_mine = column > 0.5
    for _ in range(TIMES):
        x = ops.where(is_mine, x, ops.zeros((1,), ms.float32))
    return x


def nothing_kept(x: Tensor, row: Tensor, column: Tensor) -> Any:
    y = x * 2.0
    for _ in range(TIMES):
        x = ops.concat((x[:, 256:], x[:, :256]), 1) + y
    return x


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs mallinfo2 of glibc 2.33")
@pytest.mark.parametrize(
    ("function", "rate"),
    [
        (repeated_row, REPEATED),
        (repeated_column, REPEATED),
        (transposed, TRANSPOSED),
        (selected, SELECTED),
        (nothing_kept, 0),
    ],
)
def test_operators_keep_what_is_counted(function: Callable[..., Any], rate: int) -> None:
    """Bytes per element of an operator's result while its graph lives; 1.5 more for what does not grow with it."""
    rng = np.random.default_rng(0)
    x, row, column = (Tensor(rng.random(shape, np.float32)) for shape in ((ROWS, COLUMNS), (COLUMNS,), (ROWS, 1)))
    ms.jit(doubled)(x).asnumpy()  # what the process takes once
    before = bytes_in_use()
    graph = ms.jit(function)
    graph(x, row, column).asnumpy()
    kept = (bytes_in_use() - before) / (ROWS * COLUMNS * TIMES)
    assert rate <= kept < rate + 1.5


@pytest.fixture
def config_folder(tmp_path: Path) -> Callable[..., str]:
    def write(config: dict[str, Any], **changes: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return str(tmp_path)

    return write


def test_a_dense_layer_by_hand(config_folder: Callable[..., str]) -> None:
    """Two norms of two operands each, two rotations of two, four transposes, the zeros that a cache write may put."""
    config = make_demand(config_folder(LLAMA), "cpu:1", max_model_len=64).config
    hidden, queries = config.hidden_size, config.hidden_size
    keys = queries // config.num_attention_heads * config.num_key_value_heads
    want = (
        REPEATED * (4 * hidden + 2 * queries + 2 * keys) + TRANSPOSED * (2 * queries + 2 * keys) + CONSTANT * 2 * keys
    )
    assert cpu_graphs._llama_layer(config, ShardPlan(), 10) == 10 * want


def test_expanding_attention_keeps_its_context_and_absorbed_does_not(config_folder: Callable[..., str]) -> None:
    config = make_demand(config_folder(V3), "cpu:1", max_model_len=64).config

    def layer(blocks: int, *, is_prefill: bool) -> int:
        bucket = {"S": 2, "Q": 4, "B": blocks}
        return cpu_graphs._deepseek_layer(config, ShardPlan(), bucket, 16, is_prefill=is_prefill, has_experts=False)

    heads, features = 4, 16 + 16
    assert layer(3, is_prefill=True) - layer(2, is_prefill=True) == TRANSPOSED * 2 * 16 * heads * features
    assert layer(3, is_prefill=False) == layer(2, is_prefill=False)


def test_tokens_of_all_replicas_and_selected_outputs_are_kept(config_folder: Callable[..., str]) -> None:
    """Two replicas that share the experts: twice the pairs, half of the experts, a selection of every pair's output."""
    config = make_demand(config_folder(V3), "cpu:1", max_model_len=64).config

    def layer(plan: ShardPlan) -> int:
        bucket = {"S": 2, "Q": 4, "B": 1}
        return cpu_graphs._deepseek_layer(config, plan, bucket, 16, is_prefill=False, has_experts=True)

    outputs = 8 * config.num_experts_per_tok * config.hidden_size
    assert layer(ShardPlan(dp=2, ep=2)) - layer(ShardPlan()) == REPEATED * outputs + SELECTED * 2 * outputs


def test_every_shape_and_the_process_are_in_the_plan(config_folder: Callable[..., str]) -> None:
    """More drafts, longer chunks and longer texts are more or larger shapes."""
    folder = config_folder(V3)
    plain, drafting = (make_demand(folder, "cpu:1", max_model_len=1024, mtp=mtp) for mtp in (0, 2))
    sizes = [graphs_bytes(demand, ShardPlan(), 8, 1024) for demand in (plain, drafting)]
    assert sizes[1] > 1.5 * sizes[0]
    assert graphs_bytes(plain, ShardPlan(), 8, 256) < sizes[0]
    assert make_plan(plain).memory.runtime == PROCESS_BYTES + sizes[0]


def test_shapes_are_those_of_a_replica(config_folder: Callable[..., str]) -> None:
    """Eight texts over two replicas are four in each; a hundred have more shapes, and larger ones."""
    folder = config_folder(V3)
    plan = ShardPlan(dp=2, ep=2)
    few, many = (make_demand(folder, "cpu:2", max_model_len=1024, concurrency=texts) for texts in (None, 100))
    for demand, share in ((few, 4), (many, 50)):
        sizes = graphs_bytes(demand, plan, share, 1024)
        assert make_plan(demand, "dp2.ep2").memory.runtime == PROCESS_BYTES + sizes
    assert graphs_bytes(few, plan, 4, 1024) < graphs_bytes(few, plan, 8, 1024) < graphs_bytes(few, plan, 50, 1024)


@pytest.mark.parametrize(("free", "is_said"), [(1 << 30, True), (1 << 40, False)])
def test_graphs_that_the_rest_of_the_memory_does_not_hold_are_said(
    config_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch, free: int, is_said: bool
) -> None:
    monkeypatch.setattr("msds.planning.demand.free_memory_bytes", lambda: free)
    report = make_plan(make_demand(config_folder(V3), "cpu:1", max_model_len=1024))
    assert any("activations and graphs may take" in note for note in report.notes) is is_said


def test_collectives_by_hand(config_folder: Callable[..., str]) -> None:
    """A decode step of two replicas of two ranks each gathers tokens and routing in every MoE layer, results at the
    end; the two of a replica join logits and have parts of the embedding."""
    demand = make_demand(config_folder(V3), "cpu:4", max_model_len=64)
    config, bucket, plan = demand.config, {"S": 4, "Q": 1, "B": 4}, ShardPlan(dp=2, tp=2, ep=4)
    kept = sum(len(rule.places) * cpu_graphs._rule_bytes(rule, plan) for rule in rules(demand, plan, "decode", bucket))
    moe_layers = sum(config.is_moe_layer(index) for index in range(config.num_hidden_layers))
    gathered = 2 * 4 * (config.hidden_size + 2 * config.num_experts_per_tok) * moe_layers
    results = 2 * 4 * (config.vocab_size + config.hidden_size + 1)
    logits = 4 * (-(-config.vocab_size // 2) * 2)
    embedding = 4 * config.hidden_size
    elements = SELECTED * (gathered + results + logits + embedding) + TRANSPOSED * logits
    assert kept == elements + GATHER_BYTES * (2 * moe_layers + 3 + 1)
    assert not any(cpu_graphs._rule_bytes(rule, ShardPlan()) for rule in rules(demand, plan, "decode", bucket))


def test_other_ranks_are_in_the_plan_and_domains_of_npus_are_not(config_folder: Callable[..., str]) -> None:
    folder = config_folder(V3)
    demand = make_demand(folder, "cpu:2", max_model_len=64)
    for text, plan, share in (("tp2.ep2", ShardPlan(tp=2, ep=2), 8), ("dp2.ep2", ShardPlan(dp=2, ep=2), 4)):
        memory = make_plan(demand, text).memory
        assert memory.communication == collectives_bytes(demand, plan, share, 64)
        assert COMMUNICATION_BYTES < memory.communication < 3 * COMMUNICATION_BYTES
    assert make_plan(make_demand(folder, "cpu:1", max_model_len=64)).memory.communication == 0


MEASURED = [
    # mesh, plan, --max-model-len, texts, draft tokens, and the peak (VmHWM, MiB) of the largest rank of `msds serve`
    # that answered as many texts of full length
    ("cpu:1", "tp1", 128, 2, 0, 773),
    ("cpu:1", "tp1", 1024, 8, 0, 1178),
    ("cpu:2", "tp2", 128, 2, 0, 815),
    ("cpu:2", "tp2.ep2", 128, 2, 0, 810),
    ("cpu:2", "tp2.ep2", 1024, 8, 0, 1191),
    ("cpu:2", "dp2", 512, 4, 0, 966),
    ("cpu:2", "dp2.ep2", 1024, 8, 0, 1353),
    ("cpu:2", "dp2.ep2", 512, 4, 1, 1132),
    ("cpu:4", "dp2.tp2.ep4", 256, 4, 0, 924),
]


@pytest.mark.parametrize(("mesh", "plan", "length", "texts", "mtp", "peak"), MEASURED)
def test_plans_of_tiny_r1_are_within_a_tenth_of_what_was_measured(
    mesh: str, plan: str, length: int, texts: int, mtp: int, peak: int
) -> None:
    memory = make_plan(make_demand(TINY_R1, mesh, max_model_len=length, concurrency=texts, mtp=mtp), plan).memory
    planned = memory.weight_bytes + memory.cache_bytes + memory.other_bytes
    assert planned / (peak << 20) == pytest.approx(1, abs=0.1)
