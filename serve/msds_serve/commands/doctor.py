"""`msds doctor`: preflight of this machine, its software and a checkpoint, in under a minute."""

from __future__ import annotations

import argparse
import json
from typing import Any

from msds_serve.commands import add_command


def add(commands: Any) -> None:
    """Define the command."""
    command = add_command(commands, "doctor", run, "Check this machine, its software and a checkpoint before serving.")
    command.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder, bare config.json, tiny-r1 or a preset; default: none"
    )
    command.add_argument("--port", metavar="N", type=int, default=8000, help="port to serve on; default 8000")
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    """Exit code 1 if a check failed, else 0."""
    from msds.doctor import examine

    report = examine(options.model, port=options.port)
    print(json.dumps(report.to_json(), ensure_ascii=False) if options.json else report.render())
    return 0 if report.passed else 1
