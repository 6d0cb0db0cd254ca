"""Buckets: the static shapes a step is compiled for, and which of them a given shape uses.

A bucket gives every symbolic dimension of a batch a size; for the models S sequences, Q query tokens per
sequence, B context blocks. Each bucket costs one compilation (seconds for a large model), so a ladder has
about a dozen. Between the rungs a batch is padded, and padding is work for nothing: its share is the waste.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msds_graphs.errors import GraphError, UnplannedShapeError

DEFAULT_MOST = 12
"""How many buckets a ladder has at most unless told otherwise."""


class Bucket(Mapping[str, int]):
    """Sizes of the symbolic dimensions: an immutable, hashable mapping of names to positive ints.

    Equal buckets have equal items in any order. GraphError for a size that is not a positive int.
    """

    __slots__ = ("_sizes",)

    def __init__(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise GraphError(f"bucket dim {name!r} has size {size!r}: sizes are ints of at least 1")
        self._sizes = dict(sizes)

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return hash(frozenset(self._sizes.items()))

    def __repr__(self) -> str:
        return sizes_text(self._sizes)

    @property
    def volume(self) -> int:
        """The product of the sizes: proportional to the work of a padded call."""
        return math.prod(self._sizes.values())

    def holds(self, dims: Mapping[str, int]) -> bool:
        """Whether every size of `dims` fits."""
        return all(dims[name] <= size for name, size in self._sizes.items())


def sizes_text(dims: Mapping[str, int]) -> str:
    """`S=8 Q=16`, or `static` without symbolic dims."""
    return " ".join(f"{name}={size}" for name, size in dims.items()) or "static"


def ladder(limits: Mapping[str, int | tuple[int, int]], *, most: int = DEFAULT_MOST) -> tuple[Bucket, ...]:
    """Every combination of powers of two between each dim's (smallest, largest); an int is a fixed size.

    `largest` is always a rung, whatever its value, so that every shape up to the limits has a bucket. While
    the combinations exceed `most`, the longest scale loses an inner rung: the ends stay. GraphError when the
    ends alone are more than `most`, or when limits make no sense.
    """
    scales = {name: _scale(name, limit) for name, limit in limits.items()}
    while math.prod(map(len, scales.values())) > most:
        longest = max(scales, key=lambda name: len(scales[name]))
        if len(scales[longest]) <= 2:
            combinations = math.prod(map(len, scales.values()))
            raise GraphError(
                f"a ladder over {dict(limits)} has at least {combinations} buckets, more than most={most}: "
                "fix some dims to one size, or allow more"
            )
        scales[longest] = _thinned(scales[longest])
    combined = itertools.product(*scales.values())
    return tuple(Bucket(dict(zip(scales, sizes, strict=True))) for sizes in combined)


def _scale(name: str, limit: int | tuple[int, int]) -> list[int]:
    low, high = (limit, limit) if isinstance(limit, int) else limit
    if not 1 <= low <= high:
        raise GraphError(f"limits {limit!r} of dim {name!r}: use (smallest, largest), 1 <= smallest <= largest")
    powers = [1 << exponent for exponent in range(high.bit_length())]
    return [low] * (low < high) + [power for power in powers if low < power < high] + [high]


def _thinned(scale: list[int]) -> list[int]:
    """One rung fewer: the inner one whose removal makes the smallest step between its neighbours."""
    ratios = {index: scale[index + 1] / scale[index - 1] for index in range(1, len(scale) - 1)}
    removed = min(ratios, key=lambda index: ratios[index])
    return scale[:removed] + scale[removed + 1 :]


def unique_buckets(buckets: Iterable[Mapping[str, int]], symbols: Sequence[str]) -> tuple[Bucket, ...]:
    """The given buckets, each once, in order; GraphError when one does not name exactly these symbols."""
    result = tuple(dict.fromkeys(Bucket(bucket) for bucket in buckets))
    for bucket in result:
        if set(bucket) != set(symbols):
            raise GraphError(
                f"bucket {dict(bucket)} names {sorted(bucket)}, the batch has symbolic dims "
                f"{sorted(symbols)}: give each symbolic dim a size"
            )
    if not result:
        raise GraphError(f"no buckets: the symbolic dims {sorted(symbols)} need at least one")
    return result


def choose_bucket(buckets: Sequence[Bucket], dims: Mapping[str, int]) -> Bucket:
    """The bucket of least volume that holds `dims`, the first of equals; else UnplannedShapeError."""
    best: Bucket | None = None
    for bucket in buckets:
        if bucket.holds(dims) and (best is None or bucket.volume < best.volume):
            best = bucket
    if best is None:
        raise _unplanned(buckets, dims)
    return best


def _unplanned(buckets: Sequence[Bucket], dims: Mapping[str, int]) -> UnplannedShapeError:
    def distance(bucket: Bucket) -> float:
        return sum(abs(math.log2(bucket[name] / max(size, 1))) for name, size in dims.items())

    nearest = sorted(buckets, key=distance)[:3]
    over = [
        f"{name}={size} exceeds the largest {limit}"
        for name, size in dims.items()
        if size > (limit := max(bucket[name] for bucket in buckets))
    ]
    reason = "; ".join(over) or "each size is planned, but not together"
    return UnplannedShapeError(
        f"shape {sizes_text(dims)} is in no bucket ({reason}); the nearest are "
        f"{', '.join(map(repr, nearest))}: split the batch, or plan a bucket for it before warm-up",
        dict(dims),
        tuple(dict(bucket) for bucket in nearest),
    )


def padding_waste(bucket: Bucket, dims: Mapping[str, int]) -> float:
    """The share of a call's volume that is padding when `dims` run in `bucket`: 0 for an exact fit."""
    return 1 - math.prod(dims[name] for name in bucket) / bucket.volume


def worst_waste(buckets: Sequence[Bucket], bucket: Bucket) -> float:
    """The largest padding waste of any shape that `choose_bucket` puts into `bucket`; 0 if none ever is.

    The worst shape lies one step above other buckets' sizes (or at 1) in every dim, so only those are tried.
    """
    steps = [
        sorted({1} | {other[name] + 1 for other in buckets if other[name] < size}) for name, size in bucket.items()
    ]
    shapes = (dict(zip(bucket, sizes, strict=True)) for sizes in itertools.product(*steps))
    return max(
        (padding_waste(bucket, dims) for dims in shapes if choose_bucket(buckets, dims) == bucket),
        default=0.0,
    )
