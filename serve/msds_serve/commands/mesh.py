"""The options of commands that can run on several processes, and how those are launched."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msds.errors import OptionError
from msds_serve.commands import given

if TYPE_CHECKING:
    from msds_graphs.sharding import ShardPlan

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


def check_balance(plan: ShardPlan, options: argparse.Namespace) -> None:
    """OptionError where the options of balancing, or they with the plan and the model, cannot be."""
    from msds.config import read_config
    from msds.models.specs.parts import check_redundant
    from msds.options import EngineOptions
    from msds_graphs.errors import GraphError

    checked = EngineOptions(**given(options, BALANCE_OPTIONS))
    if checked.eplb_step_interval:
        try:
            check_redundant(read_config(options.model), plan, checked.num_redundant_experts)
        except GraphError as error:
            raise OptionError(str(error)) from None


def add_cluster(ranks: Any) -> None:
    """Where the processes run and log."""
    ranks.add_argument(
        "--rank-logs",
        metavar="FOLDER",
        help="what each process logs; default a new temporary folder, which is removed when all ended well",
    )
    ranks.add_argument(
        "--nodes",
        metavar="N",
        type=int,
        default=1,
        help="machines, each running this command: same options, same checkpoint; default 1",
    )
    ranks.add_argument("--node-rank", metavar="I", type=int, default=0, help="which of them this is; default 0")
    ranks.add_argument("--master", metavar="HOST:PORT", help="address of machine 0, where PORT and PORT + 1 are free")
    ranks.add_argument(
        "--startup-timeout",
        metavar="SECONDS",
        type=float,
        help="how long machines, and then processes, wait for each other at the start; default 600",
    )


def check_single(options: argparse.Namespace, without: str) -> None:
    """OptionError for an option that means nothing without the one that asks for several processes."""
    given = {
        "--plan": getattr(options, "plan", None),
        "--step-timeout": getattr(options, "step_timeout", None),
        "--rank-logs": options.rank_logs,
        "--nodes": options.nodes if options.nodes != 1 else None,
        "--node-rank": options.node_rank or None,
        "--master": options.master,
        "--startup-timeout": options.startup_timeout,
    }
    for name, value in given.items():
        if value is not None:
            raise OptionError(f"{name} is for several processes: give {without} too, or leave it out")


def checked_plan(mesh_text: str, plan_text: str | None, model: str) -> ShardPlan:
    """The plan of a mesh; OptionError where the mesh or the model cannot be run so."""
    from msds.config import read_config
    from msds.models.specs import model_specs
    from msds.models.specs.parts import moe_layers, rank_parts
    from msds_graphs.errors import GraphError
    from msds_graphs.mesh import Mesh
    from msds_graphs.ranks import Ranks
    from msds_graphs.sharding import ShardPlan, written_axes

    config = read_config(model)
    try:
        mesh = Mesh.parse(mesh_text)
        text = plan_text if plan_text is not None else f"tp{mesh.ranks}"
        if written_axes(text).get("ep", 1) > 1 and not moe_layers(config):
            raise OptionError(
                f"plan {text} has ep, but {model} ({config.model_type}) has no routed experts to spread: leave ep out"
            )
        plan = ShardPlan.parse(text)
        plan.check_mesh(mesh)
    except GraphError as error:
        raise OptionError(str(error)) from None
    if mesh.hardware.kind != "cpu":
        raise OptionError(f"mesh {mesh}: this version runs models on cpu:N; `msds plan` plans for {mesh.hardware.kind}")
    try:
        rank_parts(model_specs(config).spec(config, "float32"), config, Ranks(plan))
    except GraphError as error:
        raise OptionError(f"plan {plan} does not fit {model}: {error}") from None
    return plan


def replica_options(engine: dict[str, Any], replicas: int) -> dict[str, Any]:
    """The engine's options, with max_num_seqs for as many replicas: OptionError where the one that was asked for does
    not divide, the default is raised to the next that does."""
    from msds.options import EngineOptions

    default = EngineOptions().max_num_seqs
    if "max_num_seqs" not in engine and default % replicas:
        raised = -(-default // replicas) * replicas
        print(
            f"msds: max_num_seqs is {raised}, not the usual {default}: {replicas} replicas (dp) share it evenly",
            file=sys.stderr,
        )
        return engine | {"max_num_seqs": raised}
    EngineOptions(max_num_seqs=engine.get("max_num_seqs", default)).seqs_per_replica(replicas)
    return engine


def common_facts(command: str, model: str, plan: ShardPlan, engine: Mapping[str, Any]) -> dict[str, str]:
    """What the nodes of a command must have in common."""
    from msds.launch.facts import model_facts

    return {"the command": command, **model_facts(model, str(plan), engine)}


def step_timeout(options: argparse.Namespace) -> float:
    """Seconds; OptionError where it is no time."""
    timeout = STEP_TIMEOUT if options.step_timeout is None else float(options.step_timeout)
    if not timeout > 0:
        raise OptionError(f"step_timeout is {timeout:g}: it must be a number of seconds above 0")
    return timeout


def launch_ranks(
    entry: str,
    arguments: Mapping[str, Any],
    options: argparse.Namespace,
    ranks: int,
    *,
    facts: Callable[[], Mapping[str, str]],
    stop_seconds: float,
    drains: bool = False,
) -> None:
    """Launch `entry` on all ranks as the command line says, and return when they are done.

    facts: what several nodes must have in common; drains: as for `launch`.
    """
    from msds.launch import SECRET_VARIABLE, Cluster, launch

    secret = os.environ.get(SECRET_VARIABLE, "") if options.nodes > 1 else ""
    limit = {} if options.startup_timeout is None else {"startup_seconds": options.startup_timeout}
    cluster = Cluster(ranks, options.nodes, options.node_rank, options.master, secret, **limit)
    launch(
        entry,
        arguments,
        cluster,
        facts=facts() if options.nodes > 1 else {},
        logs=Path(options.rank_logs) if options.rank_logs is not None else None,
        stop_seconds=stop_seconds,
        drains=drains,
    )
