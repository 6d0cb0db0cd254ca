"""The loop that turns requests into answers: schedule, run the graph, sample, hand out. No tensors."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from msds.constraints import Constraint
from msds.engine.balance import BalanceStats, ExpertBalance
from msds.engine.batch import Row
from msds.engine.block_pool import BlockPool
from msds.engine.sampler import SequenceState, sample, token_logprobs
from msds.engine.schedule_types import DecodeStep, PrefillStep, ScheduledRow, SchedulerPolicy, SchedulerStats, Step
from msds.engine.scheduler import Scheduler
from msds.engine.sequence import Delta, GenerationSequence, Listener, RequestInfo
from msds.engine.speculation import Speculation, SpeculationStats
from msds.errors import ContextLengthError, SamplingError
from msds.sampling import SamplingParams
from msds.text.token_ids import check_token_ids

if TYPE_CHECKING:
    from msds.constraints.grammars import CompiledGrammar
    from msds.engine.runner import Runner, StepResult

logger = logging.getLogger("msds")

BROKEN = "the model's hidden states are not finite for this text; its weights or its dtype cannot hold it"
MAX_CHOICES = 1024
"""Answers of one prompt at most: each is a sequence from the moment it is asked for."""
EXPIRED = "the request did not finish before its deadline"

Rows = tuple[ScheduledRow[GenerationSequence], ...]
Deltas = list[tuple[GenerationSequence, Delta]]


@dataclass(frozen=True)
class _Due:
    """A row whose next token is due: row `index` of the step; `last` is the row of logits of its last token."""

    index: int
    row: ScheduledRow[GenerationSequence]
    last: int
    drafts: list[int]


class Engine:
    """Runs sequences to their end on a Runner. Used by one thread.

    max_model_len: most tokens of one text. policy: see `SchedulerPolicy`. speculation: for a runner that drafts.
    balance: for a runner that counts experts. A step that raises ends only the sequences in it; the compiled step is
    rebuilt on its next use, and what their blocks held is not used again.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_model_len: int,
        policy: SchedulerPolicy,
        speculation: Speculation | None = None,
        balance: ExpertBalance | None = None,
    ) -> None:
        self.runner = runner
        self.max_model_len = max_model_len
        self.num_failed_steps = 0
        self.is_driven = False
        """Whether a thread of an AsyncEngine makes the steps; nobody else may then."""
        pools = [BlockPool(runner.num_blocks, runner.block_size) for _ in range(runner.num_replicas)]
        self._scheduler: Scheduler[GenerationSequence] = Scheduler(pools, policy)
        self._sequences: dict[int, GenerationSequence] = {}
        self._listeners: dict[int, Listener] = {}
        self._ids = itertools.count()
        self._speculation = speculation
        self._balance = balance

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return self._scheduler.has_work

    @property
    def stats(self) -> SchedulerStats:
        """Gauges and counters now."""
        return self._scheduler.stats

    @property
    def speculation(self) -> SpeculationStats | None:
        """What came of drafting, where it was asked for."""
        return None if self._speculation is None else self._speculation.stats

    @property
    def balance(self) -> BalanceStats | None:
        """What came of balancing experts, where it was asked for."""
        return None if self._balance is None else self._balance.stats

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """The grammar of a constraint, from any thread; hold it until the request is added, and adding costs nothing.

        ConstraintError for one that cannot be kept, SamplingError without a tokenizer.
        """
        if self.runner.model.grammars is None:
            raise SamplingError("a constraint needs a tokenizer, which this folder lacks: leave it out")
        return self.runner.model.grammars.compile(constraint)

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        listener: Listener,
        info: RequestInfo | None = None,
    ) -> list[GenerationSequence]:
        """Queue the `n` answers of one prompt, all or none.

        `listener` hears of every token. ContextLengthError, PromptError, SamplingError or OptionError, with the
        numbers, for what can never run, QueueFullError for what cannot be queued now.
        """
        info = info or RequestInfo()
        self._check_sampling(params)
        max_tokens = self._check_length(prompt_ids, params, info)
        check_token_ids(prompt_ids, self.runner.model.config.vocab_size)  # or the step would fail, for others too
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        sequences = [self._sequence(prompt_ids, params, info, seed, i, max_tokens) for i in range(params.n)]
        self._scheduler.add(sequences)
        for sequence in sequences:
            self._sequences[sequence.id] = sequence
            self._listeners[sequence.id] = listener
        return sequences

    def abort(self, sequence: GenerationSequence) -> None:
        """Give an answer up in whatever state it is; its listener hears "abort". Nothing if it has finished.

        Given up by its listener in the middle of a round of drafts, it keeps the tokens of that round.
        """
        if self._scheduler.abort(sequence.id):
            self._tell(sequence, sequence.end("abort"))
            self._drop(sequence)

    def abort_all(self) -> None:
        """Forget every sequence without telling anybody: after an error of a listener, or an interrupt."""
        for sequence in list(self._sequences.values()):
            self._scheduler.abort(sequence.id)
            self._drop(sequence)

    def invalidate(self) -> None:
        """Weights have changed: what running answers have cached is computed again, and no old block is reused."""
        self._scheduler.invalidate()

    def step(self) -> bool:
        """One graph call, a prefill chunk or a decode step; False when there is nothing to do."""
        for sequence_id in self._scheduler.expire(time.monotonic()):
            sequence = self._sequences[sequence_id]
            self._tell(sequence, sequence.end("error", EXPIRED))
            self._drop(sequence)
        step = self._scheduler.schedule()
        if step is None:
            return False
        try:
            deltas = self._decode(step) if isinstance(step, DecodeStep) else self._prefill(step)
        except Exception as error:  # whatever a graph or the sampling raises: these sequences end, the engine goes on
            self._fail(step, error)
            return True
        except BaseException:  # an interrupt: give the blocks back and let it through
            self._scheduler.fail(step)
            raise
        self._scheduler.commit(step)
        for sequence, _ in deltas:
            if sequence.is_finished:
                self._scheduler.abort(sequence.id)
        for sequence, delta in deltas:
            if sequence.id in self._sequences:  # a listener may have given it up meanwhile
                self._tell(sequence, delta)
                if delta.finish_reason is not None:
                    self._drop(sequence)
        if self._balance is not None:
            self._balance.after_step(self.runner)
        return True

    def _check_length(self, prompt_ids: Sequence[int], params: SamplingParams, info: RequestInfo) -> int:
        """max_tokens of the request, the rest of the context by default; ContextLengthError where it cannot be."""
        room = self.max_model_len - len(prompt_ids)
        if room < 1 or (params.max_tokens or 0) > room:
            raise ContextLengthError(
                prompt_index=info.prompt_index,
                prompt_tokens=len(prompt_ids),
                max_tokens=None if room < 1 else params.max_tokens,
                max_model_len=self.max_model_len,
            )
        return params.max_tokens or room

    def _check_sampling(self, params: SamplingParams) -> None:
        """What sampling parameters cannot know of this model."""
        if params.n > MAX_CHOICES:
            raise SamplingError(f"n is {params.n}: at most {MAX_CHOICES} answers of one prompt; ask several times")
        if params.min_tokens:
            model = self.runner.model
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else model.eos_token_ids)}
            if len({id_ for id_ in ends if id_ < model.allowed_vocab}) >= model.allowed_vocab:
                raise SamplingError(
                    f"min_tokens is {params.min_tokens}, but every token of the model ends the text: "
                    "leave one out of stop_token_ids"
                )

    def _sequence(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        info: RequestInfo,
        seed: int,
        choice: int,
        max_tokens: int,
    ) -> GenerationSequence:
        model = self.runner.model
        end_ids = frozenset[int]() if params.ignore_eos else model.eos_token_ids
        constraint = None
        if params.constraint is not None:
            hidden = model.tokenizer.special_ids if model.tokenizer and params.skip_special_tokens else ()
            constraint = self.compile(params.constraint).start(info.start, hidden=hidden)
        state = SequenceState(
            params,
            seed=seed,
            choice=choice,
            prompt_ids=prompt_ids,
            end_ids=end_ids,
            vocab_size=model.config.vocab_size,
            constraint=constraint,
        )
        return GenerationSequence(
            next(self._ids),
            prompt_ids,
            state,
            info=info,
            choice_index=choice,
            max_tokens=max_tokens,
            end_ids=end_ids,
            tokenizer=model.tokenizer,
            speculation=self._speculation,
        )

    def _prefill(self, step: PrefillStep[GenerationSequence]) -> Deltas:
        result = self.runner.prefill([_row(row) for row in step.rows], all_logits=any(map(_wants_prompt, step.rows)))
        return self._take(step, result, [[] for _ in step.rows])

    def _decode(self, step: DecodeStep[GenerationSequence]) -> Deltas:
        """One round: draft where that pays, compute last tokens and drafts together, sample."""
        if self._speculation is None:
            return self._take(step, self.runner.decode([_row(row) for row in step.rows]), [[] for _ in step.rows])
        start = self._speculation.clock()
        most = max(Counter(row.sequence.replica for row in step.rows).values())
        shape = most, max(row.end for row in step.rows).bit_length()
        before = sum(len(row.sequence.token_ids) for row in step.rows)
        drafts_now = self._speculation.wants(shape) and any(row.num_drafts for row in step.rows)
        drafts = self._draft(step.rows) if drafts_now else [[] for _ in step.rows]
        rows = [_row(row, ahead) for row, ahead in zip(step.rows, drafts, strict=True)]
        deltas = self._take(step, self.runner.decode(rows), drafts)
        grown = sum(len(row.sequence.token_ids) for row in step.rows) - before
        self._speculation.measure(
            shape,
            has_drafts=drafts_now,
            tokens_per_row=grown / len(step.rows),
            seconds=self._speculation.clock() - start,
        )
        return deltas

    def _draft(self, rows: Rows) -> list[list[int]]:
        """Draft tokens for each row, as many as there are slots for, up to the first that its constraint forbids."""
        drafts: list[list[int]] = [[] for _ in rows]
        able = [index for index, row in enumerate(rows) if row.num_drafts]
        proposed = self.runner.draft([_row(rows[index]) for index in able]).tolist()
        for index, tokens in zip(able, proposed, strict=True):
            tokens = tokens[: rows[index].num_drafts]
            drafts[index] = tokens[: rows[index].sequence.state.count_valid(tokens)]
        return drafts

    def _take(self, step: Step[GenerationSequence], result: StepResult, drafts: Sequence[list[int]]) -> Deltas:
        """Sample for the rows that are due; rows whose numbers broke leave before their blocks are kept."""
        deltas: Deltas = []
        due: list[_Due] = []
        all_finite = bool(result.is_finite.all())
        for index, row in enumerate(step.rows):
            sequence = row.sequence
            if sequence.id not in self._sequences:
                continue  # aborted while the step ran
            if not all_finite and not result.is_finite[index, : row.num_tokens].all():
                deltas.append(self._break(sequence))
                continue
            if isinstance(step, PrefillStep) and _wants_prompt(row):
                _take_prompt_logprobs(sequence, row, result.logits[index])
            last = min(row.num_tokens, result.logits.shape[1]) - 1  # one row of logits: that of the last token
            sequence.keep_hidden(row.end - 1, result.hidden[index, row.num_tokens - 1])
            if row.samples:
                due.append(_Due(index, row, last, drafts[index]))
        place = 0
        while due:
            due = self._accept(due, place, result, deltas)
            place += 1
        return deltas

    def _accept(self, due: Sequence[_Due], place: int, result: StepResult, deltas: Deltas) -> list[_Due]:
        """Sample the token after draft `place - 1` of each row, from its logits, key and history; who goes on.

        That is what a step without drafts would sample there. Where it equals the next draft, what was computed
        after that draft is right as well; where not, the rest of the row is thrown away: its cache entries lie
        beyond `num_computed`, and are written again before anything reads them.
        """
        states = [one.row.sequence.state for one in due]
        logits = _logits_of(due, place, result.logits)
        chosen = sample(logits, states, allowed_vocab=self.runner.model.allowed_vocab)
        going_on = []
        for one, sampled in zip(due, chosen, strict=True):
            sequence = one.row.sequence
            deltas.append((sequence, sequence.accept(sampled)))
            is_kept = place < len(one.drafts) and sampled.token_id == one.drafts[place]
            if is_kept and not sequence.is_finished:
                if result.is_finite[one.index, one.last + place + 1]:
                    sequence.keep_hidden(one.row.end + place, result.hidden[one.index, one.last + place + 1])
                    going_on.append(one)
                    continue
                deltas.append(self._break(sequence))
            if self._speculation is not None:
                self._speculation.count(drafted=len(one.drafts), accepted=place + is_kept)
        return going_on

    def _break(self, sequence: GenerationSequence) -> tuple[GenerationSequence, Delta]:
        """The text's numbers broke: its blocks are not kept."""
        self._scheduler.abort(sequence.id)
        return sequence, sequence.end("error", BROKEN)

    def _fail(self, step: Step[GenerationSequence], error: Exception) -> None:
        self.num_failed_steps += 1
        logger.error("a step failed and ends its %d sequences: %s", len(step.rows), error)
        self._scheduler.fail(step)
        for row in step.rows:
            if row.sequence.id in self._sequences:
                self._tell(row.sequence, row.sequence.end("error", f"the model's step failed: {error}"))
                self._drop(row.sequence)

    def _tell(self, sequence: GenerationSequence, delta: Delta) -> None:
        self._listeners[sequence.id](sequence, delta)

    def _drop(self, sequence: GenerationSequence) -> None:
        del self._sequences[sequence.id]
        del self._listeners[sequence.id]


