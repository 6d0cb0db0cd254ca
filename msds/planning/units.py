"""Bytes as text, in one unit per table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A binary unit."""

    name: str
    nbytes: int

    def number(self, size: int) -> str:
        """Without the unit's name, with as many digits as small parts need."""
        value = size / self.nbytes
        if value >= 1 or not size:
            return f"{value:,.1f}"
        return f"{value:.3f}" if value >= 5e-4 else f"{value:.1g}"

    def text(self, size: int) -> str:
        """With the unit's name."""
        return f"{self.number(size)} {self.name}"


UNITS = (Unit("GiB", 1 << 30), Unit("MiB", 1 << 20), Unit("KiB", 1 << 10))


def unit_of(size: int) -> Unit:
    """The largest unit that a size fills."""
    return next((unit for unit in UNITS if size >= unit.nbytes), UNITS[-1])


def sized(size: int) -> str:
    """A size on its own."""
    return unit_of(size).text(size)
