"""MindSpore's errors in one line: what it said first, and where in the user's source."""

from __future__ import annotations

import re
from pathlib import Path

import mindspore

from msds_graphs.errors import GraphError

_LOCATION = re.compile(r"In file (?P<file>[^,\n]+?):(?P<line>\d+)")
_LIBRARIES = (str(Path(mindspore.__file__).parent), str(Path(__file__).parent))
_LONGEST = 400


def explain(error: Exception, what: str) -> GraphError:
    """A GraphError of one line for an error raised while `what`; raise it `from` the original."""
    if isinstance(error, GraphError):  # one of our own checks, made inside the compilation
        return GraphError(f"{what}: {error}")
    text = str(error)
    message = _first_line(text) or type(error).__name__
    place = _user_location(text)
    return GraphError(f"{what}: {message}{f' (at {place})' if place else ''}")


def _first_line(text: str) -> str:
    """The first line that says something: no ruler, no heading of a section of MindSpore's report."""
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or set(stripped) <= {"-"} or stripped.startswith("- ") or stripped.endswith(":"):
            continue
        return stripped if len(stripped) <= _LONGEST else stripped[:_LONGEST] + "..."
    return ""


def _user_location(text: str) -> str:
    """The innermost `file:line` of the report that is neither MindSpore's nor this package's."""
    found = [
        f"{match['file']}:{match['line']}"
        for match in _LOCATION.finditer(text)
        if not match["file"].startswith(_LIBRARIES)
    ]
    return found[-1] if found else ""
