"""How far a load, a check or a conversion is: bytes, on standard error, for people only."""

from typing import Protocol

from tqdm import tqdm


class Progress(Protocol):
    """The part of a tqdm bar that we use."""

    def update(self, n: float | None = 1, /) -> object:
        """Adds `n` bytes."""

    def close(self) -> None:
        """Ends the bar."""


def byte_progress(title: str, total: int, show: bool | None) -> Progress:
    """A bar over `total` bytes. `show` None means only when standard error is a terminal."""
    bar: Progress = tqdm(
        desc=title,
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=None if show is None else not show,
    )
    return bar
