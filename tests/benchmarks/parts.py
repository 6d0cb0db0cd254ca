"""What a decode step is made of: the step as it is served, and the same step with one part left out at a time.

A part's cost is the difference, measured in the real graph with its real neighbours. The differences need not add up
to the whole: what is left when everything is out (graph launch, embedding row, masks, reshapes, copies) is measured
too, and the remainder is printed instead of being hidden in a part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

WARM_UP_STEPS = 3
STEPS = 8

_DEEPSEEK, _LLAMA, _ENDS = "msds.models.deepseek", "msds.models.llama", "msds.models.ends"
_STAND_INS = "tests.benchmarks.stand_ins"


@dataclass(frozen=True)
class Part:
    """patches: (module, its global, the stand-in's name), as the model's file finds the op when it is parsed."""

    name: str
    patches: tuple[tuple[str, str, str], ...]


def _part(name: str, module: str, *names: str) -> Part:
    return Part(name, tuple((module, op, op) for op in names))


_HEAD = Part("output head", ((_ENDS, "linear", "linear"),))


def _norms(module: str) -> Part:
    return Part("RMS norms", ((module, "rms_norm", "rms_norm"), (_ENDS, "rms_norm", "rms_norm")))


DEEPSEEK_PARTS = (
    _part("routed experts", _DEEPSEEK, "moe_experts"),
    _part("routing", _DEEPSEEK, "route"),
    _part("dense and shared MLPs", _DEEPSEEK, "swiglu_mlp", "cut_mlp"),
    _part("attention projections", _DEEPSEEK, "linear", "row_linear"),
    Part("absorbed projections", ((_DEEPSEEK, "_bmm", "batch_product"), (_DEEPSEEK, "_bmm_nt", "batch_product_nt"))),
    _part("attention core", _DEEPSEEK, "attend_latent"),
    _part("cache read", _DEEPSEEK, "cache_read"),
    _part("cache write", _DEEPSEEK, "cache_write"),
    _part("rotary embedding", _DEEPSEEK, "rotate"),
    _norms(_DEEPSEEK),
    _HEAD,
)

LLAMA_PARTS = (
    _part("MLPs", _LLAMA, "cut_mlp"),
    _part("attention projections", _LLAMA, "linear", "row_linear"),
    _part("attention core", _LLAMA, "attend"),
    _part("cache read", _LLAMA, "cache_read"),
    _part("cache write", _LLAMA, "cache_write"),
    _part("rotary embedding", _LLAMA, "rotate"),
    _norms(_LLAMA),
    _HEAD,
)


def parts_of(functions: ModuleType) -> tuple[Part, ...]:
    """The parts of a model file's decode step."""
    return DEEPSEEK_PARTS if functions.__name__ == _DEEPSEEK else LLAMA_PARTS


@contextmanager
def left_out(parts: Sequence[Part]) -> Iterator[None]:
    """Stand-ins in place of the parts' ops, for whatever is compiled meanwhile."""
    stand_ins = import_module(_STAND_INS)
    patches = [(import_module(module), name, stand_in) for part in parts for module, name, stand_in in part.patches]
    originals = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, stand_in in patches:
            setattr(module, name, getattr(stand_ins, stand_in))
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def measure(model: Any, text: Any, context: int, rounds: int) -> list[tuple[str, list[float]]]:
    """(variant, seconds per batch-1 decode step in each round): "whole step", "without X" for each part, "without all".

    Every variant has a Runner and a small cache of its own; rounds go through all variants in turn, so that drift of
    the machine falls on all alike.
    """
    from msds.engine.batch import Row

    parts = parts_of(model.functions)
    variants: list[tuple[str, Sequence[Part]]] = [("whole step", ())]
    variants += [(f"without {part.name}", (part,)) for part in parts] + [("without all", parts)]
    block_size = 16
    blocks = -(-context // block_size)
    row = Row([int(text[0])], context - 1, tuple(range(1, blocks + 1)))
    runners = [(name, _compiled(model, row, omitted, blocks, block_size)) for name, omitted in variants]
    seconds: dict[str, list[float]] = {name: [] for name, _ in runners}
    for _ in range(rounds):
        for name, runner in runners:
            for _ in range(WARM_UP_STEPS):
                runner.decode([row])
            start = time.perf_counter()
            for _ in range(STEPS):
                runner.decode([row])
            seconds[name].append((time.perf_counter() - start) / STEPS)
    return list(seconds.items())


def _compiled(model: Any, row: Any, omitted: Sequence[Part], blocks: int, block_size: int) -> Any:
    from msds.engine.runner import Runner

    bucket = [{"S": 1, "Q": 1, "B": blocks}]
    runner = Runner(model, num_blocks=blocks + 1, block_size=block_size, prefill_buckets=bucket, decode_buckets=bucket)
    with left_out(omitted):
        runner.decode([row])
    return runner
