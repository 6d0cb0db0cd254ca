"""Prove on a user's own checkpoint that every way of running the model gives what its definition gives.

The definition is `forward`: teacher-forced, no cache, expanded attention. Everything that serving does differently
(a paged cache, chunks, absorbed attention, padding, batching) is compared with it layer by layer on one text.

T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msds.engine.batch import BATCH_SPEC, Batch, Row, build_batch
from msds.errors import OptionError
from msds.model import Model
from msds.reference import transformers_logits
from msds.text.token_ids import check_token_ids
from msds_graphs.specs import ArraySpec

Floats = npt.NDArray[np.float32]

DEFAULT_TOLERANCE = 1e-4
"""Largest accepted difference, relative to the largest magnitude of what is compared; float32 leaves about 1e-6."""
DEFAULT_TOKENS = 33
BLOCK_SIZE = 16
DECODED = 6
CHUNK = 7
BATCH = 3


@dataclass(frozen=True)
class Trace:
    """What a way of running gives: the residual stream after each layer [T, D] and the logits [T, V]."""

    layers: tuple[Floats, ...]
    logits: Floats

    def rows(self, start: int, stop: int) -> Trace:
        """The same for tokens [start, stop)."""
        return Trace(tuple(layer[start:stop] for layer in self.layers), self.logits[start:stop])


@dataclass(frozen=True)
class Check:
    """One row of the report.

    status: "pass", "fail" or "skip". difference: largest difference of the logits relative to their largest magnitude.
    first_layer: index of the first layer beyond the tolerance, None if none is. worst: the worst logit in words.
    """

    name: str
    status: str
    difference: float | None = None
    first_layer: int | None = None
    worst: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """All checks of one checkpoint; `passed` if none failed."""

    model: str
    num_tokens: int
    tolerance: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, with the keys of `Check`."""
        return {
            "model": self.model,
            "num_tokens": self.num_tokens,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "checks": [vars(check) for check in self.checks],
        }

    def render(self) -> str:
        """The report as a table."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"{'check':<{width}}  result  difference  seconds"]
        for check in self.checks:
            difference = "" if check.difference is None else f"{check.difference:.1e}"
            lines.append(f"{check.name:<{width}}  {check.status:<6}  {difference:>10}  {check.seconds:7.1f}")
            if check.first_layer is not None:
                lines.append(f"    first differing layer: {check.first_layer}")
            if check.status == "fail" and check.worst:
                lines.append(f"    worst: {check.worst}")
            if check.reason:
                lines.append(f"    {check.reason}")
        verdict = "equal" if self.passed else "NOT equal"
        lines.append(
            f"{self.model}: {verdict} within {self.tolerance:g} of the logits' scale, {self.num_tokens} tokens"
        )
        return "\n".join(lines)


def verify(
    model: Model,
    *,
    token_ids: Sequence[int] | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    reference: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run every check on `model`.

    token_ids: the text to compare on, at least 16 tokens; default 33 pseudo-random ids, the same on every run.
    reference: "transformers" adds a comparison with Hugging Face transformers on the same files, if it is installed.
    progress: receives the name of each check as it starts. OptionError for an unknown reference or a short text.
    """
    if reference not in (None, "transformers"):
        raise OptionError(f"reference is {reference!r}: the one that exists is 'transformers'")
    if not tolerance > 0:
        raise OptionError(f"tolerance is {tolerance!r}: it must be above 0")
    ids = _text(model, token_ids)
    ways = _Ways(model, ids)
    say = progress or (lambda name: None)
    checks: list[Check] = []

    def run(name: str, compare: Callable[[], Check]) -> None:
        say(name)
        start = time.perf_counter()
        check = compare()
        checks.append(Check(**{**vars(check), "name": name, "seconds": time.perf_counter() - start}))

    def equal(expected: Callable[[], Trace], actual: Callable[[], Trace]) -> Callable[[], Check]:
        return lambda: compare_traces(expected(), actual(), tolerance)

    last = len(ids) - DECODED
    run("unchunked prefill = forward", equal(ways.forward, ways.prefill_whole))
    run("chunked prefill = unchunked", equal(ways.prefill_whole, ways.prefill_chunked))
    run("decode = forward", equal(lambda: ways.forward().rows(last, len(ids)), ways.decode_last))
    if hasattr(model.functions, "mtp"):
        run("absorbed = naive attention", equal(ways.naive_last, ways.decode_last))
    else:
        checks.append(Check("absorbed = naive attention", "skip", reason="this model has no latent attention"))
    run("padded bucket = unpadded", equal(ways.prefill_whole, ways.prefill_padded))
    run("batch = alone", equal(ways.decode_last_token, ways.decode_in_batch))
    if reference is not None:
        run("forward = transformers", lambda: _compare_with_transformers(model, ids, ways, tolerance))
    return Report(str(model.folder), len(ids), tolerance, tuple(checks))


