"""Strict, typed reading of one JSON object: every fault is collected, so that a user mends a file once."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msds.errors import ConfigError

MAX_INTEGER = 2**31 - 1
"""Sizes and ids end up in int32."""


@dataclass(frozen=True)
class Fault:
    """One thing that cannot be served: the fields involved, and a sentence with names, values and remedy."""

    fields: tuple[str, ...]
    text: str


def fault(name: str, value: object, reason: str, *also: str) -> Fault:
    """The fault `name = value: reason`; `also` are further fields whose values the reason relies on."""
    return Fault((name, *also), f"{name} = {shown(value)}: {reason}")


def shown(value: object) -> str:
    """A JSON value as the file spells it, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def raise_faults(source: str, faults: Sequence[Fault]) -> None:
    """Raise one ConfigError with all faults, or return when there are none."""
    if not faults:
        return
    if len(faults) == 1:
        raise ConfigError(f"{source}: {faults[0].text}")
    lines = "".join(f"\n  - {item.text}" for item in faults)
    raise ConfigError(f"{source}: {len(faults)} faults{lines}")


class Fields:
    """The fields of one JSON object. Readers return a legal placeholder where they record a fault.

    A reader without a default requires the field; null counts as absent unless the reader says otherwise.
    `faults`, `warnings` and the set of looked-at names belong to the object; sections share the first two.
    """

    def __init__(self, data: Mapping[str, object], *, within: "Fields | None" = None, prefix: str = "") -> None:
        self.data = data
        self.prefix = prefix
        self.faults: list[Fault] = within.faults if within else []
        self.warnings: list[str] = within.warnings if within else []
        self.seen: set[str] = set()

    def fail(self, name: str, value: object, reason: str) -> None:
        """Record that `name = value` cannot be served."""
        self.faults.append(fault(self.prefix + name, value, reason))

    def warn(self, name: str, text: str) -> None:
        """Record something odd but legal."""
        self.warnings.append(f"{self.prefix}{name}: {text}")

    def raw(self, name: str, *aliases: str) -> object:
        """The value of the first spelling that has one, else None; spellings that contradict are a fault."""
        found: object = None
        first = name
        for spelling in (name, *aliases):
            self.seen.add(spelling)
            value = self.data.get(spelling)
            if value is None:
                continue
            if found is None:
                found, first = value, spelling
            elif value != found:
                self.fail(spelling, value, f"contradicts {self.prefix}{first} = {shown(found)}; keep one of them")
        return found

    def is_present(self, name: str, *aliases: str) -> bool:
        """Whether a spelling of the field is in the file, null or not."""
        return any(spelling in self.data for spelling in (name, *aliases))

    def integer(
        self, name: str, *aliases: str, minimum: int = 1, default: int | None = None, null: int | None = None
    ) -> int:
        """An integer >= minimum; `default` if absent or null, `null` if null."""
        value = self.raw(name, *aliases)
        if value is None and null is not None and self.is_present(name, *aliases):
            return null
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= MAX_INTEGER:
            return value
        self._wanted(name, value, f"an integer from {minimum} to {MAX_INTEGER} is wanted", aliases)
        return minimum

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        """An integer >= minimum, or None where the file says null; an absent field is a fault."""
        if name in self.data and self.data[name] is None:
            self.seen.add(name)
            return None
        return self.integer(name, minimum=minimum)

    def number(
        self,
        name: str,
        *,
        above: float | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
        default: float | None = None,
    ) -> float:
        """A finite number within the bounds, as float; integers are numbers, booleans and texts are not."""
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:  # not NaN
            is_low = (above is not None and value <= above) or (minimum is not None and value < minimum)
            if not is_low and (maximum is None or value <= maximum):
                return float(value)
        bounds = (("above", above), ("of at least", minimum), ("of at most", maximum))
        text = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        self._wanted(name, value, f"a finite number {text} is wanted", ())
        return above + 1.0 if above is not None else minimum or 0.0

    def optional_number(
        self,
        name: str,
        *,
        above: float | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> float | None:
        """A finite number within the bounds, or None if absent or null."""
        if self.raw(name) is None:
            return None
        return self.number(name, above=above, minimum=minimum, maximum=maximum)

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """true or false."""
        value = self.raw(name)
        if isinstance(value, bool):
            return value
        if value is None and default is not None:
            return default
        self._wanted(name, value, "true or false is wanted", ())
        return False

    def choice(self, name: str, *aliases: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of a few words."""
        value = self.raw(name, *aliases)
        if isinstance(value, str) and value in choices:
            return value
        if value is None and default is not None:
            return default
        self._wanted(name, value, f"supported: {', '.join(choices)}", aliases)
        return choices[0]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids; () if absent or null. Order is kept, repetitions are dropped."""
        value = self.raw(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_INTEGER for item in ids):
            return tuple(dict.fromkeys(ids))
        self.fail(name, value, "a token id (an integer >= 0) or a list of them is wanted")
        return ()

    def only(self, name: str, legal: object, reason: str) -> None:
        """A field that is served with one value only (or absent, or null)."""
        value = self.raw(name)
        same = value == legal and isinstance(value, bool) == isinstance(legal, bool)
        if value is not None and not same:
            self.fail(name, value, f"{reason}; the nearest legal value is {shown(legal)}")

    def section(self, name: str) -> "Fields | None":
        """A nested object, None if absent or null."""
        value = self.raw(name)
        if isinstance(value, dict):
            return Fields(value, within=self, prefix=f"{self.prefix}{name}.")
        if value is not None:
            self.fail(name, value, "an object {...} or null is wanted")
        return None

    def has_faults(self, *names: str) -> bool:
        """Whether one of these fields is already part of a fault."""
        bad = {field for item in self.faults for field in item.fields}
        return any(self.prefix + name in bad for name in names)

    def skip(self, names: Collection[str]) -> None:
        """Name fields that do not change what is computed here."""
        self.seen.update(names)

    def warn_of_unseen(self) -> None:
        """Warn of every field that no reader looked at."""
        for name in self.data:
            if name not in self.seen:
                self.warn(name, f"unknown field, ignored (value {shown(self.data[name])})")

    def _wanted(self, name: str, value: object, wanted: str, aliases: Sequence[str]) -> None:
        if value is not None:
            spelling = next(s for s in (name, *aliases) if self.data.get(s) is not None)
            self.fail(spelling, value, wanted)
            return
        written = "null" if self.is_present(name, *aliases) else "missing"
        self.faults.append(Fault((self.prefix + name,), f"{self.prefix}{name} is {written}: {wanted}"))
