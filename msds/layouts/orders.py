"""What names and shapes of a training checkpoint do not say: in which order fused tensors hold their rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from msds.errors import CheckpointError

LAYOUT_NAME = "msds_layout.json"
"""A file beside a training checkpoint: {"orders": {"qkv": "grouped", ...}}, also "layout", for people, and "absent"."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("grouped", "contiguous"),
    "gate_up": ("interleaved", "contiguous"),
    "rope": ("pairs", "halves"),
    "experts": ("out_in", "in_out"),
}
"""Each order and its choices, MindFormers' default first."""

MEANINGS: Mapping[str, str] = {
    "qkv": "q, k, v of each key/value head together (grouped), or all q, all k, all v (contiguous)",
    "gate_up": "gate and up row by row (interleaved), or all gate, all up (contiguous)",
    "rope": "rope rows as Hugging Face stores them (pairs), or first all even rows, then all odd ones (halves)",
    "experts": "stacked expert matrices as Hugging Face stores them (out_in), or transposed (in_out)",
}


@dataclass(frozen=True)
class Orders:
    """The order of each kind of fused tensor; None: not said, and asked for only where a checkpoint needs it."""

    qkv: str | None = None
    gate_up: str | None = None
    rope: str | None = None
    experts: str | None = None

    def __post_init__(self) -> None:
        for key, value in self.said().items():
            if value not in CHOICES[key]:
                raise CheckpointError(f"order {key} is {value!r}: the choices are {', '.join(CHOICES[key])}")

    def said(self) -> dict[str, str]:
        """The orders that are given."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def over(self, base: Orders) -> Orders:
        """These, and those of `base` where these say nothing; CheckpointError where the two contradict each other."""
        for key, value in self.said().items():
            if base.said().get(key, value) != value:
                raise CheckpointError(f"order {key} is given as {value}, but {LAYOUT_NAME} says {base.said()[key]}")
        return replace(base, **self.said())

    def with_defaults(self) -> Orders:
        """MindFormers' defaults where nothing is said: for writing."""
        return Orders(**{key: self.said().get(key, choices[0]) for key, choices in CHOICES.items()})


def parse_orders(texts: Iterable[str]) -> Orders:
    """Orders from `key=value` texts."""
    given: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key not in CHOICES or key in given:
            known = "; ".join(f"{key}={'|'.join(choices)}" for key, choices in CHOICES.items())
            raise CheckpointError(f"order {text!r} is not one of these, each at most once: {known}")
        given[key] = value
    return Orders(**given)


@dataclass(frozen=True)
class Record:
    """What `msds_layout.json` states. absent: copies in MTP layers that the Hugging Face folder did not have."""

    orders: Orders = field(default_factory=Orders)
    absent: frozenset[str] = frozenset()


def read_record(folder: Path) -> Record:
    """The record of a folder; an empty one without that file."""
    path = folder / LAYOUT_NAME
    if not path.is_file():
        return Record()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        orders = parse_orders(f"{key}={value}" for key, value in content["orders"].items())
        return Record(orders, frozenset(content.get("absent", ())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f'{path} is not {{"orders": {{"qkv": "grouped", ...}}}}: {error}') from None


def order_needed(key: str, tensor: str) -> str:
    """The refusal of a tensor whose order is not known."""
    choices = " or ".join(f"--order {key}={choice}" for choice in CHOICES[key])
    return (
        f"tensor {tensor} can be read in two ways: {MEANINGS[key]}. Say which: msds convert with {choices}, "
        f'or {{"orders": {{"{key}": ...}}}} in {LAYOUT_NAME} beside the checkpoint'
    )
