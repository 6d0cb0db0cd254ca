"""Earlier tool calls and their results, put into the form in which a chat template shows them.

Templates disagree about the content beside a call. That of V3 and of the R1 distills shows calls only where it is null,
and else drops them in silence; that of R1-0528 fails where it is null; clients send null, "" and text as it comes. So a
template is tried once, with a conversation of each form, and messages are then written in a form that it shows.

Most templates tell the model which result belongs to which call by their order alone, while clients may send results as
they come, each with the id of its call. So results are put into the order of the calls.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msds.errors import PromptError

Render = Callable[[Sequence[Mapping[str, Any]]], str]

_TEXT, _NAME, _ARGUMENT = "probe-of-content", "probe_of_a_name", "probe-of-an-argument"
_CALL = {"id": "probe", "type": "function", "function": {"name": _NAME, "arguments": f'{{"a": "{_ARGUMENT}"}}'}}
_FORMS: tuple[str | None, ...] = (None, "", _TEXT)


class CallHistory:
    """How one template takes assistant messages with calls. `render`: from messages to the prompt's text."""

    def __init__(self, render: Render) -> None:
        self._shown = {content: _is_shown(render, content) for content in _FORMS}

    @property
    def is_supported(self) -> bool:
        """Whether calls can be shown at all."""
        return any(self._shown.values())

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with each call in a form that the template shows, and results in the order of their calls.

        A text that the template would not show beside its calls becomes a message of its own before them. PromptError:
        the template cannot show calls, or results and calls do not belong together.
        """
        fitted: list[Mapping[str, Any]] = []
        for number, message in enumerate(order_results(messages)):
            fitted += self._forms(message, number) if _calls(message) else [message]
        return fitted

    def _forms(self, message: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
        content = message.get("content")
        if self._shown[content if content in (None, "") else _TEXT]:
            return [message]
        bare = next((form for form in (None, "") if self._shown[form]), _TEXT)
        if bare == _TEXT:
            raise PromptError(f"messages[{number}].tool_calls: this model's chat template cannot show tool calls")
        before = [{"role": "assistant", "content": content}] if content else []
        return [*before, {**message, "content": bare}]


def order_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the results of each message's calls in the order of the calls.

    Results without ids are taken to be in order. PromptError: a result of no call, two of one, or a call without one
    where others have theirs.
    """
    ordered: list[Mapping[str, Any]] = []
    while (start := len(ordered)) < len(messages):
        ordered.append(messages[start])
        calls = _calls(messages[start])
        if not calls and _is_result(messages[start]):
            raise PromptError(
                f"messages[{start}] has role tool, but no assistant message with tool_calls stands before it"
            )
        end = start + 1
        while calls and end < len(messages) and _is_result(messages[end]):
            end += 1
        ordered += [messages[place] for place in _in_order(messages, calls, start, end)]
    return ordered


def _in_order(messages: Sequence[Mapping[str, Any]], calls: Sequence[Any], start: int, end: int) -> list[int]:
    """Places of the results of the calls of messages[start], which are those up to `end`, in the order of the calls."""
    places = list(range(start + 1, end))
    if not places:
        return []
    if all(messages[place].get("tool_call_id") is None for place in places):
        if len(places) != len(calls):
            raise PromptError(
                f"messages[{start}].tool_calls are {len(calls)}, and {len(places)} tool messages without tool_call_id "
                "follow: give each call one"
            )
        return places
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
    found: dict[Any, int] = {}
    for place in places:
        id_ = messages[place].get("tool_call_id")
        if id_ is None or ids.count(id_) != 1 or id_ in found:
            known = ", ".join(repr(one) for one in ids)
            raise PromptError(f"messages[{place}].tool_call_id is {id_!r}; each of {known} is to be there once")
        found[id_] = place
    if missing := [id_ for id_ in ids if id_ not in found]:
        raise PromptError(f"messages[{start}].tool_calls: {missing[0]!r} has no tool message with its tool_call_id")
    return [found[id_] for id_ in ids]


def _calls(message: object) -> Sequence[Any]:
    """The calls of an assistant message; what is no message is for `check_messages` to refuse."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) and message.get("role") == "assistant" else None
    return calls if isinstance(calls, list | tuple) else ()


def _is_result(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "tool"


def _is_shown(render: Render, content: str | None) -> bool:
    call = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
    try:
        text = render([{"role": "user", "content": "."}, call])
    except PromptError:
        return False
    return _NAME in text and _ARGUMENT in text and (content or "") in text
