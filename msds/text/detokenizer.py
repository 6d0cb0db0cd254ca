"""Token ids to text, one at a time, never cutting a character."""

import codecs
from collections.abc import Iterable

from msds.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the ids of one sequence into text as they arrive; each call costs the same at any length.

    A token may end inside a UTF-8 character: its bytes are held until the character is whole. Bytes that can
    no longer become one read as U+FFFD. What is still held at the end is a cut character and becomes one
    U+FFFD, by `finish`. The deltas joined are exactly `Tokenizer.decode` of the same ids, so streaming and
    non-streaming agree also at a hard cut. (The bytes themselves are in `Tokenizer.token_bytes`.)

    `continuation` (the default): the ids follow a prompt, so the leading space of a word-marking vocabulary
    is text; false for ids that begin a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continuation: bool = True) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._at_start = not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        return self._decoder.decode(b"".join(map(self._piece, ids)))

    def finish(self) -> str:
        """The rest of the text: empty, or U+FFFD for a character that was cut. No ids may follow."""
        return self._decoder.decode(b"", final=True)

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        piece = self._vocabulary.bytes_of(token_id)
        if self._at_start and piece:
            self._at_start = False
            piece = self._vocabulary.first_bytes(piece)
        return piece
