"""What the processes of a model on several ranks run: rank 0 serves or generates, the others follow it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from msds.engine.ranks import follow
from msds.launch import Place
from msds.launch.team import Follower, Leader
from msds.llm import LLM
from msds_graphs.collectives import create_groups
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan


def serve_rank(place: Place, *, path: str, plan: str, step_timeout: float, arguments: dict[str, Any]) -> None:
    """One rank of `msds serve`. arguments: those of `msds_serve.run.serve`, as JSON left them."""
    from msds_serve.run import serve

    service = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments["service"].items()}
    engine = arguments["engine"] | {"ranks": Ranks(ShardPlan.parse(plan), place.rank)}

    def lead(team: Leader) -> None:
        serve(path, **arguments | {"service": service, "engine": engine}, team=team)

    _run(place, step_timeout, path, engine, lead)


def generate_rank(
    place: Place, *, path: str, plan: str, step_timeout: float, engine: dict[str, Any], options: dict[str, Any]
) -> None:
    """One rank of `msds generate`; options: its command line."""
    from msds.errors import RankError
    from msds_serve.cli import generate_with

    engine = engine | {"ranks": Ranks(ShardPlan.parse(plan), place.rank)}

    def lead(team: Leader) -> None:
        code = generate_with(LLM(path, team=team, progress=False, **engine), argparse.Namespace(**options))
        if code:
            raise RankError("an answer failed", code)

    _run(place, step_timeout, path, engine, lead)


def _run(
    place: Place, step_timeout: float, path: str, engine: Mapping[str, Any], lead: Callable[[Leader], None]
) -> None:
    create_groups(engine["ranks"])
    if place.rank:
        follower = Follower(place)
        follow(LLM(path, team=follower, progress=False, **engine).engine.runner, follower)
        place.leave()
    leader = Leader(place, timeout=step_timeout, on_failure=place.fail)
    lead(leader)
    leader.stop()
    place.leave()
