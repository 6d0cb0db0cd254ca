"""How one checkpoint talks: its chat template with tools described, the layout of its calls, and its thinking."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msds.errors import PromptError
from msds.text.chat import ChatTemplate
from msds.text.messages import check_messages
from msds.text.reasoning import Start, start_after
from msds.text.tokenizer import Tokenizer
from msds.text.tools import CallHistory, prepare_templates

_NONCE_DIGITS = 40


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
        """Token ids of a conversation.

        PromptError for what the template cannot take, and for what it would leave out in silence: messages, `prefix`
        and variables that it does not read.
        """
        if tools and self.layout is None:
            raise PromptError(
                "tools is a list of functions, but this model's chat template has no form for calls of them: leave "
                "tools out, or describe them in a message"
            )
        self._check_variables(template_kwargs or {}, with_tools=bool(tools))
        messages = check_messages(messages)
        options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "template_kwargs": template_kwargs,
        }
        ids = self._template.encode(self._history.fit(messages), **options)
        self._check_shown(messages, options)
        return ids

    def start_of_answer(self, prompt_ids: Sequence[int], *, with_tools: bool = False) -> Start:
        """Where a rendered prompt leaves the model: inside its thinking, behind it, or free to begin one."""
        source = self._template.source_for(with_tools=with_tools)
        return start_after(prompt_ids, self._tokenizer, self._template.sources[source])

    def _check_variables(self, template_kwargs: Mapping[str, Any], *, with_tools: bool) -> None:
        if not template_kwargs:
            return
        known = self._template.variables(with_tools=with_tools)
        for name in template_kwargs:
            if name not in known:
                reads = ", ".join(sorted(known)) or "no variables"
                raise PromptError(
                    f"chat_template_kwargs.{str(name)[:100]} is not read by this model's chat template, which reads "
                    f"{reads}: leave it out"
                )

    def _check_shown(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        """Render once more with a mark at the end of every content, and again without `prefix`, and see."""
        for number, message in enumerate(messages[:-1]):
            if message.get("prefix"):
                raise PromptError(
                    f"messages[{number}].prefix is true, but only the last message can be one to go on from"
                )
        nonce = "".join(secrets.choice("0123456789") for _ in range(_NONCE_DIGITS))
        marked = [
            {**message, "content": message["content"] + f"{nonce}{number:06d}"} if message["content"] else message
            for number, message in enumerate(messages)
        ]
        rendered = self._template.render(self._history.fit(marked), **options)
        shown = {int(number) for number in re.findall(f"{nonce}([0-9]{{6}})", rendered)}
        for number, message in enumerate(messages):
            if message["content"] and number not in shown:
                raise PromptError(
                    f"messages[{number}] would be lost: this model's chat template does not show a message of role "
                    f"{message['role']} there; leave it out, or say it in another message"
                )
        if messages[-1].get("prefix"):
            plain = [*marked[:-1], {**marked[-1], "prefix": None}]
            if self._template.render(self._history.fit(plain), **options) == rendered:
                raise PromptError(
                    f"messages[{len(messages) - 1}].prefix is true, which changes nothing in what this model's chat "
                    "template makes of them: leave it out, or use /v1/completions with the text so far"
                )
