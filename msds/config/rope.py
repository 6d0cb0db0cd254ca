"""RoPE scaling: what a config says about stretching the rotary frequencies.

Pairs of dimension index j have the unscaled frequency theta^(-2j/dim). Each type changes these frequencies;
only "yarn" also changes amplitudes. Definitions are those of transformers' `modeling_rope_utils` and, for
the softmax factor, of DeepSeek's published modelling code.
"""

import math
from dataclasses import dataclass

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

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by: 1 except for yarn, where it is `attention_factor` or
        m(mscale)/m(mscale_all_dim) with m(x) = 0.1 x ln(factor) + 1. 1.0 for DeepSeek-V3; 0.1 ln(factor) + 1
        for a Llama or Qwen2 config, which has neither mscale."""
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
