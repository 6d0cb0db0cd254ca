"""`msds plan`: will a model fit, with which plan, and what would make it fit. Nothing is loaded or run."""

from __future__ import annotations

import argparse
import json
from typing import Any

from msds_serve.commands import add_command, given
from msds_serve.commands.mesh import BALANCE_OPTIONS, add_balance


def add(commands: Any) -> None:
    """Define the command."""
    command = add_command(commands, "plan", run, "Plan memory and sharding of a model from its config alone.")
    command.add_argument(
        "model", metavar="MODEL", help="folder, bare config.json, tiny-r1 or a preset such as deepseek-r1"
    )
    command.add_argument("--mesh", required=True, help="cpu:N, a2:N (NPUs) or a3:N (dies), for example a2:16")
    command.add_argument("--plan", default="auto", help="auto (default) or for example dp2.tp4.ep8")
    command.add_argument("--dtype", help="bf16 (default on NPUs), fp16 or fp32 (default on a CPU)")
    command.add_argument("--quant", default="none", help="none (default), w8a8 or w8a16")
    command.add_argument("--max-model-len", metavar="N", type=int, help="default: the model's context, at most 4096")
    command.add_argument(
        "--concurrency", metavar="N", type=int, help="texts of full length that must fit, decoded together; default 8"
    )
    command.add_argument("--mtp", metavar="K", type=int, default=0, help="draft tokens per step; default 0")
    add_balance(command)
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if the plan fits, 1 if not."""
    from msds.errors import OptionError
    from msds.planning import make_demand, make_plan
    from msds_graphs.errors import GraphError

    names = ("dtype", "quant", "max_model_len", "concurrency", "mtp", *BALANCE_OPTIONS)
    try:
        demand = make_demand(options.model, options.mesh, **given(options, names))
        report = make_plan(demand, options.plan)
    except GraphError as error:
        raise OptionError(str(error)) from None
    print(json.dumps(report.to_json(), ensure_ascii=False) if options.json else report.render())
    return 0 if report.fits else 1
