"""Control tokens: which added tokens they are, and how a text that spells one is kept from becoming one.

A tokenizer file marks added tokens as `special` or not, but that flag does not say which of them steer
the model: DeepSeek's `<｜User｜>`, `<｜Assistant｜>`, `<think>` and tool markers are `special: false`. So
the switch of the `tokenizers` library that encodes special tokens as text would still turn a typed
`<｜User｜>` into the id of a user turn. Here a control token is every special token, and every other added
token whose text holds punctuation or symbols. What is left are plain additions to the vocabulary, such as
runs of spaces or single letters, which are text.

Two kinds of stand-in keep text and control apart. Both carry a random number drawn when they are made, so
no text can contain one on purpose:
- a *mark* stands for a control token on its way into the encoder, which knows marks only, never spellings;
- a *quote* stands for a spelling inside message content on its way through a chat template. It consists of
  digits alone, so that it survives `strip`, `upper`, `tojson`, escaping and concatenation.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_NUM_DIGITS = 40
_INDEX_DIGITS = 6


def is_control(added_token: Mapping[str, Any]) -> bool:
    """Whether an entry of `added_tokens` steers the model, rather than being more vocabulary for text."""
    content = str(added_token["content"])
    return bool(added_token.get("special")) or any(not (c.isalnum() or c.isspace()) for c in content)


class ControlTokens:
    """The spellings of a tokenizer's control tokens and the marks that stand for them."""

    def __init__(self, spellings: Iterable[str]) -> None:
        nonce = secrets.token_hex(16)
        # a private-use character first: no spelling and no vocabulary entry begins with it
        self.marks = {spelling: f"\ue0c0{nonce}.{i}\ue0c1" for i, spelling in enumerate(spellings) if spelling}
        # a regular expression takes the first alternative that fits: longest first makes it leftmost-longest,
        # as the encoder's own automaton is
        longest_first = sorted(self.marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._prefixes = frozenset(s[:end] for s in self.marks for end in range(1, len(s)))
        self._suffixes = frozenset(s[start:] for s in self.marks for start in range(1, len(s)))
        self._longest = max(map(len, self.marks), default=1)

    def mark(self, text: str) -> str:
        """The text with every spelling of a control token replaced by its mark."""
        return self._pattern.sub(lambda match: self.marks[match.group()], text)

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The text in non-empty pieces, each with whether it is the spelling of a control token."""
        pieces: list[tuple[str, bool]] = []
        end = 0
        for match in self._pattern.finditer(text):
            pieces += [(text[end : match.start()], False), (match.group(), True)]
            end = match.end()
        pieces.append((text[end:], False))
        return [piece for piece in pieces if piece[0]]

    def partial_start(self, text: str) -> int:
        """Length of the longest start of `text` that could end a control token begun before it."""
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next((length for length in lengths if text[:length] in self._suffixes), 0)

    def partial_end(self, text: str) -> int:
        """Length of the longest end of `text` that could begin a control token."""
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._prefixes), 0)


class Quotes:
    """The quotes of one rendering: `quote` what the template is given, `unquote` what it returns."""

    def __init__(self, controls: ControlTokens) -> None:
        self._controls = controls
        self._nonce = str(secrets.randbelow(9 * 10 ** (_NUM_DIGITS - 1)) + 10 ** (_NUM_DIGITS - 1))
        self._pattern = re.compile(f"{self._nonce}([0-9]{{{_INDEX_DIGITS}}})")
        self._quoted: list[str] = []
        self._index: dict[str, int] = {}

    def quote(self, text: str, keep: Collection[str] = ()) -> str:
        """The text with the spellings of control tokens hidden, but for those in `keep`.

        The beginning or end of a spelling at the edge of the text is hidden as well, because the template, or
        the next message, might complete it.
        """
        pieces = self._controls.split(text)
        shown: list[str] = []
        for number, (piece, control) in enumerate(pieces):
            if control:
                shown.append(piece if piece in keep else self._stand_in(piece))
                continue
            start = self._controls.partial_start(piece) if number == 0 else 0
            body = piece[start:]
            end = len(body)
            if number == len(pieces) - 1:
                end -= self._controls.partial_end(body)
            shown += [self._stand_in(piece[:start]), body[:end], self._stand_in(body[end:])]
        return "".join(shown)

    def unquote(self, text: str) -> str:
        """The text with every quote replaced by what it stands for."""
        return self._pattern.sub(lambda match: self._quoted[int(match.group(1))], text)

    def _stand_in(self, text: str) -> str:
        if not text:
            return ""
        if text not in self._index:
            self._index[text] = len(self._quoted)
            self._quoted.append(text)
        return f"{self._nonce}{self._index[text]:0{_INDEX_DIGITS}d}"