def compare_traces(expected: Trace, actual: Trace, tolerance: float) -> Check:
    """Compare layer by layer and then the logits; the name is the caller's to set."""
    first = None
    for index, (want, got) in enumerate(zip(expected.layers, actual.layers, strict=True)):
        if not _difference(want, got) <= tolerance:  # NaN counts as a difference
            first = index
            break
    difference = _difference(expected.logits, actual.logits)
    passed = first is None and difference <= tolerance
    return Check(
        name="",
        status="pass" if passed else "fail",
        difference=difference,
        first_layer=first,
        worst=_worst(expected.logits, actual.logits),
    )


def _difference(expected: Floats, actual: Floats) -> float:
    scale = float(np.abs(expected).max()) or 1.0
    return float(np.abs(expected - actual).max()) / scale


def _worst(expected: Floats, actual: Floats) -> str:
    gap = np.abs(expected - actual)
    token, column = np.unravel_index(int(np.where(np.isfinite(gap), gap, np.inf).argmax()), gap.shape)
    return (
        f"logit of token id {column} after token {token} is {actual[token, column]:.6g} "
        f"instead of {expected[token, column]:.6g}"
    )


def _text(model: Model, token_ids: Sequence[int] | None) -> npt.NDArray[np.int64]:
    vocab = model.allowed_vocab
    if token_ids is None:
        return np.random.default_rng(0).integers(0, vocab, DEFAULT_TOKENS)
    if len(token_ids) < 16:
        raise OptionError(f"{len(token_ids)} tokens are too few to compare on: give at least 16")
    return check_token_ids(token_ids, model.config.vocab_size)


def _compare_with_transformers(model: Model, ids: npt.NDArray[np.int64], ways: _Ways, tolerance: float) -> Check:
    expected = transformers_logits(model.folder, ids.tolist())
    actual = ways.forward().logits
    return compare_traces(Trace((), expected), Trace((), actual), tolerance)


