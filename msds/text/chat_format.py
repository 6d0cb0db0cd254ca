"""How one checkpoint talks: its chat template with tools described, the layout of its calls, and its thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msds.errors import PromptError
from msds.text.chat import ChatTemplate
from msds.text.reasoning import Start, start_after
from msds.text.tokenizer import Tokenizer
from msds.text.tools import CallHistory, prepare_templates


class ChatFormat:
    """A chat template, ready for conversations with tools. layout: of its tool calls, None without any."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        sources, self.layout = prepare_templates(template.sources)
        self._tokenizer = tokenizer
        self._template = ChatTemplate(sources, tokenizer)
        self._history = CallHistory(lambda messages: self._template.render(messages, add_generation_prompt=False))

    @classmethod
    def open(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatFormat:
        """The format of a checkpoint folder; TokenizerError where it has no chat template."""
        return cls(ChatTemplate.open(folder, tokenizer), tokenizer)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. PromptError for messages or tools that the template cannot show."""
        if tools and self.layout is None:
            raise PromptError("tools are given, but this model's chat template has no form for tool calls")
        return self._template.encode(
            self._history.fit(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )

    def start_of_answer(self, prompt_ids: Sequence[int], *, with_tools: bool = False) -> Start:
        """Where a rendered prompt leaves the model: inside its thinking, behind it, or free to begin one."""
        sources = self._template.sources
        source = sources["tool_use"] if with_tools and "tool_use" in sources else sources["default"]
        return start_after(prompt_ids, self._tokenizer, source)
