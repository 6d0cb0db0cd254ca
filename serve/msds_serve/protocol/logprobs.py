"""Log-probabilities in OpenAI's two shapes: the chat's list of entries, and the four lists of completions.

Values are those of the model's own distribution, before temperature, penalties and masks (`TokenLogprobs`). JSON has
no infinity, so what is impossible is -9999. A token that is not a character by itself is written with its bytes
escaped, as OpenAI does, so that different tokens stay different; `bytes` has them exactly.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msds.engine.sampler import TokenLogprobs


FLOOR = -9999.0
"""Stands for minus infinity, and for a value that is not a number."""

TokenBytes = Callable[[int], bytes]
"""The bytes of a token, `Tokenizer.token_bytes`."""


def finite(logprob: float) -> float:
    """The log-probability as JSON can carry it: at least FLOOR, at most 0."""
    return min(float(logprob), 0.0) if logprob > FLOOR else FLOOR


def token_text(token_id: int, raw: bytes, prefix: str = "") -> str:
    """How a token is written; `prefix` marks escaped bytes. An id without a token is written by its number."""
    if not raw:
        return f"token_id:{token_id}"
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_entry(entry: TokenLogprobs, token_bytes: TokenBytes, top: int) -> dict[str, Any]:
    """One element of `logprobs.content`, with `top` alternatives."""
    alternatives = [_chat_token(id_, logprob, token_bytes) for id_, logprob in entry.top[:top]]
    return _chat_token(entry.token_id, entry.logprob, token_bytes) | {"top_logprobs": alternatives}


def prompt_entries(entries: Sequence[TokenLogprobs | None], token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's shape: per token null or {id: {logprob, rank, decoded_token}}, the chosen first."""
    return [None if entry is None else _prompt_entry(entry, token_bytes) for entry in entries]


class LegacyLogprobs:
    """Builds `logprobs` of one completions choice, piece by piece.

    top: alternatives per token. hidden: ids that add nothing to the text, which are special tokens; text_offset
    counts the characters of the text before each token, echoed prompt included.
    """

    def __init__(self, token_bytes: TokenBytes, top: int, hidden: Collection[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._top = top
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def push(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The object for these tokens; an entry is None for a prompt's first token."""
        if len(token_ids) != len(entries):
            raise ValueError(f"{len(token_ids)} tokens have {len(entries)} entries of log-probabilities")
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id not in self._hidden:
                self._offset += len(self._decoder.decode(self._token_bytes(token_id)))
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens by text, and the chosen one; of two that read the same, the likelier."""
        shown: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._top], (entry.token_id, entry.logprob)):
            shown.setdefault(self._text(token_id), finite(logprob))
        return shown

    def _text(self, token_id: int) -> str:
        return token_text(token_id, self._token_bytes(token_id), prefix="bytes:")


def _chat_token(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes(token_id)
    return {"token": token_text(token_id, raw), "logprob": finite(logprob), "bytes": list(raw)}


def _prompt_entry(entry: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, Any]:
    ranked = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        ranked.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": token_text(token_id, token_bytes(token_id)),
        }
        for token_id, (logprob, rank) in ranked.items()
    }