class _Ways:
    """The ways of running one text; each is computed once and remembered."""

    def __init__(self, model: Model, ids: npt.NDArray[np.int64]) -> None:
        from msds_graphs.binding import bind, fresh_prefix

        self.model = model
        self.ids = ids.tolist()
        self.blocks_each = -(-len(ids) // BLOCK_SIZE)
        self.num_blocks = 1 + BATCH * self.blocks_each
        spec = model.functions.cache_spec(model.config, self.num_blocks, BLOCK_SIZE, model.dtype)
        self.cache = bind(spec, fresh_prefix("verify_cache"))
        self._steps: dict[Any, Any] = {}
        self._traces: dict[str, Trace] = {}

    def forward(self) -> Trace:
        """The definition over the whole text."""
        return self._once("forward", self._forward)

    def prefill_whole(self) -> Trace:
        """All tokens in one chunk."""
        return self._once("whole", lambda: self._prefill([len(self.ids)], len(self.ids), self.blocks_each))

    def prefill_chunked(self) -> Trace:
        """All tokens in chunks that fit no block."""
        sizes = [CHUNK] * (len(self.ids) // CHUNK) + ([len(self.ids) % CHUNK] if len(self.ids) % CHUNK else [])
        return self._once("chunked", lambda: self._prefill(sizes, CHUNK, self.blocks_each))

    def prefill_padded(self) -> Trace:
        """All tokens in one chunk of a bucket that is larger in tokens and in context."""
        queries, blocks = len(self.ids) + CHUNK, self.blocks_each + 2
        return self._once("padded", lambda: self._prefill([len(self.ids)], queries, blocks))

    def decode_last(self) -> Trace:
        """The last tokens one by one by `decode`, after a prefill of the others."""
        return self._once("decode", lambda: self._one_by_one("decode"))

    def naive_last(self) -> Trace:
        """The last tokens one by one by `prefill`: the same cache read with expanded attention."""
        return self._once("naive", lambda: self._one_by_one("prefill"))

    def decode_last_token(self) -> Trace:
        """The last token alone."""
        return self.decode_last().rows(DECODED - 1, DECODED)

    def decode_in_batch(self) -> Trace:
        """The last token in the middle of a batch with other lengths of the same text."""
        return self._once("batch", self._decode_in_batch)

    def _once(self, name: str, compute: Callable[[], Trace]) -> Trace:
        if name not in self._traces:
            self._traces[name] = compute()
        return self._traces[name]

    def _table(self, index: int) -> range:
        """Blocks of sequence `index`, last first, so that block order and token order differ."""
        first = 1 + index * self.blocks_each
        return range(first + self.blocks_each - 1, first - 1, -1)

    def _forward(self) -> Trace:
        size = (1, len(self.ids))
        batch = {
            "tokens": np.array([self.ids], np.int32),
            "positions": np.arange(len(self.ids), dtype=np.int32)[None],
            "query_lens": np.array([len(self.ids)], np.int32),
        }
        spec = {
            "tokens": ArraySpec(size, "int32"),
            "positions": ArraySpec(size, "int32"),
            "query_lens": ArraySpec((1,), "int32"),
        }
        definition, config, plan = self.model.functions.forward, self.model.config, self.model.plan

        def step(params, cache, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
            return definition(params, batch, config, plan, True), cache

        from msds_graphs.compile import compile

        outputs = compile(step, bound=self.model.params, batch=spec, name="verify forward")(batch)
        return Trace(tuple(layer[0] for layer in outputs["layers"]), outputs["logits"][0])

    def _step(self, kind: str, num_seqs: int, num_queries: int, num_blocks: int) -> Any:
        """A traced step of `kind` ("prefill" or "decode") with all logits, compiled for exactly one shape."""
        from msds_graphs.compile import compile

        key = (kind, num_seqs, num_queries, num_blocks)
        if key not in self._steps:
            function = getattr(self.model.functions, kind)
            config, plan = self.model.config, self.model.plan

            def step(params, cache, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
                return function(params, cache, batch, config, plan, 0, BLOCK_SIZE, True)

            self._steps[key] = compile(
                step,
                bound=self.model.params,
                donated=self.cache,
                batch=BATCH_SPEC,
                buckets=[{"S": num_seqs, "Q": num_queries, "B": num_blocks}],
                outputs={
                    "logits": ("S", "Q", None),
                    "hidden": ("S", "Q", None),
                    "is_finite": ("S", "Q"),
                    "layers": ("S", "Q", None),
                },
                name=f"verify {kind}",
                in_place=plan.implementation("cache_write") != "reference",
            )
        return self._steps[key]

    def _run(self, step: Any, rows: Sequence[Row], index: int = 0) -> Trace:
        """Run a step; the trace of row `index`."""
        outputs = step(self._batch(rows))
        count = len(rows[index].tokens)
        layers = tuple(layer[index, :count] for layer in outputs["layers"])
        return Trace(layers, outputs["logits"][index, :count])

    def _batch(self, rows: Sequence[Row]) -> Batch:
        vocab = self.model.config.vocab_size
        return build_batch(rows, block_size=BLOCK_SIZE, num_cache_blocks=self.num_blocks, vocab_size=vocab)

    def _prefill(self, sizes: Sequence[int], num_queries: int, num_blocks: int, *, index: int = 0) -> Trace:
        """Prefill the first sum(sizes) tokens as sequence `index`, chunk by chunk, in one bucket."""
        step = self._step("prefill", 1, num_queries, num_blocks)
        traces, start = [], 0
        for size in sizes:
            traces.append(self._run(step, [Row(self.ids[start : start + size], start, self._table(index))]))
            start += size
        return _join(traces)

    def _one_by_one(self, kind: str) -> Trace:
        start = len(self.ids) - DECODED
        self._prefill([start], len(self.ids), self.blocks_each)
        step = self._step(kind, 1, 1, self.blocks_each)
        return _join(
            [self._run(step, [Row(self.ids[at : at + 1], at, self._table(0))]) for at in range(start, len(self.ids))]
        )

    def _decode_in_batch(self) -> Trace:
        lengths = [len(self.ids) // 3, len(self.ids) - 1, len(self.ids) // 2]
        for index, length in enumerate(lengths):
            self._prefill([length], len(self.ids), self.blocks_each, index=index)
        rows = [Row(self.ids[at : at + 1], at, self._table(index)) for index, at in enumerate(lengths)]
        return self._run(self._step("decode", BATCH, 1, self.blocks_each), rows, index=1)


def _join(traces: Sequence[Trace]) -> Trace:
    layers = tuple(np.concatenate(parts) for parts in zip(*(trace.layers for trace in traces), strict=True))
    return Trace(layers, np.concatenate([trace.logits for trace in traces]))
