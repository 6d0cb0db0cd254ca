"""Telling the model which tools there are, where its chat template forgets to.

DeepSeek's templates of V3, R1 and V3.1 write calls and their results but never look at `tools`: a request's tools
would vanish in silence. `with_tools` puts a description in front, as a template of its own, so that the markers in
the format are control tokens while all that comes from the request stays text. The wording is the one that DeepSeek
publishes with V3.1 for this purpose; the layout in it is the template's own.
"""

import re
from collections.abc import Mapping

from msds.text.tools.layouts import Layout, find_layout

_EXPRESSION = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_TOOLS = re.compile(r"(?<![\w'\"])tools\b")

_PRELUDE = """\
{%- if tools %}
{%- set msds = namespace(text='## Tools\\nYou have access to the following tools:\\n') %}
{%- for tool in tools %}
{%- set function = tool.function if tool.function is defined else tool %}
{%- set msds.text = msds.text + '\\n### ' + function.name + '\\nDescription: ' + (function.description or '') %}
{%- set msds.text = msds.text + '\\n\\nParameters: ' + ((function.parameters or {}) | tojson) + '\\n' %}
{%- endfor %}
{%- set msds.text = msds.text + FORMAT %}
{%- if messages[0].role == 'system' %}
{%- set msds_system = messages[0].content + '\\n\\n' + msds.text %}
{%- set messages = [{'role': 'system', 'content': msds_system}] + messages[1:] %}
{%- else %}
{%- set messages = [{'role': 'system', 'content': msds.text}] + messages %}
{%- endif %}
{%- endif %}"""

_FORMAT = """
IMPORTANT: ALWAYS adhere to this exact format for tool use:
{example}

Where:
- `NAME` must be an exact match to one of the available tools
- `ARGUMENTS` must be valid JSON that strictly follows the tool's Parameters Schema
- {chain}
"""


def mentions_tools(template: str) -> bool:
    """Whether a chat template looks at the variable `tools` at all."""
    return any(_TOOLS.search(expression) for expression in _EXPRESSION.findall(template))


def with_tools(template: str, layout: Layout) -> str:
    """The template with the tools of a request described in its system prompt; one that does so itself is unchanged.

    Use it as the source "tool_use" of a `ChatTemplate`, which takes it for requests with tools.
    """
    if mentions_tools(template):
        return template
    chain = "For multiple tool calls, write one such block per call"
    if layout.opening:
        chain = f"For multiple tool calls, chain the parts from {layout.begin} through {layout.end} without separators"
    text = _FORMAT.format(example=layout.example, chain=chain)
    quoted = "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
    return _PRELUDE.replace("FORMAT", quoted, 1) + template


def prepare_templates(sources: Mapping[str, str]) -> tuple[dict[str, str], Layout | None]:
    """A checkpoint's templates by name, completed so that tools reach the prompt, and the layout of its calls.

    A layout of None means that the model cannot be offered tools; the templates are then as they were.
    """
    shown = sources.get("tool_use", sources["default"])
    layout = find_layout(shown)
    if layout is None or mentions_tools(shown):
        return dict(sources), layout
    return {**sources, "tool_use": with_tools(shown, layout)}, layout
