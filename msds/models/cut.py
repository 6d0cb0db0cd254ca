"""Layers that are cut over the ranks of a replica: their input features, so that each rank has a summand of the output.

T tokens, D hidden. What is cut by output features needs nothing here: a rank's rows give a rank's outputs.
"""

from typing import Any

from mindspore import Tensor

from msds_graphs.collectives import all_reduce
from msds_graphs.ranks import Ranks
from msds_ops.linear import product, swiglu


def row_linear(node: dict[str, Tensor], x: Tensor, ranks: Ranks) -> Tensor:
    """`linear` whose input features are cut over tp: the summands of all ranks, then the bias, once."""
    y = all_reduce(product(node, x), "tp", ranks)
    if "bias" in node:
        y = y + node["bias"]
    return y


def cut_mlp(node: dict[str, Any], x: Tensor, ranks: Ranks) -> Tensor:
    """`swiglu_mlp` whose width is cut over tp: [T, D] -> [T, D]."""
    return row_linear(node["down_proj"], swiglu(node, x), ranks)
