"""`msds train`: supervised training, or distillation, of a checkpoint on conversations."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msds.errors import OptionError
from msds.pretrained import model_folder
from msds_serve.commands import add_command, add_model, given, int_list
from msds_serve.commands.mesh import add_cluster, check_single, launch_ranks

if TYPE_CHECKING:
    from msds.launch import Place
    from msds.train.trainer import TrainOptions
    from msds_graphs.ranks import Ranks

STOP_SECONDS = 600.0
"""What ranks get to finish their step and to save, after SIGINT or SIGTERM; a second signal ends them at once."""

OPTIONS = (
    "steps",
    "learning_rate",
    "batch_size",
    "accumulation",
    "lengths",
    "warmup_steps",
    "decay_steps",
    "seed",
    "save_every",
)


def add(commands: Any) -> None:
    """Define the command."""
    command = add_command(commands, "train", run, "Train a model on conversations; goes on where it was interrupted.")
    add_model(command, "Hugging Face folder to start from")
    command.add_argument("data", metavar="DATA", help='JSON lines: {"messages": [..., {"role": "assistant", ...}]}')
    command.add_argument("--run", metavar="FOLDER", required=True, dest="run_folder", help="keeps state and log")
    command.add_argument("--export", metavar="FOLDER", help="write the trained model there, in bfloat16")
    command.add_argument("--steps", metavar="N", type=int, required=True, help="optimiser steps in all")
    command.add_argument("--learning-rate", metavar="R", type=float, help="peak; default 1e-3")
    command.add_argument("--batch-size", metavar="N", type=int, help="texts per step; default 64")
    command.add_argument("--accumulation", metavar="N", type=int, help="micro-batches per step; default 1")
    command.add_argument(
        "--lengths", metavar="N,N", type=int_list, help="lengths that texts are padded to, a graph each; default 128"
    )
    command.add_argument("--warmup-steps", metavar="N", type=int, help="default: a tenth of the steps, 100 at most")
    command.add_argument("--decay-steps", metavar="N", type=int, help="of cosine decay at the end; default 0")
    command.add_argument("--seed", metavar="S", type=int, help="of the order of texts; default 0")
    command.add_argument("--save-every", metavar="N", type=int, help="steps between states; default 200")
    command.add_argument("--mtp-weight", metavar="W", type=float, default=0.3, help="of the MTP loss; default 0.3")
    command.add_argument("--balance-weight", metavar="W", type=float, default=1e-4, help="of balance; default 1e-4")
    command.add_argument(
        "--teacher", metavar="MODEL", type=model_folder, help="learn this model's distributions instead of the texts'"
    )
    command.add_argument("--temperature", metavar="T", type=float, help="of distillation; default 1")
    ranks = command.add_argument_group("several processes (default: one)")
    ranks.add_argument(
        "--data-parallel", metavar="N", type=int, help="processes that share each batch: the same steps, sooner"
    )
    add_cluster(ranks)


def run(options: argparse.Namespace) -> int:
    """Train, and export where asked to."""
    from msds.checkpoint.folders import check_new_folder
    from msds.train.state import check_run_folder
    from msds.train.trainer import TrainOptions

    settings = TrainOptions(**given(options, OPTIONS))
    export = None if options.export is None else Path(options.export)
    check_run_folder(Path(options.run_folder), export)
    if export is not None:
        check_new_folder(export)
    if options.temperature is not None and options.teacher is None:
        raise OptionError("--temperature is of distillation: name a --teacher too, or leave it out")
    if options.data_parallel is None:
        check_single(options, "--data-parallel")
        train(options, settings, None)
        return 0
    if options.data_parallel < 1:
        raise OptionError(f"data_parallel is {options.data_parallel}: it must be at least 1")
    settings.micro_batch(options.data_parallel)
    arguments = {"options": {name: value for name, value in vars(options).items() if name != "run"}}
    launch_ranks(
        "msds_serve.commands.train:train_rank",
        arguments,
        options,
        options.data_parallel,
        facts=lambda: _facts(options, settings),
        stop_seconds=STOP_SECONDS,
    )
    return 0


def _facts(options: argparse.Namespace, settings: TrainOptions) -> dict[str, str]:
    """What the nodes of a run must have in common; equal values are equal facts, given or default."""
    from msds.checkpoint.samples import sample_file
    from msds.launch.facts import software_facts, weight_facts

    values = {name: getattr(settings, name) for name in OPTIONS}
    values |= {name: getattr(options, name) for name in ("mtp_weight", "balance_weight")}
    values |= {"warmup_steps": settings.schedule.warmup_steps, "temperature": _temperature(options)}
    found = {"the command": "train", **software_facts()}
    found |= {f"--{name.replace('_', '-')}": str(value) for name, value in values.items()}
    found["DATA"] = f"{(sample := sample_file(Path(options.data))).size:,} bytes with samples {sample.digest[:12]}"
    teacher = {} if options.teacher is None else weight_facts(options.teacher)
    return found | weight_facts(options.model) | {f"teacher's {name}": value for name, value in teacher.items()}


def _temperature(options: argparse.Namespace) -> float:
    return 1.0 if options.temperature is None else float(options.temperature)


def train_rank(place: Place, *, options: dict[str, Any]) -> None:
    """One rank of data-parallel training; options: the command line, as JSON left it."""
    from msds.train.parallel import replicas
    from msds.train.trainer import TrainOptions

    told_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())
    if options["lengths"] is not None:
        options["lengths"] = tuple(options["lengths"])
    namespace = argparse.Namespace(**options)
    train(namespace, TrainOptions(**given(namespace, OPTIONS)), replicas(place), stop=told_to_stop.is_set)


def train(
    options: argparse.Namespace,
    settings: TrainOptions,
    ranks: Ranks | None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train on this process, one of `ranks`; the first of them exports."""
    from msds import load
    from msds.train.data import encode_conversation, read_conversations
    from msds.train.objectives import Distillation, NextToken
    from msds.train.trainer import Trainer

    conversations = read_conversations(Path(options.data))
    model = load(options.model)
    tokenizer, chat = model.tokenizer, model.chat
    assert tokenizer is not None  # chat says so itself
    teacher = load(options.teacher, mtp=False) if options.teacher is not None else None
    weights = {"mtp_weight": options.mtp_weight, "balance_weight": options.balance_weight}
    objective = NextToken(**weights) if teacher is None else Distillation(_temperature(options), **weights)
    examples = [encode_conversation(conversation, tokenizer, chat) for conversation in conversations]
    trainer = Trainer(model, Path(options.run_folder), settings, objective=objective, teacher=teacher, ranks=ranks)
    trainer.run(examples, partial(print, flush=True), stop=stop)
    if options.export is not None and not stop() and trainer.ranks.rank == 0:
        print(f"wrote {trainer.export(Path(options.export))}")
