"""The model that ships with the package: a small DeepSeek-V3 that reasons about sums. Host code.

How it was made, what it can do and what it cannot: `tiny-r1/README.md`.
"""

from pathlib import Path

TINY_R1 = "tiny-r1"
"""Its name on the command line and in the service."""

DEFAULT_MODEL = Path(__file__).parent / TINY_R1
"""Its Hugging Face folder."""
