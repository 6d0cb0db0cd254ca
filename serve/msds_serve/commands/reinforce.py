"""`msds reinforce`: GRPO on tasks whose answers can be checked."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from msds_serve.commands import add_command, add_model, given, int_list

OPTIONS = (
    "rounds",
    "tasks_per_round",
    "group_size",
    "micro_batch",
    "learning_rate",
    "temperature",
    "max_tokens",
    "lengths",
    "seed",
    "save_every",
)


def add(commands: Any) -> None:
    """Define the command."""
    command = add_command(commands, "reinforce", run, "Reinforce a model by GRPO on tasks with checkable answers.")
    add_model(command, "Hugging Face folder to start from; also the KL reference")
    command.add_argument("tasks", metavar="TASKS", help='JSON lines: {"messages": [...], "answer": "..."}')
    command.add_argument("--run", metavar="FOLDER", required=True, dest="run_folder", help="keeps state and log")
    command.add_argument("--export", metavar="FOLDER", help="write the reinforced model there, in bfloat16")
    command.add_argument("--rounds", metavar="N", type=int, required=True, help="of sampling and one step, in all")
    command.add_argument("--tasks-per-round", metavar="N", type=int, help="default 16")
    command.add_argument("--group-size", metavar="N", type=int, help="answers per task; default 8")
    command.add_argument("--micro-batch", metavar="N", type=int, help="texts per graph call in training; default 64")
    command.add_argument("--learning-rate", metavar="R", type=float, help="default 1e-4")
    command.add_argument("--temperature", metavar="T", type=float, help="of sampling; default 1")
    command.add_argument("--max-tokens", metavar="N", type=int, help="of an answer; default 96")
    command.add_argument("--lengths", metavar="N,N", type=int_list, help="as for train; default 128")
    command.add_argument("--seed", metavar="S", type=int, help="default 0")
    command.add_argument("--save-every", metavar="N", type=int, help="rounds between states; default 10")
    command.add_argument("--kl-weight", metavar="W", type=float, default=0.01, help="beta; default 0.01")
    command.add_argument("--mtp-weight", metavar="W", type=float, default=0.1, help="of the MTP loss; default 0.1")


def run(options: argparse.Namespace) -> int:
    """Reinforce, and export where asked to."""
    from msds import LLM, load
    from msds.checkpoint.folders import check_new_folder
    from msds.train.grpo import GrpoOptions, Reinforcer
    from msds.train.objectives import Grpo
    from msds.train.state import check_run_folder
    from msds.train.verifiable import read_tasks

    settings = GrpoOptions(**given(options, OPTIONS))
    export = None if options.export is None else Path(options.export)
    check_run_folder(Path(options.run_folder), export)
    if export is not None:
        check_new_folder(export)
    tasks = read_tasks(Path(options.tasks))
    answers = settings.tasks_per_round * settings.group_size
    llm = LLM(options.model, max_num_seqs=min(64, answers), max_model_len=max(settings.lengths))
    objective = Grpo(kl_weight=options.kl_weight, mtp_weight=options.mtp_weight)
    reinforcer = Reinforcer(llm, load(options.model), Path(options.run_folder), settings, objective=objective)
    reinforcer.run(tasks, partial(print, flush=True))
    if export is not None:
        print(f"wrote {reinforcer.export(export)}")
    return 0
