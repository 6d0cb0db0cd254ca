"""Reading the table that `npu-smi info` prints: two lines per chip, and below it the processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Npu:
    """One chip. npu, chip: its two ids. memory in MB; None where the tool prints no number."""

    npu: int
    chip: int
    name: str
    health: str
    power_watts: float | None
    temperature: float | None
    utilisation: float | None
    memory_used: int | None
    memory_total: int | None

    @property
    def label(self) -> str:
        return f"NPU {self.npu} chip {self.chip}"


_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")


def parse_npus(text: str) -> list[Npu]:
    """The chips of the first table. Empty if the text holds none, as where the driver has failed."""
    rows = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    rows = [row for row in rows if len(row) == 3]  # the table of processes has four columns
    found = []
    for first, second in pairwise(rows):
        name = re.fullmatch(r"(\d+)\s+(\S.*)", first[0])
        chip = re.fullmatch(r"(\d+)(\s+\d+)?", second[0])  # A3 prints a physical id beside the chip's
        if name is not None and chip is not None:
            found.append(_npu(int(name[1]), int(chip[1]), name[2].strip(), first, second))
    return found


def version(text: str) -> str | None:
    """The tool's own version, which is the driver's."""
    match = re.search(r"npu-smi\s+(\S+)", text)
    return None if match is None else match[1]


def _npu(npu: int, chip: int, name: str, first: list[str], second: list[str]) -> Npu:
    power, temperature = [*first[2].split(), "-", "-"][:2]
    pairs = _PAIR.findall(second[2])
    used, total = pairs[-1] if pairs else (None, None)  # the last is HBM, the one before the DDR of other chips
    return Npu(
        npu=npu,
        chip=chip,
        name=name,
        health=first[1],
        power_watts=_number(power),
        temperature=_number(temperature),
        utilisation=_number((second[2].split() or ["-"])[0]),
        memory_used=None if used is None else int(used),
        memory_total=None if total is None else int(total),
    )


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
