"""Constraints compiled against one tokenizer, by llguidance.

llguidance sees the exact bytes of our tokens and takes control tokens for what they are: no text spells one. The end of
the answer is a token of its own behind the vocabulary, so that it does not matter which ids end a text, or whether
any does.

Dims: T ids of the tokenizer.
"""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from msds.constraints.forms import ANSWER, Constraint, with_whitespace
from msds.constraints.state import ConstraintState
from msds.errors import ConstraintError
from msds.text.reasoning import END_THINK, SPACE, THINK, Start
from msds.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Bools: TypeAlias = npt.NDArray[np.bool_]

MAX_KEPT = 64
"""Compiled grammars that are kept when nobody uses them."""

MAX_ALTERNATIVES = 20_000
"""Ways in which a text may go on at one place: an object of N optional properties has four times as many."""

STACK_BYTES = 64 * 2**20
"""Of the thread that compiles. llguidance recurses along chains of rules and references, and on the 8 MiB that threads
have by default a few hundred references overflow the stack and end the process."""

_MAX_MESSAGE = 300
_stack_size = threading.Lock()
# the model decides how a text is cut into tokens, also where the grammar leaves one text only
_WHOLE = {"name": "whole", "lark_grammar": f'%llguidance {{"no_forcing": true}}\nstart: @{ANSWER}'}


