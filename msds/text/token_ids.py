"""Token ids as callers give them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from msds.errors import PromptError


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """The ids as an array [T] if there is at least one and the model has them all; PromptError otherwise."""
    if not hasattr(token_ids, "__len__") or isinstance(token_ids, (str, bytes)) or len(token_ids) == 0:
        raise PromptError("the prompt has no token ids: it needs at least one")
    if all(kind is int for kind in set(map(type, token_ids))) and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return np.array(token_ids, np.int64)
    for index, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            raise PromptError(f"token id {token!r} at position {index} is not a whole number in [0, {vocab_size})")
    return np.asarray(token_ids, np.int64)
