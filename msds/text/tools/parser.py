"""Tool calls out of the text of an answer, as it streams, in OpenAI's deltas.

When a block is a call. Its header must fit the layout and its arguments must begin as a JSON object (`{` and then a
key or `}`); until both are seen nothing of it is sent. A block that does not fit is content, markers and all. From
there on the arguments are sent as they come, and what is sent cannot be taken back, so:

- the object ends where JSON says so: braces, fences and markers inside its strings are data;
- arguments that stop being JSON later arrive as the model wrote them, up to the end marker. OpenAI's API does the
  same, and warns that arguments may not be valid JSON;
- a call that the text ends in (max_tokens) has its arguments as far as they came, and `is_open` is true.

A header that the text ends in is content; half a marker directly after a call is dropped. Whitespace directly before
and after calls is dropped, other text before, between and after them is content. However the text is cut into pieces,
the joined result is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msds.text.reasoning import partial_end
from msds.text.tools.json_scan import JsonScanner, Scan
from msds.text.tools.layouts import SPACE, Fit, Layout, fit, literal

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one call: `id` and `name` come once, with the first piece; the joined `arguments` are JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolsDelta:
    """What a piece of text adds to the content and to the calls."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ToolCallParser:
    """Reads the content of one answer (what follows the reasoning).

    call_id: id of the call with this index. max_calls: after so many closed calls the answer is over (`is_done`) and
    further text is dropped; the caller ends the generation.
    """

    def __init__(self, layout: Layout, call_id: Callable[[int], str], *, max_calls: int | None = None) -> None:
        self._layout = layout
        self._call_id = call_id
        self._max_calls = max_calls
        self._markers = tuple(filter(None, (layout.opening, layout.begin)))
        self._first = (literal(layout.opening), SPACE, literal(layout.begin), *layout.head)
        self._next = (literal(layout.begin), *layout.head)
        self._state = self._text
        self._buffer = ""
        self._searched = 0  # the part of the buffer in which a block without its end was already looked for
        self._scanner = JsonScanner()
        self._after_call = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self.num_calls = 0

    @property
    def is_open(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        return self._state in (self._arguments, self._broken)

    @property
    def is_done(self) -> bool:
        """Whether max_calls calls are closed."""
        return self._state == self._done

    def push(self, text: str) -> ToolsDelta:
        """What this piece adds."""
        self._buffer += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> ToolsDelta:
        """What was held back; no text may follow."""
        rest = self._buffer.lstrip(_SPACE)
        if self._after_call and partial_end(rest, (*self._markers, *self._closing())) == len(rest):
            self._buffer = ""
        while self._buffer and self._state == self._text:
            # a header or a marker that was cut is content; what stands behind it may still be a call
            space = len(self._buffer) - len(self._buffer.lstrip(_SPACE))
            cut = space + (self._marker_at(space) or 1)
            self._send_content(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            while self._state():
                pass
        if self._state == self._broken:
            self._send_arguments(self._buffer)
        self._buffer = ""
        return self._take()

    def _take(self) -> ToolsDelta:
        delta = ToolsDelta("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return delta

    # each state takes what it can from the buffer; true: something changed, ask again

    def _text(self) -> bool:
        found = self._find_marker()
        if found is None:
            sure = len(self._buffer) - partial_end(self._buffer, (*self._markers, *self._closing()))
            self._send_before(sure)
            return False
        self._send_before(found)
        start = len(self._buffer) - len(self._buffer.lstrip(_SPACE))
        closing = self._layout.closing
        if self._closing() and self._buffer.startswith(closing, start):
            self._buffer = self._buffer[start + len(closing) :]
            return True
        return self._try_call(start)

    def _try_call(self, start: int) -> bool:
        """A call at `start`, which is a marker; only whitespace is before it."""
        opened = bool(self._layout.opening) and self._buffer.startswith(self._layout.opening, start)
        head = fit(self._first if opened else self._next, self._buffer, start)
        if head is Fit.MORE:
            return False
        if not isinstance(head, Fit):
            self._begin_call(head.name)
            self._buffer = self._buffer[head.end :]
            self._scanner = JsonScanner()
            self._state = self._arguments
            return True
        if self._layout.whole is not None:
            done = self._try_whole(start)
            if done is not None:
                return done
        end = start + (self._marker_at(start) or 0)
        self._send_content(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return True

    def _try_whole(self, start: int) -> bool | None:
        """The block read at once; None where it is no call, false where its end is missing."""
        assert self._layout.whole is not None
        begin, end = start + len(self._layout.begin), self._layout.end
        found = self._buffer.find(end, max(begin, self._searched - len(end)))
        if found < 0:
            self._searched = len(self._buffer)
            return False
        self._searched = 0
        call = self._layout.whole(self._buffer[begin:found])
        if call is None:
            return None
        self._begin_call(call[0])
        self._send_arguments(call[1])
        self._buffer = self._buffer[found + len(end) :]
        self._end_call()
        return True

    def _arguments(self) -> bool:
        taken, scan = self._scanner.feed(self._buffer)
        self._send_arguments(self._buffer[:taken])
        self._buffer = self._buffer[taken:]
        if scan is Scan.MORE:
            return False
        self._state = self._tail if scan is Scan.DONE else self._broken
        return True

    def _tail(self) -> bool:
        end = fit(self._layout.tail, self._buffer)
        if end is Fit.MORE:
            return False
        if not isinstance(end, Fit):
            self._buffer = self._buffer[end.end :]
        self._end_call()  # the call is whole; what stands instead of its end is content
        return True

    def _broken(self) -> bool:
        """Arguments that are no JSON: all of it up to the end marker, but for the fence."""
        found = self._buffer.find(self._layout.end)
        cut = found if found >= 0 else len(self._buffer) - partial_end(self._buffer, (self._layout.end,))
        shown = self._buffer[:cut].rstrip(_SPACE)
        if self._layout.fence:
            ticks = len(shown) - len(shown.rstrip(self._layout.fence[0]))
            if found < 0 or shown.endswith(self._layout.fence):
                shown = shown[: len(shown) - min(ticks, len(self._layout.fence))].rstrip(_SPACE)
        self._send_arguments(shown)
        if found < 0:
            self._buffer = self._buffer[len(shown) :]
            return False
        self._buffer = self._buffer[found + len(self._layout.end) :]
        self._end_call()
        return True

    def _done(self) -> bool:
        self._buffer = ""
        return False

    def _closing(self) -> tuple[str, ...]:
        return (self._layout.closing,) if self._layout.closing and self.num_calls else ()

    def _find_marker(self) -> int | None:
        starts = (self._buffer.find(marker) for marker in (*self._markers, *self._closing()))
        return min((start for start in starts if start >= 0), default=None)

    def _marker_at(self, start: int) -> int | None:
        """Length of the marker at `start`, or None."""
        return next((len(m) for m in self._markers if self._buffer.startswith(m, start)), None)

    def _send_before(self, end: int) -> None:
        """Send the content before `end`, but keep the whitespace directly before it, which a call would drop."""
        shown = self._buffer[:end].rstrip(_SPACE)
        if shown:
            self._send_content(shown)
            self._buffer = self._buffer[len(shown) :]

    def _send_content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip(_SPACE)
        if text:
            self._after_call = False
            self._content.append(text)

    def _begin_call(self, name: str) -> None:
        self._calls.append(CallDelta(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1

    def _send_arguments(self, text: str) -> None:
        if text:
            self._calls.append(CallDelta(self.num_calls - 1, arguments=text))

    def _end_call(self) -> None:
        self._after_call = True
        full = self._max_calls is not None and self.num_calls >= self._max_calls
        self._state = self._done if full else self._text
