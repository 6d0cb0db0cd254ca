"""The two ends of every decoder: embedding on one side, final norm and head on the other.

S sequences, Q query tokens per sequence, D hidden.
"""

from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from msds.config import ModelConfig
from msds_graphs.collectives import all_gather, all_reduce
from msds_graphs.ranks import Ranks
from msds_ops.iota import iota
from msds_ops.linear import linear
from msds_ops.norm import rms_norm

Params = dict[str, Any]
Cache = dict[str, Any]
Batch = dict[str, Tensor]
Outputs = dict[str, Tensor]


def embed(params: Params, tokens: Tensor, ranks: Ranks) -> Tensor:
    """[S, Q] int32 -> [S * Q, D]. A rank has consecutive rows of the table and gives zeros for the ids of others."""
    table, tokens = params["embed_tokens"]["weight"], tokens.reshape(-1)
    if ranks.size("tp") == 1:
        return ops.gather(table, tokens, 0)  # [T, D]
    row = tokens - ranks.index("tp") * table.shape[0]
    is_mine = ops.logical_and(row >= 0, row < table.shape[0])
    rows = ops.gather(table, ops.where(is_mine, row, ops.zeros_like(row)), 0)
    return all_reduce(ops.where(is_mine.expand_dims(-1), rows, ops.zeros((1,), rows.dtype)), "tp", ranks)


def outputs(
    params: Params, norm: Params, x: Tensor, batch: Batch, num_logits: int, config: ModelConfig, ranks: Ranks
) -> Outputs:
    """Final norm and head for the last `num_logits` real tokens of each sequence, or all (0).

    norm: the model's own or that of an MTP layer. x [S * Q, D] -> logits [S, num_logits, vocab] float32,
    hidden [S, num_logits, D], is_finite [S, Q] bool: of every token, and True for padding.
    """
    sequences, queries = batch["tokens"].shape
    hidden = final_hidden(norm, x, batch, config)
    index = iota(queries).expand_dims(0)
    is_padding = index >= batch["query_lens"].expand_dims(1)
    is_finite = ops.logical_or(ops.isfinite(hidden).all(-1), is_padding)
    rows = queries
    if 0 < num_logits < queries:
        rows = num_logits
        hidden = last_rows(hidden, batch["query_lens"], rows)
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    logits = linear(head, hidden.reshape(sequences * rows, -1)).astype(ms.float32)
    if ranks.size("tp") > 1:  # the last parts of the vocabulary may be filled up
        logits = all_gather(logits, "tp", 1, ranks)[:, : config.vocab_size]
    return {"logits": logits.reshape(sequences, rows, -1), "hidden": hidden, "is_finite": is_finite}


def final_hidden(norm: Params, x: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
    """The residual stream after the final norm: x [S * Q, D] -> [S, Q, D]."""
    return rms_norm(x, norm["weight"], config.rms_norm_eps).reshape(*batch["tokens"].shape, x.shape[-1])


def traced(out: Outputs, states: tuple[Tensor, ...], batch: Batch, trace: bool) -> dict[str, Any]:
    """The outputs and, where asked for, the residual stream after each layer: [S * Q, D] each -> [S, Q, D] each."""
    if not trace:
        return out
    layers: tuple[Tensor, ...] = ()
    for state in states:
        layers = (*layers, state.reshape(*batch["tokens"].shape, state.shape[-1]))
    return {"logits": out["logits"], "hidden": out["hidden"], "is_finite": out["is_finite"], "layers": layers}


def last_rows(hidden: Tensor, query_lens: Tensor, count: int) -> Tensor:
    """The last `count` real rows of each sequence: [S, Q, D], [S] -> [S, count, D].

    Row j of the result is token query_lens - count + j; where a sequence is shorter, its first rows repeat.
    """
    sequences, queries, features = hidden.shape
    row = query_lens.expand_dims(1) - count + iota(count).expand_dims(0)
    row = ops.maximum(row, 0) + queries * iota(sequences).expand_dims(1)
    return ops.gather(hidden.reshape(-1, features), row.reshape(-1), 0).reshape(sequences, count, features)
