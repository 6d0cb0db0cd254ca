"""Measurements as JSON and as Markdown. Nothing is measured here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median and extremes of several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        if self.low == self.high:
            return _number(self.median)
        return f"{_number(self.median)} ({_number(self.low)}-{_number(self.high)})"


@dataclass(frozen=True)
class Line:
    """One measured quantity for both engines. bandwidth: share of the memory bandwidth that each one's median reaches,
    where the quantity is bound by it."""

    name: str
    unit: str
    values: Mapping[str, Spread]
    bandwidth: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PartCost:
    """milliseconds: what the step loses when the part is left out; negative values are noise."""

    name: str
    milliseconds: float
    share: float


def part_costs(variants: Sequence[tuple[str, Sequence[float]]]) -> list[PartCost]:
    """From seconds per step of "whole step", "without X" ... and "without all", which come in this order."""
    medians = {name: 1e3 * statistics.median(seconds) for name, seconds in variants}
    whole, bare = medians["whole step"], medians["without all"]
    costs = [(name.removeprefix("without "), whole - ms) for name, ms in medians.items() if name.startswith("without ")]
    parts = sorted((cost for cost in costs if cost[0] != "all"), key=lambda cost: -cost[1])
    rest = whole - bare - sum(ms for _, ms in parts)
    rows = [
        *parts,
        ("graph call, embedding row, masks, reshapes", bare),
        ("not attributed", rest),
        ("whole step", whole),
    ]
    return [PartCost(name, ms, ms / whole) for name, ms in rows]


def machine_text(machine: Mapping[str, Any]) -> str:
    """Where and when, in two lines."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    load = f"load average {machine['load_at_start']} at the start, {machine['load_at_end']} at the end"
    return (
        f"{machine['date']}, {machine['cpu']}, {machine['threads']} of {machine['cores']} cores, {load};\n"
        f"Python {machine['python']}, {versions}."
    )


def lines_table(lines: Sequence[Line], engines: Sequence[str]) -> str:
    """Median (lowest-highest) per engine, the ratio of the medians, and shares of the bandwidth."""
    first, second = engines
    rows = []
    for line in lines:
        cells = [line.name, line.unit]
        cells += [_cell(line, engine) for engine in engines]
        both = first in line.values and second in line.values
        cells.append(f"{line.values[first].median / line.values[second].median:.2f}" if both else "")
        rows.append(cells)
    return table(["measurement", "unit", *engines, f"{first} / {second}"], rows)


def parts_table(costs: Sequence[PartCost]) -> str:
    """Where the time of a decode step goes."""
    rows = [[cost.name, f"{cost.milliseconds:.2f}", f"{cost.share:.0%}"] for cost in costs]
    return table(["part of the decode step", "ms", "share"], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Everything that was measured, dataclasses as objects."""
    path.write_text(json.dumps(content, default=asdict, indent=2, ensure_ascii=False) + "\n")


def _cell(line: Line, engine: str) -> str:
    if engine not in line.values:
        return "-"
    share = line.bandwidth.get(engine)
    return f"{line.values[engine]}" + (f", {share:.0%} of bandwidth" if share is not None else "")


def _number(value: float) -> str:
    """Three significant digits, never an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
