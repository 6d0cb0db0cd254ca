"""Where the two Ascend operators that send tokens to their experts and back may be used. Host code.

The limits are those that CANN documents for MoeDistributeDispatch and MoeDistributeCombine (ops-transformer,
aclnnMoeDistributeDispatch). The docstrings of `moe_distribute_dispatch` and `moe_distribute_combine` in MindSpore 2.10
repeat an older state of it (8 experts per token on A2 too, 256 in all). None of it was run on an NPU. Three more that
are no sizes, for whoever starts the ranks:

- the communication group of the operators may hold no other operator, so it is one of its own (axis "exchange");
- its buffers must have `buffer_bytes` each, which `create_groups` asks for; HCCL's own 200 MB suffice for few tokens.
  In CANN's layered mode of A2 (HCCL_INTRA_PCIE_ENABLE=1, HCCL_INTRA_ROCE_ENABLE=0) other sizes hold, which nobody asks
  for here;
- all ranks give as many tokens, which equal buckets see to.
"""

from __future__ import annotations

from dataclasses import dataclass

from msds_graphs.sharding import ShardPlan

IMPLEMENTATIONS = ("portable", "reference")
"""Of "exchange" in a plan: the operators where they may be used and else a gather; or what they do, by sums."""

DTYPES = ("bfloat16", "float16")
"""Number types in which tokens travel; quantising on the way is not used."""

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one kind of machine. tokens: of each rank. chosen: experts of a token. hidden: the largest, a multiple of
    `hidden_unit`. slots_per_rank: expert slots, None: as many as `SLOTS` leaves."""

    ranks: tuple[int, ...]
    tokens: int
    chosen: int
    hidden: int
    hidden_unit: int
    slots_per_rank: int | None


SLOTS = 512
"""Expert slots of all ranks."""
BUFFER_BYTES = 1 << 30
"""What a step may want of each of the group's two buffers. Ours, not the operators': buffers have room for the worst
case, and prompts in large chunks would take gigabytes from the cache to save messages that matter less there."""

LIMITS = {
    "a2": Limits(ranks=(16, 32, 64), tokens=256, chosen=16, hidden=7168, hidden_unit=32, slots_per_rank=24),
    "a3": Limits(
        ranks=(8, 16, 32, 64, 128, 144, 256, 288),
        tokens=512,
        chosen=8,
        hidden=7168,
        hidden_unit=7168,
        slots_per_rank=None,
    ),
}


def plan_refusal(machine: str, plan: ShardPlan) -> str:
    """Why ranks of a plan cannot use the operators, whatever is computed; "" if they can."""
    if machine not in LIMITS:
        return f"machine {machine!r} has no operators that exchange tokens: {' and '.join(LIMITS)} have"
    if plan.tp > 1:
        return f"tp is {plan.tp}: the ranks of a replica have the same tokens, the operators want each token once"
    if plan.ep != plan.dp:
        return f"ep is {plan.ep} and dp {plan.dp}: each rank of the exchange must be one replica with whole experts"
    legal = LIMITS[machine].ranks
    if plan.ep not in legal:
        return f"ep is {plan.ep}: on {machine} the operators join {', '.join(map(str, legal))} ranks"
    return ""


def step_refusal(machine: str, ranks: int, tokens: int, hidden: int, chosen: int, slots: int, dtype: str) -> str:
    """Why a step cannot use the operators where its plan can; "" if it can.

    tokens: of each rank; slots: places for experts of all ranks, redundant ones included.
    """
    limits = LIMITS[machine]
    if dtype not in DTYPES:
        return f"tokens are {dtype}: the operators move {' and '.join(DTYPES)}"
    if tokens > limits.tokens:
        return f"{tokens} tokens per rank: on {machine} the operators take at most {limits.tokens}"
    if hidden > limits.hidden or hidden % limits.hidden_unit:
        several = limits.hidden > limits.hidden_unit
        legal = f"multiples of {limits.hidden_unit} up to {limits.hidden}" if several else str(limits.hidden)
        return f"hidden size {hidden}: on {machine} the operators take {legal}"
    if chosen > min(limits.chosen, slots):
        return f"{chosen} experts per token: on {machine} the operators take at most {min(limits.chosen, slots)}"
    if slots > SLOTS or slots % ranks:
        return f"{slots} expert slots: the operators take at most {SLOTS}, as many on each of {ranks} ranks"
    if limits.slots_per_rank is not None and slots // ranks > limits.slots_per_rank:
        return f"{slots // ranks} expert slots per rank: on {machine} the operators take {limits.slots_per_rank}"
    buffer = buffer_bytes(machine, ranks, tokens, hidden, chosen, slots)
    if buffer > BUFFER_BYTES:
        return f"{tokens} tokens per rank want buffers of {buffer >> 20} MiB, more than {BUFFER_BYTES >> 20}"
    return ""


def received_rows(ranks: int, tokens: int, chosen: int, slots: int) -> int:
    """A, the rows that a rank may get at most: every token of every rank, for as many experts as it can hold of one."""
    return ranks * tokens * min(slots // ranks, chosen)


def buffer_bytes(machine: str, ranks: int, tokens: int, hidden: int, chosen: int, slots: int) -> int:
    """What each buffer of the group (HCCL_BUFFSIZE, or the group's own setting) must have, by CANN's formulas."""
    if machine == "a3":
        return 2 * _MIB + 2 * tokens * 2 * (hidden + 128) * (slots + chosen + 1)
    return 2 * (received_rows(ranks, tokens, chosen, slots) * hidden * 2 + 2 * _MIB)
