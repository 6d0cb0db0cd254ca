"""The model that ships with the package: a small DeepSeek-V3 that reasons about sums. Host code.

How it was made, what it can do and what it cannot: `tiny-r1/README.md`.
"""

import os
from pathlib import Path

TINY_R1 = "tiny-r1"
"""Its name on the command line and in the service."""

DEFAULT_MODEL = Path(__file__).parent / TINY_R1
"""Its Hugging Face folder."""


def model_folder(model: str) -> str:
    """The path that a MODEL means: the shipped folder by its name, unless something here has it; else as it is."""
    return str(DEFAULT_MODEL) if model == TINY_R1 and not os.path.exists(model) else model
