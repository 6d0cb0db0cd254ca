"""Whether the output head is the embedding: config and files decide, never the model family."""

import warnings

import numpy as np

from msds.checkpoint.dtypes import CHUNK_BYTES
from msds.checkpoint.loading import CheckpointWarning
from msds.checkpoint.shards import Checkpoint
from msds.errors import CheckpointError


def shares_embedding(
    checkpoint: Checkpoint,
    tie_word_embeddings: bool,
    *,
    embedding: str = "model.embed_tokens.weight",
    head: str = "lm_head.weight",
) -> bool:
    """True if the model uses `embedding` as its head; a stored `head` is then to be skipped.

    Tied and absent: shared. Not tied and present: its own. Tied and present: shared, as the config says,
    with a CheckpointWarning if the two differ. Not tied and absent: CheckpointError.
    """
    # A head in a damaged file is present: what is wrong with that file is for check_checkpoint to say.
    present = head in checkpoint or head in checkpoint.unreadable
    if not tie_word_embeddings:
        if not present:
            raise CheckpointError(
                f"{checkpoint.folder} has no {head}, but config.json says tie_word_embeddings false; "
                "set it to true if the model shares its embedding, or add the tensor"
            )
        return False
    if head in checkpoint and embedding in checkpoint and not are_equal(checkpoint, embedding, head):
        warnings.warn(
            f"{head} differs from {embedding}, but config.json says tie_word_embeddings true: "
            f"{embedding} is used for both",
            CheckpointWarning,
            stacklevel=2,
        )
    return True


def are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors hold the same values, compared by groups of rows."""
    shape = checkpoint.info(first).shape
    if shape != checkpoint.info(second).shape:
        return False
    rows = max(1, CHUNK_BYTES // max(1, 4 * shape[-1]))
    return all(
        np.array_equal(checkpoint.read(first, (part,)), checkpoint.read(second, (part,)))
        for start in range(0, shape[0], rows)
        for part in [slice(start, min(start + rows, shape[0]))]
    )
