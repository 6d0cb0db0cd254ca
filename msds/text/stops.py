"""Stop strings in streamed text: found across tokens, and never sent in part."""

from collections.abc import Sequence

from msds.errors import SamplingError


class StopMatcher:
    """Watches the text of one sequence for stop strings.

    The match that is complete first ends the text; of several that are complete at the same character, the
    longest. That is the earliest decision which can be made without looking ahead, and it does not depend on
    how the text is split into deltas. Text that may be the beginning of a stop string is held back.

    `stopped`: the stop string that was found, or None. `held`: the text held back, at most one character
    less than the longest stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise SamplingError("stop holds an empty string, which would end every text at once")
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._include_stop = include_stop
        self.stopped: str | None = None
        self.held = ""

    def push(self, delta: str, *, armed: bool = True) -> str:
        """The text that may be sent now that `delta` has arrived; nothing after a stop was found.

        Not `armed` (before `min_tokens`): a stop string that becomes complete within `delta` is text.
        """
        if self.stopped is not None:
            return ""
        if not self._stops:
            return delta
        text = self.held + delta
        for number, character in enumerate(delta, start=len(self.held) + 1):
            found = self._advance(character)
            if found and armed:
                self.stopped, self.held = found, ""
                return text[:number] if self._include_stop else text[: number - len(found)]
        safe = len(text) - max(self._matched)  # nothing before can belong to a stop string any more
        self.held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text still held back, once no more will come."""
        rest, self.held = self.held, ""
        return rest

    def _advance(self, character: str) -> str | None:
        """Take one character; the longest stop string that it completes."""
        found: str | None = None
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._fallbacks[index][matched]
            matched += stop[matched] == character
            if matched == len(stop):
                found = max(found or "", stop, key=len)
                matched = self._fallbacks[index][matched]
            self._matched[index] = matched
        return found


def _fallbacks(stop: str) -> list[int]:
    """Knuth, Morris and Pratt's table: [n] = length of the longest proper start that also ends stop[:n]."""
    table = [0, 0]
    for character in stop[1:]:
        matched = table[-1]
        while matched and stop[matched] != character:
            matched = table[matched]
        table.append(matched + (stop[matched] == character))
    return table