class GrammarCompiler:
    """Compiles the constraints of one tokenizer and remembers them by content. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._in_use: weakref.WeakValueDictionary[Constraint, CompiledGrammar] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """The grammar of a constraint; while it is referenced, asking again costs nothing.

        ConstraintError says what cannot be kept, and where. The first call of all reads the vocabulary (half a second
        for 129,280 tokens), so keep it off the threads that must not wait.
        """
        with self._lock:
            found = self._in_use.get(constraint)
        if found is None:
            found = _on_a_large_stack(lambda: CompiledGrammar(constraint, self.table))
        with self._lock:
            found = self._in_use.setdefault(constraint, found)
            self._recent[constraint] = found
            self._recent.move_to_end(constraint)
            while len(self._recent) > MAX_KEPT:
                self._recent.popitem(last=False)
        return found

    @property
    def table(self) -> TokenTable:
        """The vocabulary as llguidance reads it, built on first use."""
        with self._lock:
            return self._table

    @functools.cached_property
    def _table(self) -> TokenTable:
        return TokenTable(self._tokenizer)


def _on_a_large_stack(work: Callable[[], CompiledGrammar]) -> CompiledGrammar:
    future: Future[CompiledGrammar] = Future()

    def carry_out() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=carry_out, name="msds-grammar", daemon=True)
    with _stack_size:  # a setting of the process, for threads that start now
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return future.result()


class CompiledGrammar:
    """One constraint, ready to be followed. ConstraintError when it cannot be kept or allows no text at all."""

    def __init__(self, constraint: Constraint, table: TokenTable) -> None:
        self.table = table
        constraint.check(table.fault_of_schema)
        parts = constraint.parts(table.tokenizer)
        source = json.dumps({"grammars": [_WHOLE, *({"name": name, **part} for name, part in parts.items())]})
        fault = table.fault_of(source)
        if fault is not None:
            raise ConstraintError(fault)
        self._matcher = table.matcher(source)
        if not table.allowed_by(self._matcher.deep_copy()).any():
            raise ConstraintError("it allows no text at all")

    def start(self, start: Start = Start.CLOSED, *, hidden: Collection[int] = ()) -> ConstraintState:
        """The state of one answer at its beginning. start: where the prompt leaves the model. hidden: ids whose text
        is left out of the answer."""
        return ConstraintState(self.table, self._matcher.deep_copy(), start, hidden)


class TokenTable:
    """What constraints need to know of a vocabulary. Arrays [T] are shared: they must not be written to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size
        self.pieces = [tokenizer.token_bytes(id_) for id_ in range(self.size)]
        self._control = frozenset(tokenizer.control_ids.values()) | tokenizer.special_ids
        self._lltokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(_Listing(self.pieces, self._control)))
        self.spaces = self._where({id_ for id_, piece in self._text_pieces() if not piece.strip(_SPACE)})
        self._thinking: dict[int, Bools] = {}
        self._opening: dict[int, Bools] = {}

    def matcher(self, source: str) -> LLMatcher:
        """A matcher at the beginning of a grammar that `fault_of` found no fault in."""
        from llguidance import LLMatcher

        return LLMatcher(self._lltokenizer, source, log_level=0, limits=_limits())

    def allowed_by(self, matcher: LLMatcher) -> Bools:
        """Which ids [T] may come next. ConstraintError: the grammar exceeds a limit, or took a token it forbids."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            reason = _short(matcher.get_error())
            if reason.startswith("NoExtension"):
                raise ConstraintError("the constraint allows no text from here on")
            raise ConstraintError(f"the constraint cannot be followed: {reason}")
        return np.unpackbits(bits, count=self.size, bitorder="little").view(np.bool_)

    def fault_of(self, source: str) -> str | None:
        """What is wrong with a grammar, or None. What llguidance warns of it would not keep, so that is a fault too."""
        from llguidance import LLMatcher

        faults = LLMatcher.validate_grammar_with_warnings(source, self._lltokenizer, limits=_limits())[1]
        return _short(faults[0]) if faults else None

    def fault_of_schema(self, schema: Any) -> str | None:
        """The same for a JSON Schema."""
        part = with_whitespace(schema) if isinstance(schema, dict) else schema
        return self.fault_of(json.dumps({"grammars": [{"json_schema": part}]}))

    def thinking(self, matched: int) -> Bools:
        """Ids that may come inside the thinking, of which `matched` characters may begin `</think>`.

        All but those that close it and go on with more than whitespace: the grammar has to see whole tokens.
        """
        if matched not in self._thinking:
            self._thinking[matched] = ~self._where({id_ for id_ in self._closers if self._goes_on(id_, matched)})
        return self._thinking[matched]

    def opening(self, matched: int) -> Bools:
        """Ids that begin `<think>`, or go on with it where `matched` characters of it are there."""
        if matched not in self._opening:
            rest = THINK[matched:].encode()
            if THINK in self.tokenizer.control_ids:  # then no other spelling was ever seen in training
                ids = {self.tokenizer.control_ids[THINK]} if matched == 0 else set()
            else:
                ids = {id_ for id_, p in self._text_pieces() if p and (rest.startswith(p) or p.startswith(rest))}
            self._opening[matched] = self._where(ids)
        return self._opening[matched]

    @functools.cached_property
    def _closers(self) -> list[int]:
        """Ids with the last character of `</think>` before something else."""
        last = END_THINK[-1:].encode()
        return [id_ for id_, piece in enumerate(self.pieces) if last in piece.rstrip(_SPACE)[:-1]]

    def _goes_on(self, id_: int, matched: int) -> bool:
        _, _, rest = (END_THINK[:matched].encode() + self.pieces[id_]).partition(END_THINK.encode())
        return bool(rest.strip(_SPACE))

    def _text_pieces(self) -> list[tuple[int, bytes]]:
        return [(id_, piece) for id_, piece in enumerate(self.pieces) if piece and id_ not in self._control]

    def _where(self, ids: Collection[int]) -> Bools:
        mask = np.zeros(self.size, np.bool_)
        mask[list(ids)] = True
        mask.flags.writeable = False
        return mask


class _Listing:
    """The vocabulary in the shape that llguidance asks for, with the end of the answer as the last token."""

    bos_token_id = None

    def __init__(self, pieces: list[bytes], control: Collection[int]) -> None:
        self.eos_token_id = len(pieces)
        self.tokens = [*pieces, b"<end of answer>"]
        self.special_token_ids = [*sorted(control), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Encoding serves only grammars that force tokens; ours do not."""
        return []


_SPACE = SPACE.encode()


@functools.cache
def _limits() -> LLParserLimits:
    """llguidance's own limits end an answer under way at an object of some 500 optional properties."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=MAX_ALTERNATIVES, step_max_items=10 * MAX_ALTERNATIVES)


def _short(message: str) -> str:
    """The first lines of one of llguidance's messages, as one line."""
    text = " ".join(message.partition("<state>")[0].split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
