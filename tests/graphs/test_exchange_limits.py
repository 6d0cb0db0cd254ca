"""Where Ascend's operators for experts may be used: every limit has its refusal, and nothing else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.exchange_limits import BUFFER_BYTES, buffer_bytes, plan_refusal, received_rows, step_refusal
from msds_graphs.sharding import ShardPlan

MIB = 1 << 20
V3 = {"ranks": 16, "tokens": 32, "hidden": 7168, "chosen": 8, "slots": 256, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("machine", "plan", "reason"),
    [
        ("a2", "dp16.ep16", ""),
        ("a2", "dp64.ep64", ""),
        ("a3", "dp8.ep8", ""),
        ("a3", "dp144.ep144", ""),
        ("a2", "dp16.ep16.pp2", ""),
        ("cpu", "dp16.ep16", "machine 'cpu' has no operators that exchange tokens: a2 and a3 have"),
        ("a2", "dp8.tp2.ep16", "tp is 2: the ranks of a replica have the same tokens"),
        ("a2", "dp16.ep8", "ep is 8 and dp 16"),
        ("a2", "dp16", "ep is 1 and dp 16"),
        ("a2", "dp8.ep8", "ep is 8: on a2 the operators join 16, 32, 64 ranks"),
        ("a3", "dp12.ep12", "ep is 12: on a3 the operators join 8, 16, 32, 64, 128, 144, 256, 288 ranks"),
        ("a2", "tp1", "ep is 1"),
    ],
)
def test_plans(machine: str, plan: str, reason: str) -> None:
    found = plan_refusal(machine, ShardPlan.parse(plan))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("machine", "changes", "reason"),
    [
        ("a2", {}, ""),
        ("a3", {}, ""),
        ("a2", {"dtype": "float16"}, ""),
        ("a2", {"dtype": "float32"}, "tokens are float32: the operators move bfloat16 and float16"),
        ("a2", {"tokens": 256}, ""),
        ("a2", {"tokens": 257}, "257 tokens per rank: on a2 the operators take at most 256"),
        ("a3", {"tokens": 257}, "257 tokens per rank want buffers of 1897 MiB, more than 1024"),
        ("a3", {"tokens": 513}, "513 tokens per rank: on a3 the operators take at most 512"),
        ("a2", {"hidden": 64}, ""),
        ("a2", {"hidden": 72}, "hidden size 72: on a2 the operators take multiples of 32 up to 7168"),
        ("a2", {"hidden": 7200}, "hidden size 7200"),
        ("a3", {"hidden": 5120}, "hidden size 5120: on a3 the operators take 7168"),
        ("a2", {"chosen": 16}, ""),
        ("a3", {"chosen": 9}, "9 experts per token: on a3 the operators take at most 8"),
        ("a2", {"chosen": 17, "slots": 32}, "17 experts per token: on a2 the operators take at most 16"),
        ("a2", {"chosen": 9, "slots": 8, "ranks": 8}, "9 experts per token: on a2 the operators take at most 8"),
        ("a2", {"slots": 384}, ""),
        ("a2", {"slots": 400}, "25 expert slots per rank: on a2 the operators take 24"),
        ("a3", {"slots": 512}, ""),
        ("a3", {"slots": 528}, "528 expert slots: the operators take at most 512"),
        ("a3", {"slots": 255}, "255 expert slots: the operators take at most 512, as many on each of 16 ranks"),
    ],
)
def test_steps(machine: str, changes: dict[str, object], reason: str) -> None:
    found = step_refusal(machine, **(V3 | changes))  # type: ignore[arg-type]
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@given(st.sampled_from(["a2", "a3"]), st.integers(1, 600), st.sampled_from([16, 32, 64]), st.integers(1, 17))
def test_what_fits_goes_on_fitting_with_fewer_tokens(machine: str, tokens: int, ranks: int, chosen: int) -> None:
    sizes = {"ranks": ranks, "hidden": 7168, "chosen": chosen, "slots": 256, "dtype": "bfloat16"}
    if not step_refusal(machine, tokens=tokens, **sizes):  # type: ignore[arg-type]
        assert not step_refusal(machine, tokens=max(1, tokens // 2), **sizes)  # type: ignore[arg-type]
        assert buffer_bytes(machine, ranks, tokens, 7168, chosen, 256) <= BUFFER_BYTES


def test_rows_and_buffers_by_hand() -> None:
    """16 ranks of 16 experts and 32 tokens: a rank may get each of 512 tokens for 8 experts; 64 ranks have but 4."""
    assert received_rows(16, 32, 8, 256) == 512 * 8
    assert received_rows(64, 32, 8, 256) == 2048 * 4
    assert buffer_bytes("a2", 16, 32, 7168, 8, 256) == 2 * (512 * 8 * 7168 * 2 + 2 * MIB)
    # CANN: 1024^2 * (buffer in MB - 2) / 2 >= tokens * 2 * (hidden + 128) * (ranks * slots of each + chosen + 1)
    buffer = buffer_bytes("a3", 16, 32, 7168, 8, 256)
    assert (buffer - 2 * MIB) / 2 == 32 * 2 * (7168 + 128) * (256 + 8 + 1)
