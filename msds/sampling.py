"""How the tokens of one request are chosen: parameters as data, checked when they are made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from msds.constraints import Constraint
from msds.errors import SamplingError

if TYPE_CHECKING:
    from msds.config import GenerationConfig

# generation_config.json's defaults that a request may leave to the file
_FILE_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with the names and meanings of OpenAI's API and vLLM's additions to it.

    The order in which they act: repetition, presence and frequency penalty, logit bias, constraint, min_tokens,
    temperature, top_k, top_p, min_p; the last four always leave one token. SamplingError names the field, its
    value and what is legal; NaN, infinities, and booleans or fractions for whole numbers are refused.
    """

    n: int = 1
    """Answers per prompt, drawn independently: choice i of seed s is the same whatever n is."""
    temperature: float = 1.0
    """>= 0. 0 takes the most likely token, the lowest id among equals, and ignores top_k, top_p and min_p."""
    top_k: int = 0
    """Keep the k most likely tokens, of equals the lowest ids; 0 or -1 keeps all."""
    top_p: float = 1.0
    """In [0, 1]. Keep the fewest most likely tokens that together have this probability; 1 keeps all."""
    min_p: float = 0.0
    """In [0, 1]. Keep tokens at least this many times as likely as the best one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """In [0.01, 100]. Divides positive and multiplies negative logits of tokens in prompt and output; 1 is off."""
    presence_penalty: float = 0.0
    """In [-2, 2]. Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """In [-2, 2]. Subtracted from the logits of tokens in the output, once per occurrence."""
    seed: int | None = None
    """Taken modulo 2^64; None draws one per request. Same seed, prompt and parameters, same tokens."""
    max_tokens: int | None = None
    """>= 1. Tokens to generate at most; None is the rest of the context."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is chosen, and no stop string ends the text, before so many tokens. A constraint
    that leaves nothing else to choose goes first."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; given as one string or a list."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, beside those of the checkpoint."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the text."""
    ignore_eos: bool = False
    """Go on after the checkpoint's end-of-sequence tokens; stop_token_ids still end the text."""
    logprobs: int | None = None
    """None: no log-probabilities. 0: of the chosen token. N > 0: also of the N most likely ones."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from the second on."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token id -> number in [-100, 100] that is added to its logit."""
    skip_special_tokens: bool = True
    """Leave the special tokens out of the text."""
    constraint: Constraint | None = None
    """What the text must be, such as JsonSchema({...}) of msds.constraints; after thinking, where there is any. The
    text ends ("stop") as soon as it can only end. One that runs out of tokens is cut ("length"), and one that a stop
    string or one of stop_token_ids ends is what was there before it."""

    def __post_init__(self) -> None:
        put = _Fields(self)
        put.integer("n", minimum=1)
        put.number("temperature", minimum=0.0)
        put.integer("top_k", minimum=-1)
        put.number("top_p", minimum=0.0, maximum=1.0)
        put.number("min_p", minimum=0.0, maximum=1.0)
        put.number("repetition_penalty", minimum=0.01, maximum=100.0)
        put.number("presence_penalty", minimum=-2.0, maximum=2.0)
        put.number("frequency_penalty", minimum=-2.0, maximum=2.0)
        put.integer("seed", optional=True)
        put.integer("max_tokens", minimum=1, optional=True)
        put.integer("min_tokens", minimum=0)
        put.strings("stop")
        put.token_ids("stop_token_ids")
        put.flag("include_stop_str_in_output")
        put.flag("ignore_eos")
        put.integer("logprobs", minimum=0, optional=True)
        put.integer("prompt_logprobs", minimum=0, optional=True)
        put.bias("logit_bias")
        put.flag("skip_special_tokens")
        put.constraint("constraint")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")

    @classmethod
    def from_generation_config(cls, generation: "GenerationConfig", **explicit: Any) -> "SamplingParams":
        """Parameters that default to the checkpoint's generation_config.json; what is passed beats the file.

        `do_sample: false` in the file means temperature 0, as its author says.
        """
        values = {name: getattr(generation, name) for name in _FILE_DEFAULTS}
        if generation.do_sample is False:
            values["temperature"] = 0.0
        return cls(**{name: value for name, value in values.items() if value is not None} | explicit)


class _Fields:
    """Checks the fields of a SamplingParams one by one and stores them in their final type."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    def integer(self, name: str, *, minimum: int | None = None, optional: bool = False) -> None:
        value = getattr(self._params, name)
        if value is None and optional:
            return
        legal = "an integer" if minimum is None else f"an integer >= {minimum}"
        legal += " or None" if optional else ""
        if not _is_integer(value) or (minimum is not None and value < minimum):
            self._refuse(name, value, legal)
        self._store(name, int(value))

    def number(
        self,
        name: str,
        *,
        minimum: float = -math.inf,
        maximum: float = math.inf,
        above: float = -math.inf,
    ) -> None:
        value = getattr(self._params, name)
        if above > -math.inf:
            legal = f"a number > {above:g}"
        elif maximum < math.inf:
            legal = f"a number from {minimum:g} to {maximum:g}"
        else:
            legal = f"a number >= {minimum:g}"
        if not _is_finite(value) or not (minimum <= value <= maximum and value > above):
            self._refuse(name, value, legal)
        self._store(name, float(value))

    def flag(self, name: str) -> None:
        value = getattr(self._params, name)
        if not isinstance(value, bool):
            self._refuse(name, value, "True or False")

    def strings(self, name: str) -> None:
        value = getattr(self._params, name)
        values = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(values, Sequence) or not all(isinstance(s, str) and s for s in values):
            self._refuse(name, value, "a non-empty string or a list of them")
        self._store(name, tuple(values))

    def token_ids(self, name: str) -> None:
        value = getattr(self._params, name)
        values = [] if value is None else value
        if not isinstance(values, Sequence) or not all(_is_integer(id_) and id_ >= 0 for id_ in values):
            self._refuse(name, value, "a list of token ids, which are integers >= 0")
        self._store(name, tuple(int(id_) for id_ in values))

    def bias(self, name: str) -> None:
        value = getattr(self._params, name)
        values = {} if value is None else value
        if not isinstance(values, Mapping) or not all(
            _is_integer(id_) and id_ >= 0 and _is_finite(bias) and -100 <= bias <= 100 for id_, bias in values.items()
        ):
            self._refuse(name, value, "a mapping of token ids (integers >= 0) to numbers from -100 to 100")
        self._store(name, {int(id_): float(bias) for id_, bias in values.items()})

    def constraint(self, name: str) -> None:
        value = getattr(self._params, name)
        if value is not None and not isinstance(value, Constraint):
            self._refuse(name, value, "a form of msds.constraints, such as JsonSchema({...}), or None")

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self._params, name, value)  # the dataclass is frozen for everyone else

    def _refuse(self, name: str, value: object, legal: str) -> None:
        raise SamplingError(f"{name} is {value!r}; it must be {legal}")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
