"""Chat templates: from messages to the exact prompt that the model was trained on.

A template is a Jinja program out of the checkpoint, so it runs in Jinja's sandbox, with the conventions
that checkpoints were written against (those of transformers): `trim_blocks`, `lstrip_blocks`, `break` and
`continue`, `tojson` without HTML escaping, `raise_exception`, `strftime_now`, the named tokens, `messages`,
`tools`, `documents`, `add_generation_prompt`.

What the template writes becomes control tokens; the same spelling inside a message, a tool or a keyword
does not (`controls.Quotes`). One thing is let through: `<think>` and `</think>` in the content of the
assistant, because templates cut earlier reasoning there and the model itself wrote them. BOS is what the
template writes; nothing is added to it.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msds.errors import PromptError, TokenizerError
from msds.text.controls import Quotes
from msds.text.messages import THINK_MARKERS, ToolArguments, check_messages, quote_strings
from msds.text.tokenizer import Tokenizer, read_json, read_tokenizer_config

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment


GIVEN = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
"""Variables that every template gets, and no request can set."""


class ChatTemplate:
    """The chat template of a checkpoint, compiled once."""

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer) -> None:
        """`sources`: template text by name; "default" is needed, "tool_use" serves requests with tools."""
        if "default" not in sources:
            raise TokenizerError(f"chat templates are named {sorted(sources)}; one must be named default")
        self.sources = dict(sources)
        self._tokenizer = tokenizer
        self._environment = _environment()
        self._variables: dict[str, frozenset[str]] = {}
        self._templates = {name: _compile(self._environment, name, text) for name, text in sources.items()}

    @classmethod
    def open(cls, folder: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template of a checkpoint folder: chat_template.jinja, or else tokenizer_config.json."""
        folder = Path(folder)
        sources = _find_sources(folder)
        if not sources:
            raise TokenizerError(
                f"no chat template in {folder}: neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json; use a raw prompt, or put the model's template there"
            )
        return cls(sources, tokenizer)

    def source_for(self, *, with_tools: bool) -> str:
        """Name of the source that serves requests with or without tools."""
        return "tool_use" if with_tools and "tool_use" in self.sources else "default"

    def variables(self, *, with_tools: bool) -> frozenset[str]:
        """The variables that the template takes from a request's `template_kwargs`."""
        from jinja2 import meta

        name = self.source_for(with_tools=with_tools)
        if name not in self._variables:  # parsing takes as long as rendering many prompts
            read = meta.find_undeclared_variables(self._environment.parse(self.sources[name]))
            given = {*self._environment.globals, *self._tokenizer.named_tokens, *GIVEN}
            self._variables[name] = frozenset(read) - given
        return self._variables[name]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, to be read: only `encode` still knows which spellings are control tokens."""
        quotes = Quotes(self._tokenizer.controls)
        return quotes.unquote(self._render(quotes, messages, tools, add_generation_prompt, template_kwargs))

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt as token ids, ready for the model. PromptError: messages the template cannot take."""
        quotes = Quotes(self._tokenizer.controls)
        rendered = self._render(quotes, messages, tools, add_generation_prompt, template_kwargs)
        return self._tokenizer.encode_quoted(rendered, quotes)

    def _render(
        self,
        quotes: Quotes,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        name = self.source_for(with_tools=bool(tools))
        try:
            shown = [self._quote_message(message, quotes, name) for message in check_messages(messages)]
            variables = {
                **self._tokenizer.named_tokens,
                "documents": None,
                **quote_strings(dict(template_kwargs or {}), quotes.quote),
                "messages": shown,
                "tools": quote_strings(list(tools), quotes.quote) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
            return self._templates[name].render(variables)
        except PromptError:
            raise
        except RecursionError:
            raise PromptError("messages or tools are nested too deeply") from None
        except Exception as error:  # the template is the checkpoint's program: anything may come out of it
            raise PromptError(f"the chat template cannot render these messages: {error}") from None

    def _quote_message(self, message: dict[str, Any], quotes: Quotes, template: str) -> dict[str, Any]:
        role = message["role"]
        # OpenAI's newer name for system; a template that never heard of it would drop the message in silence
        if role == "developer" and "developer" not in self.sources[template]:
            role = "system"
        keep = THINK_MARKERS if role == "assistant" else ()
        quoted: dict[str, Any] = {}
        for key, value in message.items():
            own_words = key in ("content", "reasoning_content", "reasoning")
            quoted[key] = quote_strings(value, partial(quotes.quote, keep=keep if own_words else ()))
        return quoted | {"role": role}


def _find_sources(folder: Path) -> dict[str, str]:
    sources: dict[str, str] = {}
    template = read_tokenizer_config(folder).get("chat_template")
    if template is None and (folder / "chat_template.json").is_file():
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, str):
        sources["default"] = template
    elif isinstance(template, list):
        sources.update(_named_template(entry) for entry in template)
    elif template is not None:
        raise TokenizerError(
            f"tokenizer_config.json: chat_template is a {type(template).__name__}, not a string or a list"
        )
    files = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for path in files:
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def _named_template(entry: object) -> tuple[str, str]:
    if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
        return str(entry.get("name")), entry["template"]
    raise TokenizerError("tokenizer_config.json: each chat_template of the list needs a name and a template")


def _environment() -> "ImmutableSandboxedEnvironment":
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` to `{% endgeneration %}` marks words to train on: no effect here."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _compile(environment: "ImmutableSandboxedEnvironment", name: str, source: str) -> "Template":
    from jinja2 import TemplateError

    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise TokenizerError(f"the chat template {name!r} is not valid Jinja: {error}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` of chat templates: plain JSON, where Jinja's own escapes it for HTML."""
    return json.dumps(
        _with_objects(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _with_objects(value: Any) -> Any:
    """The value with tool arguments as objects."""
    if isinstance(value, ToolArguments):
        return value.value
    if isinstance(value, Mapping):
        return {key: _with_objects(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_objects(inner) for inner in value]
    return value


def _raise_exception(message: str) -> NoReturn:
    raise PromptError(f"the chat template refuses these messages: {message}")
