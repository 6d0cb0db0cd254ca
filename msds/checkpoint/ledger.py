"""Which parameter is filled from which tensors: each place once, and no tensor forgotten unknowingly."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from msds.checkpoint.dtypes import stored_type
from msds.checkpoint.header import TensorInfo
from msds.checkpoint.quantisation import SCALE_SUFFIX
from msds.checkpoint.reading import bounds
from msds.errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """One parameter: its tree path, the tensors it is made of, its full shape, and the type to load it as.

    `stacked`: the tensors are its slices along axis 0, in order; otherwise there is exactly one. `dtype`:
    float32, float16 or bfloat16 (held as `uint16`). `index`: a slice per leading axis of the full shape, for
    a rank that holds only a part; tensors outside it are not read. `rows`: of a stacked parameter, which of its
    tensors are held, in which order, whatever `index` says of axis 0. `padding`: rows of zeros after the held part.
    """

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"
    stacked: bool = False
    index: tuple[slice, ...] | None = None
    rows: tuple[int, ...] | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise CheckpointError(f"{self.path}: weights load as float32, float16 or bfloat16, not {self.dtype!r}")
        if len(self.names) != (self.shape[0] if self.stacked else 1):
            raise CheckpointError(f"{self.path} {list(self.shape)} cannot be made of {len(self.names)} tensors")
        self._bounds()  # refuses an index that does not fit
        if self.rows is not None and (not self.stacked or not set(self.rows) <= set(range(self.shape[0]))):
            raise CheckpointError(f"{self.path} {list(self.shape)} cannot be held as rows {list(self.rows)}")

    @property
    def loaded_shape(self) -> tuple[int, ...]:
        """The shape of the part to be read."""
        shape = tuple(stop - start for start, stop in self._bounds())
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of the part to be held, padding included."""
        shape = self.loaded_shape
        return (shape[0] + self.padding, *shape[1:]) if self.padding else shape

    @property
    def nbytes(self) -> int:
        """Bytes of the part to be held."""
        return prod(self.held_shape) * stored_type(self.dtype).nbytes

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape that each tensor must have."""
        return self.shape[1:] if self.stacked else self.shape

    def parts(self) -> list[tuple[str, int | None, tuple[slice, ...] | None]]:
        """(tensor, its place along axis 0 or None for all of the parameter, the part of it) to be read."""
        if not self.stacked:
            return [(self.names[0], None, self.index)]
        rest = self.index[1:] if self.index else None
        rows = range(*self._bounds()[0]) if self.rows is None else self.rows
        return [(self.names[row], place, rest) for place, row in enumerate(rows)]

    def _bounds(self) -> list[tuple[int, int]]:
        return bounds(self.path, self.shape, self.index)


@dataclass(frozen=True)
class Skip:
    """Tensors that are left out on purpose: a pattern with `*` for their names, and the reason."""

    pattern: str
    reason: str


class Ledger:
    """The account of a load: made from entries and tensors, marked as places fill, closed at the end.

    `used`: tensor to be read -> parameter; `scales`: block scales that go with those; `elsewhere`: tensors
    of slices that are another rank's; `skipped`: name -> reason; `strays`: tensors that nothing asks for;
    `missing`: (tensor, parameter) that is asked for and not there. Raises CheckpointError for entries that
    contradict each other.
    """

    def __init__(
        self, entries: Iterable[Entry], tensors: Mapping[str, TensorInfo], skipped: Sequence[Skip] = ()
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.used: dict[str, str] = {}
        self.elsewhere: set[str] = set()
        self.missing: list[tuple[str, str]] = []
        self.scales: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.strays: list[str] = []
        claimed: dict[str, str] = {}
        for entry in entries:
            if entry.path in self.entries:
                raise CheckpointError(f"parameter {entry.path} has two entries")
            self.entries[entry.path] = entry
            read = {name for name, _, _ in entry.parts()}
            for name in entry.names:
                if name in claimed:
                    raise CheckpointError(f"tensor {name} would fill both {claimed[name]} and {entry.path}")
                claimed[name] = entry.path
                if name not in tensors:
                    self.missing.append((name, entry.path))
                elif name in read:
                    self.used[name] = entry.path
                else:
                    self.elsewhere.add(name)
        self._pending = set(self.used)
        for name in tensors:
            if name not in claimed:
                self._sort_out(name, tensors, skipped)

    def _sort_out(self, name: str, tensors: Mapping[str, TensorInfo], skipped: Sequence[Skip]) -> None:
        """Places a tensor that no parameter is made of."""
        weight = name.removesuffix(SCALE_SUFFIX)
        if weight != name and weight in tensors and tensors[weight].dtype == "float8_e4m3fn":
            if weight in self.used:
                self.scales.add(name)
                return
            if weight in self.elsewhere:
                self.elsewhere.add(name)
                return
        reason = next((skip.reason for skip in skipped if fnmatchcase(name, skip.pattern)), None)
        if reason is None:
            self.strays.append(name)
        else:
            self.skipped[name] = reason

    def fill(self, name: str) -> None:
        """Marks a tensor's place as filled; a second time is an error."""
        if name not in self._pending:
            raise CheckpointError(f"tensor {name} was read twice, or is not one of this model")
        self._pending.remove(name)

    def close(self) -> None:
        """Raises if a place was not filled."""
        if rest := [f"{self.used[name]} (from {name})" for name in self.used if name in self._pending]:
            raise CheckpointError(f"{len(rest)} parts of parameters were not filled: {', '.join(rest[:8])}")
