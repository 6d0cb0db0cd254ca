"""The options of commands that can run on several processes, and how those are launched."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msds.errors import OptionError
from msds_serve.commands import given

STEP_TIMEOUT = 300.0
BALANCE_OPTIONS = ("eplb_step_interval", "num_redundant_experts")


def add_mesh(command: argparse.ArgumentParser) -> None:
    """--mesh and --plan, and what belongs to them."""
    ranks = command.add_argument_group("several processes (default: one)")
    ranks.add_argument("--mesh", help="processes that hold the model together: cpu:N")
    ranks.add_argument("--plan", help="who computes what, for example tp2 or dp2.tp2.ep4; default tpN")
    ranks.add_argument(
        "--step-timeout",
        metavar="SECONDS",
        type=float,
        help=f"a process that is longer in a step is lost, and all end; default {STEP_TIMEOUT:g}",
    )
    add_cluster(ranks)


def add_balance(command: argparse.ArgumentParser) -> None:
    """Options of expert balancing, named as elsewhere in this field."""
    experts = command.add_argument_group("expert balancing (EPLB; needs a plan with ep)")
    experts.add_argument(
        "--eplb-step-interval",
        metavar="STEPS",
        type=int,
        help="every STEPS steps count how often experts were chosen and, where that evens the load of ranks out, "
        "move experts between two steps; answers stay the same up to rounding; default 0, never",
    )
    experts.add_argument(
        "--num-redundant-experts",
        metavar="N",
        type=int,
        help="replicas per MoE layer, over all ranks, of the experts that are chosen most; default 0",
    )


def check_balance(plan: str, options: argparse.Namespace) -> None:
    """OptionError where the options of balancing, or they with the plan and the model, cannot be."""
    from msds.config import read_config
    from msds.models.specs.parts import check_redundant
    from msds.options import EngineOptions
    from msds_graphs.errors import GraphError
    from msds_graphs.sharding import ShardPlan

    checked = EngineOptions(**given(options, BALANCE_OPTIONS))
    if checked.eplb_step_interval:
        try:
            check_redundant(read_config(options.model), ShardPlan.parse(plan), checked.num_redundant_experts)
        except GraphError as error:
            raise OptionError(str(error)) from None


def add_cluster(ranks: Any) -> None:
    """Where the processes run and log."""
    ranks.add_argument("--rank-logs", metavar="FOLDER", help="what each process logs; default a new temporary folder")
    ranks.add_argument(
        "--nodes", metavar="N", type=int, default=1, help="machines, each running this command; default 1"
    )
    ranks.add_argument("--node-rank", metavar="I", type=int, default=0, help="which of them this is; default 0")
    ranks.add_argument("--master", metavar="HOST:PORT", help="address of machine 0, where PORT and PORT + 1 are free")


def check_single(options: argparse.Namespace, without: str) -> None:
    """OptionError for an option that means nothing without the one that asks for several processes."""
    given = {
        "--plan": getattr(options, "plan", None),
        "--step-timeout": getattr(options, "step_timeout", None),
        "--rank-logs": options.rank_logs,
        "--nodes": options.nodes if options.nodes != 1 else None,
        "--node-rank": options.node_rank or None,
        "--master": options.master,
    }
    for name, value in given.items():
        if value is not None:
            raise OptionError(f"{name} is for several processes: give {without} too, or leave it out")


def checked_plan(mesh_text: str, plan_text: str | None, model: str, max_num_seqs: int | None) -> tuple[str, int]:
    """The plan of a mesh, as text, and its ranks; OptionError where the mesh, the model or the answers that are decoded
    together (None: the default) cannot be run so."""
    from msds.config import read_config
    from msds.models.specs import model_specs
    from msds.models.specs.parts import rank_parts
    from msds.options import EngineOptions
    from msds_graphs.errors import GraphError
    from msds_graphs.mesh import Mesh
    from msds_graphs.ranks import Ranks
    from msds_graphs.sharding import ShardPlan

    try:
        mesh = Mesh.parse(mesh_text)
        plan = ShardPlan.parse(plan_text if plan_text is not None else f"tp{mesh.ranks}")
        plan.check_mesh(mesh)
    except GraphError as error:
        raise OptionError(str(error)) from None
    if mesh.hardware.kind != "cpu":
        raise OptionError(f"mesh {mesh}: this version runs models on cpu:N; `msds plan` plans for {mesh.hardware.kind}")
    engine = EngineOptions() if max_num_seqs is None else EngineOptions(max_num_seqs=max_num_seqs)
    engine.seqs_per_replica(plan.dp)
    config = read_config(model)
    try:
        rank_parts(model_specs(config).spec(config, "float32"), config, Ranks(plan))
    except GraphError as error:
        raise OptionError(f"plan {plan} does not fit {model}: {error}") from None
    return str(plan), plan.ranks


def step_timeout(options: argparse.Namespace) -> float:
    """Seconds; OptionError where it is no time."""
    timeout = STEP_TIMEOUT if options.step_timeout is None else float(options.step_timeout)
    if not timeout > 0:
        raise OptionError(f"step_timeout is {timeout:g}: it must be a number of seconds above 0")
    return timeout


def launch_ranks(
    entry: str, arguments: Mapping[str, Any], options: argparse.Namespace, ranks: int, *, stop_seconds: float
) -> None:
    """Launch `entry` on all ranks as the command line says, and return when they are done."""
    from msds.launch import SECRET_VARIABLE, Cluster, launch

    secret = os.environ.get(SECRET_VARIABLE, "") if options.nodes > 1 else ""
    cluster = Cluster(ranks, options.nodes, options.node_rank, options.master, secret)
    logs = Path(options.rank_logs) if options.rank_logs is not None else None
    launch(entry, arguments, cluster, logs=logs, collectives=True, stop_seconds=stop_seconds)
