"""Hugging Face transformers as an independent reference, where the user has it installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from msds.errors import OptionError


def transformers_logits(folder: str | Path, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Teacher-forced float32 logits [T, V] by transformers from the same folder, nothing fetched from a network.

    OptionError when transformers or torch is not installed, or when transformers cannot load the folder.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise OptionError(
            f"the reference needs transformers and torch ({error}): pip install torch transformers, or leave it out"
        ) from None
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).eval()
    except Exception as error:  # whatever transformers cannot load is for it to say
        raise OptionError(f"transformers cannot load {folder}: {error}") from error
    with torch.no_grad():
        logits = model(torch.tensor([list(token_ids)])).logits[0]
    return np.asarray(logits.float().numpy(), np.float32)
