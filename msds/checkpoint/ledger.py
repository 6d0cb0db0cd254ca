"""Which parameter is filled from which tensors: each place once, and no tensor forgotten unknowingly."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from msds.checkpoint.dtypes import stored_type
from msds.checkpoint.quantisation import SCALE_SUFFIX
from msds.checkpoint.reading import bounds
from msds.errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """One parameter: its tree path, the tensors it is made of, its full shape, and the type to load it as.

    `stacked`: the tensors are its slices along axis 0, in order; otherwise there is exactly one. `dtype`:
    float32, float16 or bfloat16 (held as `uint16`). `index`: a slice per leading axis of the full shape, for
    a rank that holds only a part; tensors outside it are not read.
    """

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"
    stacked: bool = False
    index: tuple[slice, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise CheckpointError(
                f"{self.path}: weights load as float32, float16 or bfloat16, not {self.dtype!r}"
            )
        if len(self.names) != (self.shape[0] if self.stacked else 1):
            raise CheckpointError(
                f"{self.path} {list(self.shape)} cannot be made of {len(self.names)} tensors"
            )
        self.loaded_shape  # noqa: B018  refuses an index that does not fit

    @property
    def loaded_shape(self) -> tuple[int, ...]:
        """The shape of the part to be held."""
        return tuple(stop - start for start, stop in self._bounds())

    @property
    def nbytes(self) -> int:
        """Bytes of the part to be held."""
        return prod(self.loaded_shape) * stored_type(self.dtype).nbytes

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape that each tensor must have."""
        return self.shape[1:] if self.stacked else self.shape

    def parts(self) -> list[tuple[str, int | None, tuple[slice, ...] | None]]:
        """(tensor, its place along axis 0 or None for all of the parameter, the part of it) to be read."""
        if not self.stacked:
            return [(self.names[0], None, self.index)]
        start, stop = self._bounds()[0]
        rest = self.index[1:] if self.index else None
        return [(name, place, rest) for place, name in enumerate(self.names[start:stop])]

    def _bounds(self) -> list[tuple[int, int]]:
        return bounds(self.path, self.shape, self.index)


@dataclass(frozen=True)
class Skip:
    """Tensors that are left out on purpose: a pattern with `*` for their names, and the reason."""

    pattern: str
    reason: str


class Ledger:
    """The account of a load: made from entries and tensor names, marked as their places fill, closed at the
    end.

    `used`: tensors to be read; `elsewhere`: tensors of slices that are another rank's; `skipped`: name ->
    reason; `strays`: tensors that nothing asks for; `missing`: (tensor, parameter) that is asked for and not
    there.
    """

    def __init__(
        self, entries: Iterable[Entry], names: Collection[str], skipped: Sequence[Skip] = ()
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.used: dict[str, str] = {}
        self.elsewhere: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.missing: list[tuple[str, str]] = []
        present = frozenset(names)
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
                if name not in present:
                    self.missing.append((name, entry.path))
                elif name in read:
                    self.used[name] = entry.path
                else:
                    self.elsewhere.add(name)
        self.strays = self._sort_out(names, claimed, skipped)
        self._pending = set(self.used)

    def _sort_out(
        self, names: Collection[str], claimed: Collection[str], skipped: Sequence[Skip]
    ) -> tuple[str, ...]:
        """Fills `skipped`, and returns what is neither asked for, nor a scale of that, nor skipped."""
        strays = []
        for name in names:
            if name in claimed or name.removesuffix(SCALE_SUFFIX) in claimed:
                continue
            reason = next((skip.reason for skip in skipped if fnmatchcase(name, skip.pattern)), None)
            if reason is None:
                strays.append(name)
            else:
                self.skipped[name] = reason
        return tuple(strays)

    def fill(self, name: str) -> None:
        """Marks a tensor's place as filled; a second time is an error."""
        if name not in self._pending:
            raise CheckpointError(f"tensor {name} was read twice, or is not one of this model")
        self._pending.remove(name)

    def close(self) -> None:
        """Raises if a place was not filled."""
        if rest := [f"{self.used[name]} (from {name})" for name in self.used if name in self._pending]:
            raise CheckpointError(f"{len(rest)} parts of parameters were not filled: {', '.join(rest[:8])}")
