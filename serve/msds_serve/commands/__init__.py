"""Commands of `msds`, a module each: `add(commands)` defines its options, `run(options)` does the work."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    """A subcommand with what all of them have."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("-v", "--verbose", action="store_true", help="log what happens also when not on a terminal")
    command.set_defaults(run=run)
    return command


def int_list(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 64,128") from None


def given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options that were given, so that defaults are stated in one place: where they are used."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
