"""What an answer says, collected from its chunks or read from one body: the client's side of the protocol.

Reads what any OpenAI-compatible server sends, so it takes what it knows and ignores the rest. Ids and times are left
out: two answers that say the same are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Collected:
    """The choices of one answer as they grow.

    usage: the server's token counts, or None. error: the message of an error object, or None. num_pieces: chunks so
    far that brought something of an answer; about one per token where a server does not count.
    """

    def __init__(self) -> None:
        self.usage: Mapping[str, Any] | None = None
        self.error: str | None = None
        self.num_pieces = 0
        self._choices: dict[int, dict[str, Any]] = {}

    def add_chunk(self, chunk: Mapping[str, Any]) -> bool:
        """Take one event of a stream; whether it brought something of an answer (text, thoughts, a call)."""
        if chunk.get("error") is not None:
            self.error = _message(chunk["error"])
            return False
        if chunk.get("usage") is not None:
            self.usage = chunk["usage"]
        before = self.num_pieces
        for choice in chunk.get("choices") or ():
            self._add(choice, choice.get("delta"))
        return self.num_pieces > before

    def add_body(self, body: Mapping[str, Any]) -> None:
        """Take a whole answer, or an error object."""
        self.add_chunk({**body, "choices": ()})
        for choice in body.get("choices") or ():
            self._add(choice, choice.get("message"))

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Per choice, by index: `index`, `finish_reason` (None while open), and those of `text` (completions),
        `content`, `reasoning` and `tool_calls` (lists of [name, arguments]) that are not empty."""
        return [self._choices[index] for index in sorted(self._choices)]

    @property
    def is_finished(self) -> bool:
        """Whether there are choices and each has its finish reason."""
        return bool(self._choices) and all(choice["finish_reason"] for choice in self._choices.values())

    def _add(self, choice: Mapping[str, Any], message: Mapping[str, Any] | None) -> None:
        index = choice.get("index") or 0
        known = self._choices.setdefault(index, {"index": index, "finish_reason": None})
        known["finish_reason"] = choice.get("finish_reason") or known["finish_reason"]
        parts = {"text": choice.get("text")}
        if message is not None:
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            parts |= {"content": message.get("content"), "reasoning": reasoning}
        for name, piece in parts.items():
            if piece:
                known[name] = known.get(name, "") + piece
        calls = (message or {}).get("tool_calls") or ()
        for position, call in enumerate(calls):
            _add_call(known.setdefault("tool_calls", []), call, position)
        self.num_pieces += any(parts.values()) or bool(calls)


def _add_call(known: list[list[str]], call: Mapping[str, Any], position: int) -> None:
    """A call, or a piece of one that its index names."""
    index = call.get("index", position)
    while len(known) <= index:
        known.append(["", ""])
    function = call.get("function") or {}
    known[index][0] += function.get("name") or ""
    known[index][1] += function.get("arguments") or ""


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, Mapping) else error)
