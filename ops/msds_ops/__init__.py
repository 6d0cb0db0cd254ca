"""Pure ops: each has a portable definition in MindSpore, a NumPy reference beside it, and a name in the plan.

`IMPLEMENTATIONS` says which implementations of an op exist; the plan picks one per op and hands the op the
plain string. An op that is not listed has one definition only.
"""

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    # copying writer (a value) or in-place writer (the bound cache itself)
    "cache_write": ("reference", "portable"),
    # every expert for every token, or only the chosen ones
    "moe_experts": ("reference", "portable"),
}

__all__ = ["IMPLEMENTATIONS"]
