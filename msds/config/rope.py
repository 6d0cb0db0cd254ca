"""RoPE scaling: what a config says about stretching the rotary frequencies.

Pairs of dimension index j have the unscaled frequency theta^(-2j/dim). Each type changes these frequencies;
only "yarn" also changes amplitudes. Definitions are those of transformers' `modeling_rope_utils` and, for
the softmax factor, of DeepSeek's published modelling code.
"""

import math
from dataclasses import dataclass
from typing import Any

from msds.config.fields import Fields, fault, raise_faults, shown

ROPE_TYPES = ("yarn", "llama3", "linear", "dynamic")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched; fields that a type does not name below are not used by it.

    - linear: `factor`.
    - dynamic: `factor`, `original_max_position_embeddings`; equal to unscaled RoPE up to that length, and
      refused beyond it, because longer texts would change the keys that are already cached.
    - llama3: `factor`, `original_max_position_embeddings`, `low_freq_factor`, `high_freq_factor`.
    - yarn: `factor`, `original_max_position_embeddings`, `beta_fast`, `beta_slow`, `truncate`, `mscale`,
      `mscale_all_dim`, `attention_factor`.
    """

    rope_type: str
    """One of ROPE_TYPES; the absence of scaling ("default") is None in place of this object."""
    factor: float
    """Ratio of the stretched to the original context length, >= 1."""
    original_max_position_embeddings: int
    """Context length before stretching, in tokens."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this within the original context are left alone."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this within the original context are divided by factor."""
    truncate: bool = True
    """yarn: round the ends of the ramp between the two to whole dimensions (floor, ceil)."""
    mscale: float = 1.0
    """yarn: numerator of the cos/sin amplitude, see `amplitude`."""
    mscale_all_dim: float = 0.0
    """yarn: denominator of the cos/sin amplitude; in MLA it also enters the softmax scale, squared."""
    attention_factor: float | None = None
    """yarn: the cos/sin amplitude itself, when the config states it."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original/low_freq_factor are divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original/high_freq_factor are left alone."""

    def __post_init__(self) -> None:
        faults = []
        if self.rope_type not in ROPE_TYPES:
            faults.append(fault("rope_type", self.rope_type, f"supported: {', '.join(ROPE_TYPES)}"))
        if not self.factor >= 1.0:
            faults.append(fault("factor", self.factor, "must be at least 1"))
        raise_faults("RopeScaling", faults)

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by: 1 except for yarn, where it is `attention_factor` or
        m(mscale)/m(mscale_all_dim), m(x) = 0.1 x ln(factor) + 1: 1 for DeepSeek-V3, 0.1 ln(factor) + 1 for
        a Llama or Qwen2 config that has neither mscale."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)

    @property
    def mla_softmax_factor(self) -> float:
        """What MLA multiplies (nope + rope)^-0.5 by, at all lengths: m(mscale_all_dim)^2, 1 if that is 0.
        Llama and Qwen2 attention do not have this factor."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude m(mscale) = 0.1 mscale ln(factor) + 1 (1 when nothing is stretched)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def read_rope(fields: Fields, max_position_embeddings: int, *, is_mla: bool) -> tuple[float, RopeScaling | None]:
    """rope_theta and scaling from either spelling: `rope_theta` beside `rope_scaling` (hub), or both inside
    `rope_parameters` (transformers 5). A file that has both must say the same twice."""
    section = _rope_section(fields)
    theta = fields.number("rope_theta", above=1.0, default=0.0)
    if section is None:
        return theta or _default_theta(fields), None
    inner_theta = section.number("rope_theta", above=1.0, default=0.0)
    if theta and inner_theta and theta != inner_theta:
        section.fail("rope_theta", inner_theta, f"contradicts rope_theta = {theta:g}; keep one of them")
    theta = theta or inner_theta or _default_theta(fields)
    section.only("partial_rotary_factor", 1.0, "only whole heads are rotated")
    return theta, _read_scaling(section, max_position_embeddings, is_mla)


def _default_theta(fields: Fields) -> float:
    """10000 is the default of every class and every published config that leaves it out (Llama 1 and 2)."""
    fields.warn("rope_theta", "missing, taken as 10000")
    return 10000.0


def _rope_section(fields: Fields) -> Fields | None:
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    if old is None or new is None:
        return old or new
    for name in old.data.keys() & new.data.keys():
        if old.data[name] != new.data[name]:
            old.fail(name, old.data[name], f"contradicts rope_parameters.{name} = {shown(new.data[name])}")
    return Fields({**new.data, **old.data}, within=fields, prefix=old.prefix)


def _read_scaling(section: Fields, max_position_embeddings: int, is_mla: bool) -> RopeScaling | None:
    kind = section.raw("rope_type", "type")
    if kind is None and "factor" in section.data:
        section.fail("rope_type", None, f"a factor without a type has no meaning; state one of {', '.join(ROPE_TYPES)}")
    elif kind not in (None, "default", *ROPE_TYPES):
        section.fail("rope_type", kind, f"supported: default, {', '.join(ROPE_TYPES)}")
        return None
    if not isinstance(kind, str) or kind == "default":
        section.warn_of_unseen()
        return None
    scaling = RopeScaling(
        rope_type=kind,
        factor=section.number("factor", minimum=1.0),
        original_max_position_embeddings=_original_length(section, kind, max_position_embeddings),
        **_type_fields(section, kind, is_mla),
    )
    section.warn_of_unseen()
    return scaling


def _original_length(section: Fields, kind: str, max_position_embeddings: int) -> int:
    """yarn and llama3 must state it: transformers would fall back on max_position_embeddings, which in most
    such configs is the stretched length. linear does not use it, dynamic starts from the declared one."""
    name = "original_max_position_embeddings"
    if kind in ("yarn", "llama3"):
        return section.integer(name)
    return section.integer(name, default=max_position_embeddings)


def _type_fields(section: Fields, kind: str, is_mla: bool) -> dict[str, Any]:
    """The fields that only some types have."""
    read: dict[str, Any] = {}
    if kind == "llama3":
        read["low_freq_factor"] = low = section.number("low_freq_factor", above=0.0)
        read["high_freq_factor"] = high = section.number("high_freq_factor", above=0.0)
        if high <= low and not section.has_faults("low_freq_factor", "high_freq_factor"):
            section.fail("high_freq_factor", high, f"must exceed low_freq_factor = {low:g}")
    if kind == "yarn":
        read["beta_fast"] = fast = section.number("beta_fast", above=0.0, default=32.0)
        read["beta_slow"] = slow = section.number("beta_slow", above=0.0, default=1.0)
        if fast < slow and not section.has_faults("beta_fast", "beta_slow"):
            section.fail("beta_fast", fast, f"must not be below beta_slow = {slow:g}")
        read["truncate"] = section.flag("truncate", default=True)
        read["attention_factor"] = section.optional_number("attention_factor", above=0.0)
    if kind == "yarn" or is_mla:  # MLA's softmax factor does not ask for the type
        read["mscale"] = section.number("mscale", minimum=0.0, default=1.0)
        read["mscale_all_dim"] = section.number("mscale_all_dim", minimum=0.0, default=0.0)
        if kind == "yarn":
            _settle_mscale(section, read, is_mla)
    return read


def _settle_mscale(section: Fields, read: dict[str, Any], is_mla: bool) -> None:
    """Where only one of the two is stated (or either is 0), transformers takes m(1) for the amplitude, while
    DeepSeek's code still divides m(mscale) by m(mscale_all_dim) with 1 and 0 for what is absent. Each family
    follows the code it was published with."""
    mscale, mscale_all_dim = read["mscale"], read["mscale_all_dim"]
    are_both_stated = bool(section.raw("mscale")) and bool(section.raw("mscale_all_dim"))
    if are_both_stated or (mscale, mscale_all_dim) == (1.0, 0.0):
        return
    name = "mscale_all_dim" if mscale_all_dim else "mscale"
    if is_mla:
        section.warn(name, "without the other, transformers scales cos and sin as if neither were there")
    else:
        section.warn(name, "without the other, it has no effect in this family")
        read |= {"mscale": 1.0, "mscale_all_dim": 0.0}
