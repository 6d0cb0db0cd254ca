"""Which field of a config contradicts a checkpoint: the one whose change makes the shapes of the tensors right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msds.checkpoint import Checkpoint
from msds.config import ModelConfig, parse_config
from msds.errors import ConfigError
from msds.models.specs import model_specs
from msds.weights import checkpoint_entries

TRIED = 3
"""Of the differences between stated and stored sizes, the most frequent ones are looked into."""
EXPLAINED = 0.9
"""Of the tensors that differ, those that a field must explain to be named."""


@dataclass(frozen=True)
class Contradiction:
    """field: its name; stated: its value; fitting: the value that `explained` of `differing` tensors agree on."""

    field: str
    stated: int
    fitting: int
    explained: int
    differing: int

    def __str__(self) -> str:
        return (
            f"{self.field} is {self.stated} in the config; if it were {self.fitting}, {self.explained} of the "
            f"{self.differing} tensors of another shape would fit"
        )


def contradiction(checkpoint: Checkpoint, stored_fields: Mapping[str, Any]) -> Contradiction | None:
    """The field that explains nearly all tensors of another shape, None where none does. Headers are read.

    stored_fields: of a config.json that can be read.
    """
    config, _ = parse_config(stored_fields)
    differing = _differing(checkpoint, config)
    pairs = Counter(pair for sizes in differing for pair in sizes)
    best: Contradiction | None = None
    for (asked, stored), _ in pairs.most_common(TRIED):
        for name, stated, fitting in _candidates(stored_fields, asked, stored):
            try:  # from the file anew: other fields may follow from this one
                changed, _ = parse_config({**stored_fields, name: fitting})
            except ConfigError:  # no model has such a field
                continue
            left = len(_differing(checkpoint, changed))
            found = Contradiction(name, stated, fitting, len(differing) - left, len(differing))
            if best is None or found.explained > best.explained:
                best = found
    return best if best is not None and best.explained >= EXPLAINED * len(differing) else None


def _candidates(stored_fields: Mapping[str, Any], asked: int, stored: int) -> Iterator[tuple[str, int, int]]:
    """Fields that the asked size may come from, first those that are it, then those that divide it: (name, value, the
    value that would give the stored size)."""
    numbers = [(name, value) for name, value in stored_fields.items() if type(value) is int and value > 0]
    for name, value in sorted(numbers, key=lambda item: item[1] != asked):
        if asked % value == 0 and value * stored % asked == 0:
            yield name, value, value * stored // asked


def _differing(checkpoint: Checkpoint, config: ModelConfig) -> list[list[tuple[int, int]]]:
    """Of each tensor with another shape than the config asks for, the sizes that differ: (asked, stored)."""
    found = []
    for entry in checkpoint_entries(model_specs(config).spec(config), config):
        for name in entry.names:
            if name in checkpoint and (shape := checkpoint.info(name).shape) != entry.tensor_shape:
                sizes = zip(entry.tensor_shape, shape, strict=False)
                found.append([pair for pair in sizes if pair[0] != pair[1]])
    return found
