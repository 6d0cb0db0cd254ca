"""What a replica takes of a step's batch, and what every rank gets of its outputs.

R replicas, the ranks along dp: each has a cache and sequences of its own, and all compute steps of one shape together.
"""

from typing import Any

from msds.models.ends import Batch, Outputs
from msds_graphs.collectives import after, all_gather
from msds_graphs.ranks import Ranks


def own_part(batch: Batch, ranks: Ranks) -> Batch:
    """The batch of this rank's replica: [R, S, ..] -> [S, ..]; as it is where there is one replica."""
    if ranks.size("dp") == 1:
        return batch
    own: dict[str, Any] = {}
    for name in batch.keys():  # noqa: SIM118  (graph mode does not iterate over a dict itself)
        own[name] = batch[name][ranks.index("dp")]
    return own


def of_all_replicas(outputs: Outputs, ranks: Ranks) -> Outputs:
    """The outputs of all replicas on every rank: [S, ..] -> [R, S, ..]; as they are where there is one replica.

    The first output must come of every collective before it.
    """
    if ranks.size("dp") == 1:
        return outputs
    names = tuple(outputs.keys())
    whole: dict[str, Any] = {}
    last = outputs[names[0]]
    for name in names:
        last = all_gather(after(outputs[name], last, ranks).expand_dims(0), "dp", 0, ranks)
        whole[name] = last
    return whole
