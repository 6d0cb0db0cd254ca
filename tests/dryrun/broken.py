"""`msds.dryrun.child` after something was broken on purpose: the environment's BREAK says what."""

import os

import mindspore as ms
from mindspore import ops

from msds.dryrun import child
from msds.models import cut, deepseek
from msds_graphs import exchange
from msds_graphs.collectives import all_gather, all_reduce


def unsummed(x, axis, ranks):
    """A sum that was forgotten."""
    return x


def summed_twice(x, axis, ranks):
    """A sum too many, on rank 1 alone."""
    if ranks.rank == 1:
        return all_reduce(all_reduce(x, axis, ranks), axis, ranks)
    return all_reduce(x, axis, ranks)


def gathered_wide(x, axis, dim, ranks):
    """Tokens that travel in float32."""
    return all_gather(x.astype(ms.float32), axis, dim, ranks).astype(x.dtype)


def always_gathered(impl, machine, ranks, tokens, hidden, chosen, slots, dtype):
    """Tokens that do not go to their experts where they could."""
    return "gathered"


def sent_among_others(x, slots, weights, held, ranks):
    """Tokens that are sent in the group that other collectives use."""
    a3 = 1 if ranks.machine == "a3" else 0
    size, group = ranks.size("ep"), ranks.group("ep")
    made = exchange._dispatch(
        x, slots, size, ranks.index("ep"), held * size, weights, None, None, group, None, 0, 0, 0, a3, 0, 0, 0, 1
    )
    return made[0], made[3], (made[2], made[4], made[6])


def of_all_heads(params, config):
    """Heads of the whole model on a rank that has some."""
    return config.num_attention_heads


def value_is_read(*_):
    """A program that computes instead of compiling."""
    (ms.Tensor([1.0]) + ms.Tensor([1.0])).asnumpy()


def graph_is_run(*_):
    """A graph that is called, and hands out what it gives."""

    @ms.jit
    def twice(x):
        return ops.add(x, x)

    assert twice(ms.Tensor([1.0])) is None, "a graph ran"
    return []


match os.environ["BREAK"]:
    case "no sum of experts":
        deepseek.all_reduce = unsummed
    case "no sum of heads":
        cut.all_reduce = unsummed
    case "rank 1 sums twice":
        deepseek.all_reduce = summed_twice
    case "wide tokens":
        deepseek.all_gather = gathered_wide
    case "whole heads":
        deepseek._num_heads = of_all_heads
    case "experts without an exchange":
        deepseek.exchange_form = always_gathered
    case "exchange among others":
        exchange._dispatch_by_operator = sent_among_others
    case "value":
        child._steps = value_is_read
    case "run":
        child._steps = graph_is_run
    case other:
        raise SystemExit(f"cannot break {other!r}")

if __name__ == "__main__":
    child.main()
