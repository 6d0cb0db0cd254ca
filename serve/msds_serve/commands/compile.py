"""`msds compile --dry-run`: compile a model's steps for Ascend without hardware, and check how ranks communicate."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from msds_serve.commands import add_command, given
from msds_serve.commands.mesh import BALANCE_OPTIONS, add_balance


def add(commands: Any) -> None:
    """Define the command."""
    command = add_command(commands, "compile", run, "Compile a model for Ascend without hardware; no weights needed.")
    command.add_argument(
        "model", metavar="MODEL", help="folder, bare config.json, tiny-r1 or a preset such as deepseek-r1"
    )
    command.add_argument("--dry-run", action="store_true", help="required: compiling for NPUs that are there is not")
    command.add_argument("--mesh", required=True, help="a2:N (NPUs) or a3:N (dies), for example a2:16")
    command.add_argument("--plan", help="auto (default: the planner's best without stages) or for example tp8.ep8")
    command.add_argument("--dtype", help="bf16 (default), fp16 or fp32")
    command.add_argument("--max-model-len", metavar="N", type=int, help="default: the model's context, at most 4096")
    command.add_argument(
        "--concurrency", metavar="N", type=int, help="texts over all replicas; default 8, or the next multiple of them"
    )
    command.add_argument(
        "--mtp", metavar="K", type=int, help="draft tokens; default 1 where the model has an MTP layer"
    )
    add_balance(command)
    command.add_argument(
        "--steps", metavar="A,B", type=_names, help="prefill, prefill with all logits, decode, draft; default all used"
    )
    command.add_argument(
        "--all-buckets", action="store_true", default=None, help="every shape that serving compiles, not the largest"
    )
    command.add_argument(
        "--ranks", metavar="R", help="auto (default: the first and last of ranks with equal slices), all, or 0,5,15"
    )
    command.add_argument(
        "--layouts",
        action="store_true",
        default=None,
        help="a second opinion: dense layers under MindSpore's AutoParallel, forward and backward",
    )
    command.add_argument("--cache", metavar="FOLDER", type=Path, help="of the stub libraries; default ~/.cache/msds")
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if all compiled and every check holds, 1 if not."""
    from msds.dryrun.run import DryRunOptions, dry_run
    from msds.errors import OptionError
    from msds_graphs.errors import GraphError

    if not options.dry_run:
        raise OptionError(
            "msds compile needs --dry-run: compiling on NPUs happens when a model is loaded, which is not yet"
        )
    names = (
        "plan",
        "dtype",
        "max_model_len",
        "concurrency",
        "mtp",
        "steps",
        "all_buckets",
        "ranks",
        "cache",
        "layouts",
        *BALANCE_OPTIONS,
    )
    say = None if options.json else (lambda line: print(line, file=sys.stderr))
    try:
        report = dry_run(DryRunOptions(model=options.model, mesh=options.mesh, **given(options, names)), say)
    except GraphError as error:
        raise OptionError(str(error)) from None
    print(json.dumps(report.to_json(), ensure_ascii=False) if options.json else report.render())
    return 0 if report.passed else 1


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))
