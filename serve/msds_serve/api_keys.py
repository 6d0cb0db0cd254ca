"""Where the accepted API keys come from."""

from __future__ import annotations

import logging
import stat
from collections.abc import Sequence
from pathlib import Path

from msds.errors import OptionError

logger = logging.getLogger("msds")

API_KEY_VARIABLE = "MSDS_API_KEY"
"""Environment variable with one key: the server's, and what the client commands send."""


def accepted_keys(given: Sequence[str], file: str | None, environment: str | None) -> tuple[str, ...]:
    """The keys of the command line, of a file and of the environment, together.

    A file has one key a line; empty lines and lines that begin with # are none.

    OptionError for a file without a key or one that cannot be read. A file that others may read is used, with a
    warning.
    """
    keys = [*given]
    if file is not None:
        try:
            lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
            mode = Path(file).stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"api_key_file {file} cannot be read: {error}") from None
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise OptionError(f"api_key_file {file} holds no key: put one on each line, or leave the option out")
        if mode & stat.S_IROTH:
            logger.warning("api_key_file %s can be read by every user of this machine: chmod o-r it", file)
        keys += found
    if environment:
        keys.append(environment)
    return tuple(dict.fromkeys(keys))
