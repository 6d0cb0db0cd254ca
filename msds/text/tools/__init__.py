"""Tool calls in the text of an answer: the layouts of the chat templates, read as they stream."""

from msds.text.tools.history import CallHistory
from msds.text.tools.layouts import LAYOUTS, Layout, find_layout
from msds.text.tools.parser import CallDelta, ToolCallParser, ToolsDelta
from msds.text.tools.prompts import mentions_tools, prepare_templates, with_tools

__all__ = [
    "LAYOUTS",
    "CallDelta",
    "CallHistory",
    "Layout",
    "ToolCallParser",
    "ToolsDelta",
    "find_layout",
    "mentions_tools",
    "prepare_templates",
    "with_tools",
]
