"""Engine options: edge values, and the memory plan with its numbers."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from msds import presets
from msds.config import RopeScaling
from msds.errors import OptionError
from msds.options import DEFAULT_MAX_MODEL_LEN, EngineOptions, free_memory_bytes


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "block_size", "prefill_chunk", "threads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "16"])
def test_counts(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name} is {value!r}"):
        EngineOptions(**{name: value})  # type: ignore[arg-type]
    EngineOptions(**{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["eplb_step_interval", "num_redundant_experts"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "16"])
def test_balancing(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name} is {value!r}"):
        EngineOptions(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="num_redundant_experts is 2 without eplb_step_interval"):
        EngineOptions(num_redundant_experts=2)
    assert EngineOptions(num_redundant_experts=2, eplb_step_interval=1).num_redundant_experts == 2


@pytest.mark.parametrize("value", [0, -0.1, 1.01, math.nan, math.inf, True, "half"])
def test_memory_fraction(value: object) -> None:
    with pytest.raises(OptionError, match="memory_fraction is"):
        EngineOptions(memory_fraction=value)  # type: ignore[arg-type]
    assert EngineOptions(memory_fraction=1).memory_fraction == 1


def test_dtype() -> None:
    assert EngineOptions().resolved_dtype == "float32"
    for name in ("bfloat16", "float16", "fp32", ""):
        with pytest.raises(OptionError, match=f"dtype is {name!r}.*float32"):
            EngineOptions(dtype=name)


def test_threads() -> None:
    """Cores are taken from this process for good, so a process of its own is asked."""
    code = (
        "import os\nfrom msds.llm import _restrict_cores\nfrom msds.errors import OptionError\n"
        "_restrict_cores(1, 0)\nprint(len(os.sched_getaffinity(0)))\n"
        "try:\n    _restrict_cores(2, 0)\nexcept OptionError as error:\n    print(error)"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == ["1", "threads is 2: this process may use 1 cores"]


def test_max_model_len() -> None:
    llama, deepseek = presets.r1_distill_llama_8b(), presets.deepseek_v3()
    short = replace(llama, max_position_embeddings=2048)
    assert EngineOptions().resolve_max_model_len(short) == 2048  # the model's own
    assert EngineOptions().resolve_max_model_len(deepseek) == DEFAULT_MAX_MODEL_LEN == 4096
    assert EngineOptions(max_model_len=163840).resolve_max_model_len(deepseek) == 163840
    with pytest.raises(OptionError, match=r"max_model_len is 2049.*2048"):
        EngineOptions(max_model_len=2049).resolve_max_model_len(short)


def test_a_stretched_context_that_would_change_cached_keys_is_refused() -> None:
    """Dynamic scaling: frequencies of a longer text differ from those its cached keys were rotated with."""
    scaling = RopeScaling(rope_type="dynamic", factor=4.0, original_max_position_embeddings=2048)
    config = replace(presets.r1_distill_llama_8b(), rope_scaling=scaling, max_position_embeddings=8192)
    assert EngineOptions().resolve_max_model_len(config) == 2048
    with pytest.raises(OptionError, match="max_model_len is 2049"):
        EngineOptions(max_model_len=2049).resolve_max_model_len(config)


class TestMemoryPlan:
    def blocks(self, free: int, **options: object) -> int:
        return EngineOptions(block_size=16, **options).plan_blocks(  # type: ignore[arg-type]
            max_model_len=100, block_bytes=1000, weight_bytes=50_000, free_bytes=free
        )

    def test_enough_memory_gives_what_all_sequences_need(self) -> None:
        assert self.blocks(10**9, max_num_seqs=3) == 1 + 3 * 7  # 100 tokens are seven blocks of 16

    def test_less_memory_gives_what_fits(self) -> None:
        assert self.blocks(75_000, max_num_seqs=8, memory_fraction=0.8) == 10

    def test_just_one_text_of_full_length(self) -> None:
        assert self.blocks(72_500, memory_fraction=0.8) == 8
        with pytest.raises(OptionError, match=r"max_model_len.*memory_fraction"):
            self.blocks(72_499, memory_fraction=0.8)

    def test_weights_alone_too_large(self) -> None:
        with pytest.raises(OptionError, match="weights"):
            self.blocks(50_000)


@pytest.mark.parametrize(
    ("seqs", "replicas", "share"), [(8, 1, 8), (8, 2, 4), (3, 3, 1), (3, 2, "use 2 or 4"), (1, 2, "use 2$")]
)
def test_replicas_decode_as_many_sequences_each(seqs: int, replicas: int, share: int | str) -> None:
    options = EngineOptions(max_num_seqs=seqs)
    if isinstance(share, int):
        assert options.seqs_per_replica(replicas) == share
        return
    with pytest.raises(OptionError, match=f"max_num_seqs is {seqs}, and {replicas} replicas .* {share}"):
        options.seqs_per_replica(replicas)


def test_free_memory_is_that_of_this_machine() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < free_memory_bytes() <= int(total.split()[1]) * 1024