def _row(row: ScheduledRow[GenerationSequence], drafts: Sequence[int] = ()) -> Row:
    sequence = row.sequence
    tokens = [*sequence.token_ids[row.start : row.end], *drafts]
    return Row(tokens, row.start, sequence.block_table, sequence.hidden_of(row.start - 1), sequence.replica)


def _logits_of(due: Sequence[_Due], place: int, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[rows due, V] of logits [S, N, V]: in place where it is one row of every sequence, as it is in most steps.

    Copying 64 rows of 150,000 logits takes several times as long as finding their largest.
    """
    if len(due) == len(logits) and all(one.last == due[0].last for one in due):
        return logits[:, due[0].last + place]
    return logits[[one.index for one in due], [one.last + place for one in due]]


def _wants_prompt(row: ScheduledRow[GenerationSequence]) -> bool:
    """Whether log-probabilities of the prompt are asked for."""
    return row.sequence.params.prompt_logprobs is not None


def _take_prompt_logprobs(
    sequence: GenerationSequence, row: ScheduledRow[GenerationSequence], logits: npt.NDArray[np.float32]
) -> None:
    """Log-probabilities of the prompt tokens that these logits [Q, V] predict; the first prompt token has none."""
    num_top = sequence.params.prompt_logprobs or 0
    known = sequence.prompt_logprobs
    if not known:
        known.append(None)
    for offset in range(row.num_tokens):
        following = row.start + offset + 1
        if len(known) <= following < sequence.num_prompt:  # a recomputation brings them again
            known.append(token_logprobs(logits[offset], sequence.token_ids[following], num_top))
