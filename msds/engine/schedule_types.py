"""What the scheduler is told and what it answers: sequences, policy, steps, statistics. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from msds.engine.ladder import SharedPrefill
from msds.errors import MsdsError, OptionError


class QueueFullError(MsdsError):
    """Too many sequences wait already; the same request may be served later."""

    def __init__(self, num_new: int, num_waiting: int, max_waiting: int) -> None:
        super().__init__(
            f"{num_waiting} sequences wait and the request brings {num_new} more, but at most {max_waiting} may wait: "
            "try again later"
        )
        self.num_new = num_new
        self.num_waiting = num_waiting
        self.max_waiting = max_waiting


class Schedulable(Protocol):
    """A sequence as the scheduler sees it.

    The scheduler alone writes the four plain attributes: `num_computed`, tokens whose cache entries are written,
    always fewer than there are tokens; `block_table`, blocks that hold them; `replica`, in whose cache these are;
    `num_cached_tokens`, how many prompt tokens the prefix cache had when the sequence first started, which preemption
    does not change.
    """

    num_computed: int
    block_table: list[int]
    replica: int
    num_cached_tokens: int

    @property
    def id(self) -> int:
        """Unique among the sequences that the scheduler knows."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt, then output; grows at its end, between `schedule` and `commit`, and only there."""

    @property
    def num_prompt(self) -> int:
        """How many of the tokens are the prompt."""

    @property
    def max_total_tokens(self) -> int:
        """Most tokens there will ever be: prompt and max_tokens. The last one is never computed."""

    @property
    def num_lookahead(self) -> int:
        """Draft tokens that the next decode step may add; constant or changing, 0 without speculation."""

    @property
    def priority(self) -> int:
        """Lower goes first; 0 by default."""

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds after which the sequence is of no use."""

    @property
    def cache_salt(self) -> bytes:
        """What decides cache content besides the tokens: model, options, adapter. Others' blocks are never shared."""

    @property
    def allow_prefix_reuse(self) -> bool:
        """False where logits of every prompt token are wanted: all are computed, by prefill steps."""


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True)
class SchedulerPolicy:
    """How the scheduler decides.

    max_num_seqs: sequences of one replica that hold blocks at the same time. chunk_sizes: token counts that a chunk of
    one sequence may be padded to. shared: which chunks of several sequences may be one prefill step, None for none.
    max_waiting: bound of the queue, None for no bound. max_overtakes: how many sequences may start before the one that
    has waited longest. max_preemptions: how often a sequence gives up its blocks to others before it is protected.
    prefix_cache: whether blocks of earlier sequences are used again.
    """

    max_num_seqs: int
    chunk_sizes: tuple[int, ...]
    shared: SharedPrefill | None = None
    max_waiting: int | None = None
    max_overtakes: int = 16
    max_preemptions: int = 2
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        limits = {"max_num_seqs": self.max_num_seqs, "max_waiting": self.max_waiting}
        sizes = {f"chunk_sizes[{index}]": size for index, size in enumerate(self.chunk_sizes)}
        for name, value in (limits | sizes).items():
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}: it must be at least 1")
        for name, value in {"max_overtakes": self.max_overtakes, "max_preemptions": self.max_preemptions}.items():
            if value < 0:
                raise OptionError(f"{name} is {value}: it must be at least 0")
        if not self.chunk_sizes:
            raise OptionError("chunk_sizes is empty: a prefill step needs at least one size")
        if self.shared is not None and not (self.shared.rows and min(self.shared.rows) > 1 and self.shared.tokens > 0):
            raise OptionError(f"shared is {self.shared}: it needs sizes of at least 2 rows of at least 1 token")

    @property
    def max_chunk(self) -> int:
        """Most tokens of one sequence in a prefill step."""
        return max(self.chunk_sizes)


@dataclass(frozen=True)
class ScheduledRow(Generic[S]):
    """Tokens of one sequence in one step.

    `token_ids[start : start + num_tokens]` are computed, then up to `num_drafts` draft tokens; the block table has
    slots for all of them. `samples`: these are the last tokens of the sequence, so that its next one is due.
    """

    sequence: S
    start: int
    num_tokens: int
    num_drafts: int
    samples: bool

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed after this step, drafts aside."""
        return self.start + self.num_tokens


@dataclass(frozen=True)
class PrefillStep(Generic[S]):
    """A chunk of one sequence per replica, or short chunks of several: the first is of the one whose turn it was."""

    rows: tuple[ScheduledRow[S], ...]


@dataclass(frozen=True)
class DecodeStep(Generic[S]):
    """The last tokens of several sequences: 1 + num_lookahead at most of each, drafts included."""

    rows: tuple[ScheduledRow[S], ...]


Step: TypeAlias = PrefillStep[S] | DecodeStep[S]


@dataclass(frozen=True)
class SchedulerStats:
    """Gauges and counters at one moment. free + referenced + cached blocks are all usable ones.

    Prefix tokens are counted when a sequence first starts, not when it starts again after a preemption.
    """

    waiting: int
    running: int
    preemptions: int
    free_blocks: int
    referenced_blocks: int
    cached_blocks: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
