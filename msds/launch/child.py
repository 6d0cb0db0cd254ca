"""The process of one rank: `python -m msds.launch.child`, which reads its job from stdin.

It ends with its parent, however that ends. What it has to say to the launcher goes through a pipe, as JSON lines:
{"ready": true} once it has joined the others, {"error": "..."} where its entry raised.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from typing import Any

from msds.errors import MsdsError, RankError
from msds.launch.place import Place

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the entry that the job names, `function(place, **arguments)`. Exit code 0, 1, or 2 for bad input."""
    job: dict[str, Any] = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job["parent"]:
        return 1  # it ended before the line above
    logging.basicConfig(format=f"msds: {job['name']}: %(message)s", level=logging.INFO)
    if job["place"] is None:
        _join()  # the scheduler: it returns when all ranks have left
        return 0
    place = Place(**{**job["place"], "leader": tuple(job["place"]["leader"]), "report": job["report"]})
    try:
        if job["collectives"]:
            _join()
        place.say({"ready": True})
        module, _, function = job["entry"].partition(":")
        getattr(importlib.import_module(module), function)(place, **job["arguments"])
    except MsdsError as error:
        place.say({"error": str(error)})
        return error.exit_code if isinstance(error, RankError) else 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()
        place.say({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _join() -> None:
    from msds_graphs.cluster import join

    join()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # MindSpore leaves its cluster as Python ends, which waits for the others: they would wait for ever
        os._exit(code)
