"""What checks look at: files, environment variables and programs of a machine, replaceable in tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_SECONDS = 5.0


@dataclass(frozen=True)
class Answer:
    """What a program printed, both streams together, and its exit code."""

    code: int
    text: str


@dataclass(frozen=True)
class System:
    """root: where absolute paths are looked up. env: environment variables."""

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """A text file, None if it is not there or not readable."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def glob(self, absolute: str) -> list[Path]:
        """Existing paths of a pattern, in order."""
        return sorted(self.root.glob(absolute.lstrip("/")))

    def find(self, program: str, *places: str) -> str | None:
        """A program on PATH or at one of some absolute places."""
        found = shutil.which(program, path=self.env.get("PATH", ""))
        if found is not None:
            return found
        return next((str(self.path(place)) for place in places if os.access(self.path(place), os.X_OK)), None)

    def run(self, command: Sequence[str]) -> Answer:
        """Run a program for COMMAND_SECONDS at most; one that does not end, or cannot start, is an exit code of -1."""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_SECONDS,
                env=dict(self.env),
                text=True,
                errors="replace",
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(-1, f"{command[0]} did not end within {COMMAND_SECONDS:g} s")
        except OSError as error:
            return Answer(-1, f"{command[0]} cannot be run: {error}")
        return Answer(done.returncode, done.stdout)
