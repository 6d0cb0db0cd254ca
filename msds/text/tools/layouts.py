"""The layouts in which models write tool calls, as data, and which one a chat template teaches.

| layout | text of a call | templates |
|---|---|---|
| deepseek_v3 | `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, fenced JSON, `<｜tool▁call▁end｜>` | V3, R1 |
| deepseek_v31 | `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` | V3.1 |
| qwen | `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>` | Qwen2.5, Qwen3 |

DeepSeek's calls stand between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`; both may be missing, because some of
the templates leave the end out of the history that they show the model.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

MAX_NAME = 256
"""Characters of a function name at most; a longer one is no call."""


class Part:
    """A piece of a layout: `full` matches it whole; a text that `prefix` matches to its end may still become it."""

    def __init__(self, full: str, prefix: str) -> None:
        self.full = re.compile(full)
        self.prefix = re.compile(prefix)


def literal(text: str) -> Part:
    """Exactly this text."""
    prefix = ""
    for character in reversed(text):
        prefix = f"(?:{re.escape(character)}{prefix})?"
    return Part(re.escape(text), prefix + r"\Z")


# whitespace is bounded, so that a model that loops in it does not hold the stream for ever
SPACE = Part(r"[ \t\r\n]{0,64}", r"[ \t\r\n]{0,64}\Z")
KIND = Part(r"[A-Za-z_]{0,32}", r"[A-Za-z_]{0,32}\Z")
NAME = Part(rf"(?P<name>[^\s<>{{}}\"'`]{{1,{MAX_NAME}}})", r"\Z")
_CHARACTERS = r'(?:[^"\\\x00-\x1f]|\\.)'  # of a JSON string
JSON_NAME = Part(
    rf'"(?P<json_name>{_CHARACTERS}{{1,{MAX_NAME}}})"',
    rf'(?:"{_CHARACTERS}{{0,{MAX_NAME}}}\\?)?\Z',
)
# an object shows that it is one by its first key or its end; nothing of it is taken
OBJECT = Part(r'(?=\{[ \t\r\n]{0,64}["}])', r"(?:\{[ \t\r\n]{0,64})?\Z")


class Fit(Enum):
    """How a text fits a layout: `MORE` may make it fit, or it cannot."""

    MORE = "more"
    NO = "no"


@dataclass(frozen=True, slots=True)
class Head:
    """A match: where it ends in the text, and the name it holds."""

    end: int
    name: str = ""


def fit(parts: Sequence[Part], text: str, start: int = 0) -> Head | Fit:
    """Match the parts one after the other from `start`; never depends on text beyond what decides."""
    name = ""
    for part in parts:
        match = part.full.match(text, start)
        if match is None:
            return Fit.MORE if part.prefix.match(text, start) else Fit.NO
        start = match.end()
        groups = match.groupdict()
        if "name" in groups:
            name = groups["name"]
        elif "json_name" in groups:
            decoded = _decode_string(groups["json_name"])
            if decoded is None:
                return Fit.NO
            name = decoded
    return Head(start, name)


@dataclass(frozen=True)
class Layout:
    """How calls are written.

    begin, end: around each call. opening, closing: around all of them, "" where there are none. head: from after
    `begin` to the arguments. tail: from after the arguments through `end`. fence: what closes the arguments before
    `end`. whole: reads the text between `begin` and `end` where `head` does not fit, to (name, arguments) or None.
    call: a whole call, exactly as the templates write it, with NAME and ARGUMENTS in their places. between: what the
    templates write between two calls.
    """

    name: str
    begin: str
    end: str
    head: tuple[Part, ...]
    tail: tuple[Part, ...]
    call: str
    between: str
    opening: str = ""
    closing: str = ""
    fence: str = ""
    whole: Callable[[str], tuple[str, str] | None] | None = None

    @property
    def example(self) -> str:
        """What a model is told to write."""
        return f"{self.opening}{self.call}{self.closing}"


def _decode_string(raw: str) -> str | None:
    try:
        return str(json.loads(f'"{raw}"'))
    except ValueError:
        return None


def _read_object(text: str) -> tuple[str, str] | None:
    """(name, arguments) of a call whose keys come in another order, or whose arguments are a string of JSON."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            return (call["name"], arguments) if isinstance(json.loads(arguments), dict) else None
    except (ValueError, RecursionError):
        return None
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


DEEPSEEK_V3 = Layout(
    name="deepseek_v3",
    opening=CALLS_BEGIN,
    closing=CALLS_END,
    begin=CALL_BEGIN,
    end=CALL_END,
    head=(KIND, literal(SEPARATOR), SPACE, NAME, SPACE, literal("```json"), SPACE, OBJECT),
    tail=(SPACE, literal("```"), SPACE, literal(CALL_END)),
    fence="```",
    call=f"{CALL_BEGIN}function{SEPARATOR}NAME\n```json\nARGUMENTS\n```{CALL_END}",
    between="\n",
)

DEEPSEEK_V31 = Layout(
    name="deepseek_v31",
    opening=CALLS_BEGIN,
    closing=CALLS_END,
    begin=CALL_BEGIN,
    end=CALL_END,
    head=(SPACE, NAME, SPACE, literal(SEPARATOR), SPACE, OBJECT),
    tail=(SPACE, literal(CALL_END)),
    call=f"{CALL_BEGIN}NAME{SEPARATOR}ARGUMENTS{CALL_END}",
    between="",
)

QWEN = Layout(
    name="qwen",
    begin="<tool_call>",
    end="</tool_call>",
    head=(
        *(SPACE, literal("{"), SPACE, literal('"name"'), SPACE, literal(":"), SPACE, JSON_NAME),
        *(SPACE, literal(","), SPACE, literal('"arguments"'), SPACE, literal(":"), SPACE, OBJECT),
    ),
    tail=(SPACE, literal("}"), SPACE, literal("</tool_call>")),
    whole=_read_object,
    call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    between="\n",
)

LAYOUTS = {layout.name: layout for layout in (DEEPSEEK_V3, DEEPSEEK_V31, QWEN)}


def find_layout(template: str) -> Layout | None:
    """The layout that a chat template writes calls in, or None: then the model cannot be offered tools.

    What decides is the template, never the model's name: R1-Distill-Qwen is a Qwen model with DeepSeek's template and
    writes DeepSeek's calls. The two layouts of DeepSeek differ by the fence around the arguments.
    """
    if CALL_BEGIN in template and SEPARATOR in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    other_marks = ("<function=", "<arg_key>")  # Qwen3-Coder and GLM: XML between the same markers
    if QWEN.begin in template and '"arguments"' in template.replace("\\", ""):
        return None if any(mark in template for mark in other_marks) else QWEN
    return None
