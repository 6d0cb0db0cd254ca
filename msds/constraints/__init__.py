"""What the text of an answer must be: JSON, a schema, a grammar, a regular expression, a choice, or tool calls.

A form says what is wanted and is plain data (`SamplingParams.constraint`). A `GrammarCompiler` turns it into a grammar
over the tokens of one tokenizer, and a `ConstraintState` follows one answer token by token. llguidance is imported when
the first form is compiled. docs: `forms` for what each form promises, `state` for when a constraint is in force.
"""

from msds.constraints.forms import AnyText, Choice, Constraint, Grammar, JsonObject, JsonSchema, Regex
from msds.constraints.tool_calls import Function, ToolCalls

__all__ = [
    "AnyText",
    "Choice",
    "Constraint",
    "Function",
    "Grammar",
    "JsonObject",
    "JsonSchema",
    "Regex",
    "ToolCalls",
]
