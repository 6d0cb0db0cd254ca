"""Commands of `msds`, a module each: `add(commands)` defines its options, `run(options)` does the work."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from msds.pretrained import DEFAULT_MODEL, TINY_R1, model_folder


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, ending: str | None = None
) -> argparse.ArgumentParser:
    """A subcommand with what all of them have; ending: the last words of its --help."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary, epilog=ending)
    command.add_argument("-v", "--verbose", action="store_true", help="log what happens also when not on a terminal")
    command.set_defaults(run=run)
    return command


def add_model(command: argparse.ArgumentParser, text: str, *, optional: bool = False) -> None:
    """A MODEL argument: a folder, or the name of the model that ships with the package, which is also the default of
    an `optional` one."""
    settings: dict[str, Any] = {"nargs": "?", "default": str(DEFAULT_MODEL)} if optional else {}
    ending = (
        f"; default: {TINY_R1}, which ships with msds" if optional else f"; {TINY_R1} is the one that ships with msds"
    )
    command.add_argument("model", metavar="MODEL", type=model_folder, help=text + ending, **settings)


def int_list(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 64,128") from None


def given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options that were given, so that defaults are stated in one place: where they are used."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
