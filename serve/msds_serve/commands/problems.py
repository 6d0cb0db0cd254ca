"""`msds problems` and `msds init`: the corpus and the untrained checkpoint of the tiny R1."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from msds.errors import OptionError
from msds_serve.commands import add_command


def add(commands: Any) -> None:
    """Define both commands."""
    command = add_command(commands, "problems", run_problems, "Write checkable problems for training and testing.")
    command.add_argument("file", metavar="FILE", help="JSON lines to write")
    command.add_argument("--count", metavar="N", type=int, default=2000, help="default 2000")
    command.add_argument("--seed", metavar="S", type=int, default=0, help="default 0")
    command.add_argument("--held-out", action="store_true", help="of the tenth of operands that training never sees")
    command = add_command(commands, "init", run_init, "Write an untrained model: config, tokenizer, random weights.")
    command.add_argument("folder", metavar="FOLDER", help="folder to create")
    command.add_argument("--recipe", choices=("tiny-r1",), default="tiny-r1", help="default tiny-r1")
    command.add_argument("--seed", metavar="S", type=int, default=0, help="of the weights; default 0")


def run_problems(options: argparse.Namespace) -> int:
    """Write the file at once or not at all."""
    from msds.train.tiny_r1.problems import generate_problems

    if options.count < 1:
        raise OptionError(f"count is {options.count}: it must be at least 1")
    path = Path(options.file)
    if path.exists():
        raise OptionError(f"{path} exists: name a new file, or remove it")
    unfinished = path.with_name(f".{path.name}.partial")
    problems = generate_problems(options.count, seed=options.seed, held_out=options.held_out)
    try:
        unfinished.write_text("".join(problem.to_json() + "\n" for problem in problems), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}") from None
    print(f"wrote {len(problems)} problems to {path}")
    return 0


def run_init(options: argparse.Namespace) -> int:
    """Write the folder."""
    from msds.train.tiny_r1.recipe import write_untrained

    print(f"wrote {write_untrained(Path(options.folder), seed=options.seed)}")
    return 0
