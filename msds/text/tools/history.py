"""Earlier tool calls, put into the form in which a chat template shows them.

Templates disagree about the content beside a call. That of V3 and of the R1 distills shows calls only where it is null,
and else drops them in silence; that of R1-0528 fails where it is null; clients send null, "" and text as it comes. So a
template is tried once, with a conversation of each form, and messages are then written in a form that it shows.
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
        """The messages with each call in a form that the template shows; nothing is lost.

        A text that the template would not show beside its calls becomes a message of its own before them. PromptError:
        the template cannot show calls.
        """
        fitted: list[Mapping[str, Any]] = []
        for number, message in enumerate(messages):
            calls = isinstance(message, Mapping) and message.get("role") == "assistant" and message.get("tool_calls")
            fitted += self._forms(message, number) if calls else [message]
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


def _is_shown(render: Render, content: str | None) -> bool:
    call = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
    try:
        text = render([{"role": "user", "content": "."}, call])
    except PromptError:
        return False
    return _NAME in text and _ARGUMENT in text and (content or "") in text
