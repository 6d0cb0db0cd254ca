"""From logits to tokens, on the host in NumPy: the definition of what sampling parameters do.

Per row, in this order: penalties, logit bias, constraint, min_tokens, temperature, top_k, top_p, min_p, then one draw.
Each row is computed by itself, and its random number is a function of (seed, choice, position) alone, so what
a row gives does not depend on the rows beside it.

Dims: S rows, V vocabulary of the model.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from msds.constraints.state import ConstraintState
from msds.errors import ConstraintError, SamplingError
from msds.sampling import SamplingParams
from msds_ops.random import stream_key, uniform_of_key

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]

# JSON has no -Infinity; a masked logit has no finite log-probability. OpenAI's own figure for "never".
NEVER = -9999.0

# bins of `_nucleus`: 64 to an octave (the six leading bits of the mantissa), the last one below 2^-40
_BIN_SHIFT = 52 - 6
_ONE_BITS = int(np.float64(1).view(np.int64)) >> _BIN_SHIFT
_LAST_BIN = 64 * 40
_HEAD = 1e-6  # a peaked distribution holds its nucleus in the tokens above this share of the best

_NO_IDS: Ids = np.empty(0, np.int64)

_BLOCK = 128  # values to a block in `_largest` and `_invert`


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm, of the model's own distribution.

    That is log_softmax of the logits as the model gave them: before penalties, masks and temperature. `rank`
    is 1 for the most likely token. `top`: (id, log-probability) of the most likely, equals by lowest id.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for one row; or `error`, and then `token_id` is -1: only this row has failed."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class SequenceState:
    """What the sampler knows of one sequence; `observe` each token as it becomes final.

    `seed` is the request's (drawn once if the request brings none), `choice` the number of the answer.
    `end_ids` end the text: min_tokens suppresses them, so leave out those that are ignored (ignore_eos). A
    recomputed sequence is the same state again: `prompt_ids` are always the request's own prompt. `constraint`: the
    state of this answer alone, where the parameters name one.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        choice: int,
        prompt_ids: Sequence[int],
        end_ids: Collection[int],
        vocab_size: int,
        constraint: ConstraintState | None = None,
    ) -> None:
        """SamplingError when `params` biases, or ends at, a token that the model does not have."""
        self.params = params
        self.num_output = 0
        self._num_prompt = len(prompt_ids)
        self._key = stream_key(seed, choice)
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            outside = [id_ for id_ in ids if id_ >= vocab_size]
            if outside:
                raise SamplingError(f"{name} names token {outside[0]}; the model has the tokens 0 to {vocab_size - 1}")
        self._constraint = constraint
        self._all_end_ids = frozenset(end_ids) | frozenset(params.stop_token_ids)
        self._end_ids = np.array(sorted(self._all_end_ids), np.int64)
        self._eos_ids = np.array(sorted(self._all_end_ids - set(params.stop_token_ids)), np.int64)
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._seen = TokenCounts() if params.repetition_penalty != 1 else None
        if self._seen is not None:
            self._seen.add_all(prompt_ids)
        self._output = TokenCounts() if params.presence_penalty or params.frequency_penalty else None
        self._changes_logits = any(
            (self._seen is not None, self._output is not None, len(self._bias_ids), params.min_tokens, constraint)
        )

    @property
    def position(self) -> int:
        """Position in the sequence of the token to be chosen next; the counter of its random number."""
        return self._num_prompt + self.num_output

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is simply the argmax of the logits and nothing else is asked for."""
        return self.params.temperature == 0 and self.params.logprobs is None and not self._changes_logits

    @property
    def must_end(self) -> bool:
        """Whether the constraint is fulfilled and leaves nothing to follow."""
        try:
            return self._constraint is not None and self._constraint.must_end
        except ConstraintError:
            return False  # it is stuck, which the next sample says

    def observe(self, token_id: int) -> None:
        """Take a chosen token into the history; constant time, but for what a constraint needs."""
        self.num_output += 1
        if self._constraint is not None and token_id not in self._all_end_ids:
            self._constraint.accept(token_id)
        if self._seen is not None:
            self._seen.add(token_id)
        if self._output is not None:
            self._output.add(token_id)

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, the constraint would allow; all without one."""
        try:
            return len(token_ids) if self._constraint is None else self._constraint.count_valid(token_ids)
        except ConstraintError:
            return 0  # it is stuck, which the next sample says

    def adjusted(self, logits: Floats) -> Floats:
        """The logits [V] after penalties, bias, constraint and min_tokens; a copy where anything changes.

        ConstraintError: the constraint is stuck.
        """
        if not self._changes_logits:
            return logits
        params, logits = self.params, logits.copy()
        if self._seen is not None:
            ids = _below(self._seen.ids, len(logits))
            values, penalty = logits[ids], np.float32(params.repetition_penalty)
            logits[ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._output is not None:
            ids = _below(self._output.ids, len(logits))
            counts = self._output.counts[self._output.ids < len(logits)].astype(np.float32)
            logits[ids] -= counts * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
        inside = self._bias_ids < len(logits)
        logits[self._bias_ids[inside]] += self._bias[inside]
        ends = _below(self._end_ids, len(logits)) if self.num_output < params.min_tokens else _NO_IDS
        if self._constraint is not None:
            np.copyto(logits, -np.inf, where=~self._allowed(self._constraint, len(logits), ends))
        else:
            logits[ends] = -np.inf
        return logits

    def _allowed(self, constraint: ConstraintState, size: int, suppressed: Ids) -> npt.NDArray[np.bool_]:
        """Which ids [size] the constraint leaves. End ids are allowed where the text may end, those of the request also
        where they are text that may come; `suppressed` ones are not, unless nothing else is."""
        allowed = np.zeros(size, np.bool_)
        allowed[: len(constraint.mask)] = constraint.mask[:size]
        may_end = constraint.may_end
        allowed[_below(self._eos_ids, size)] = may_end
        if may_end:
            allowed[_below(self._end_ids, size)] = True
        if len(suppressed):
            rest = allowed.copy()
            rest[suppressed] = False
            if rest.any():
                return rest
        return allowed

    def uniform(self) -> float:
        """The random number in [0, 1) of the token to be chosen next."""
        return float(uniform_of_key(self._key, self.position))


class TokenCounts:
    """Distinct token ids in order of appearance and how often each came; adding one takes constant time."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids: Ids = np.empty(16, np.int64)
        self._counts: Ids = np.empty(16, np.int64)

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Ids:
        return self._counts[: len(self._slots)]

    def add(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._ids[slot], self._counts[slot] = token_id, 0
        self._counts[slot] += 1

    def add_all(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.add(token_id)


def sample(logits: Floats, states: Sequence[SequenceState], *, allowed_vocab: int | None = None) -> list[Sampled]:
    """One token for each row of logits [S, V], float32, one state each.

    Ids from `allowed_vocab` on (padding of the model's vocabulary, without a token) are never chosen. A row
    with NaN or +inf in it, or with nothing left to choose from, yields an error of its own; the others are
    served. The states are not changed: `observe` follows when a token is final.
    """
    if logits.ndim != 2 or len(logits) != len(states):
        raise ValueError(f"{len(states)} states need logits [{len(states)}, V], not {list(logits.shape)}")
    num_allowed = logits.shape[1] if allowed_vocab is None else min(allowed_vocab, logits.shape[1])
    if all(state.is_plain_greedy for state in states):
        best = logits.argmax(axis=1)  # the first of equals; NaN counts as the largest
        peaks = logits[np.arange(len(best)), best]
        if np.isfinite(peaks).all() and (best < num_allowed).all():
            return [Sampled(token) for token in best.tolist()]
    return [_sample_row(row, state, num_allowed) for row, state in zip(logits, states, strict=True)]


def token_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one token and of the `num_top` most likely ones under logits [V] without NaN."""
    log_total = _log_sum_exp(logits)
    top = _largest(logits, num_top)
    top = top[np.argsort(-logits[top], kind="stable")]  # ids ascend, so equals stay by lowest id
    values = np.maximum(logits[top].astype(np.float64) - log_total, NEVER)
    return TokenLogprobs(
        token_id=token_id,
        logprob=max(float(logits[token_id]) - log_total, NEVER),
        rank=1 + int(np.count_nonzero(logits > logits[token_id])),
        top=tuple(zip(top.tolist(), values.tolist(), strict=True)),
    )


def _sample_row(logits: Floats, state: SequenceState, num_allowed: int) -> Sampled:
    peak = logits.max()  # NaN if there is one
    if not np.isfinite(peak):
        return _failed(peak)
    params = state.params
    try:
        scores = state.adjusted(logits[:num_allowed])
    except ConstraintError as error:
        return Sampled(-1, error=str(error))
    if scores.max() == -np.inf:
        return Sampled(-1, error="no token is left to choose: every logit is -inf or masked")
    if params.temperature == 0:
        token = int(scores.argmax())
    else:
        token = _draw(scores, params, state.uniform())
    if params.logprobs is None:
        return Sampled(token)
    return Sampled(token, token_logprobs(logits, token, params.logprobs))


def _failed(peak: np.float32) -> Sampled:
    what = "no token is left to choose: every logit is -inf" if peak == -np.inf else f"the logits hold {peak}"
    return Sampled(-1, error=f"{what}; the model's output is broken for this sequence")


def _draw(scores: Floats, params: SamplingParams, number: float) -> int:
    """Inverse CDF over the kept tokens in the order of their ids."""
    if 0 < params.top_k < len(scores):
        ids = _largest(scores, params.top_k)
        weights = _weights(scores[ids], params.temperature)
    else:
        ids = np.arange(len(scores))
        weights = _weights(scores, params.temperature)
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= params.min_p * weights.max())
        ids, weights = ids[kept], weights[kept]
    return int(ids[_invert(weights, number)])


def _invert(weights: Doubles, number: float) -> int:
    """Index of the weight in whose share of the total the number, in [0, 1), falls.

    Summed by blocks and then inside one block, since a running sum over a vocabulary is five times as slow.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    cumulative = np.cumsum(np.add.reduceat(weights, starts))
    target = number * cumulative[-1]
    # side "right": a weight of 0 is never hit, not even by the number 0
    block = int(np.searchsorted(cumulative, target, side="right"))
    inner = weights[starts[block] : starts[block] + _BLOCK]
    before = cumulative[block - 1] if block else 0.0
    index = int(np.searchsorted(before + np.cumsum(inner), target, side="right"))
    # the two sums may round differently, so that the target lies just behind the block's last weight
    return int(starts[block]) + min(index, int(np.flatnonzero(inner)[-1]))


def _weights(scores: Floats, temperature: float) -> Doubles:
    """Unnormalised probabilities, the best is 1; float64, so that sums over a vocabulary keep 24 bits."""
    weights = scores.astype(np.float64)
    # in place: for an array of this size a new one costs more, in page faults, than the arithmetic
    weights -= float(scores.max())
    with np.errstate(over="ignore"):  # a tiny temperature sends the others to -inf, which is right
        weights /= temperature
    return np.exp(weights, out=weights)


def _nucleus(weights: Doubles, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights that hold `top_p` of the total; at least one.

    `weights` are in [0, 1] and the largest is 1. Sorting a vocabulary costs 20 ms, so only the larger weights
    are looked at if they suffice, and these are counted into bins first (the leading bits of a positive float
    order like the float itself): only the bin in which the sum is reached is sorted.
    """
    needed = top_p * weights.sum()
    head = np.flatnonzero(weights >= _HEAD)
    if weights[head].sum() < needed:
        head = np.arange(len(weights), dtype=np.int64)
    weights = weights[head]
    bins = np.minimum(_ONE_BITS - (weights.view(np.int64) >> _BIN_SHIFT), _LAST_BIN)
    mass = np.cumsum(np.bincount(bins, weights))
    edge_bin = int(np.searchsorted(mass, needed, side="left"))
    edge = np.flatnonzero(bins == edge_bin)
    edge = edge[np.argsort(-weights[edge], kind="stable")]  # equals by lowest id
    missing = needed - (mass[edge_bin - 1] if edge_bin else 0.0)
    count = int(np.searchsorted(np.cumsum(weights[edge]), missing, side="left")) + 1
    kept = bins < edge_bin
    kept[edge[:count]] = True
    nucleus: Ids = head[kept]
    return nucleus


def _largest(values: Floats, count: int) -> Ids:
    """Indices, ascending, of the `count` largest values; of equals at the edge the lowest indices."""
    if count <= 0:
        return np.empty(0, np.int64)
    if count >= len(values):
        return np.arange(len(values))
    num_blocks = len(values) // _BLOCK
    if count < num_blocks:
        # `count` blocks have a maximum >= bound, so the `count` largest values are >= bound too: few are left
        peaks = values[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
        bound = np.partition(peaks, num_blocks - count)[num_blocks - count]
        ids = np.flatnonzero(values >= bound)
    else:
        ids = np.arange(len(values), dtype=np.int64)
    some = values[ids]
    edge = np.partition(some, len(some) - count)[len(some) - count]
    kept = some > edge
    kept[np.flatnonzero(some == edge)[: count - np.count_nonzero(kept)]] = True
    largest: Ids = ids[kept]
    return largest


def _log_sum_exp(logits: Floats) -> float:
    values = logits.astype(np.float64)
    peak = values.max()
    return float(peak + np.log(np.exp(values - peak).sum()))


def _below(ids: Ids, size: int) -> Ids:
    return ids[ids < size]
