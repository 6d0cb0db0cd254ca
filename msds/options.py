"""What a user may choose about an engine, and what follows from it on this machine. No tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msds.config import ModelConfig, max_context
from msds.errors import OptionError

DEFAULT_MAX_MODEL_LEN = 4096
CPU_DTYPES = ("float32",)
MAX_SPECULATIVE_TOKENS = 8
"""Each draft stands on the one before; published acceptance of the second is well below the first's."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of `msds.LLM`; every default is stated here.

    max_model_len: most tokens of one text, prompt and answer together; default the model's context, at most 4096.
    max_num_seqs: sequences decoded together, by all replicas of a plan (dp); more wait. Default 8.
    block_size: tokens per cache block. Default 16.
    memory_fraction: share of the memory that is free before loading which weights and cache may take. Default 0.8.
    prefill_chunk: most prompt tokens computed in one step. Default 512.
    max_waiting: answers that may wait for a place; more are refused. Default no bound.
    dtype: what weights and cache are kept in; "auto" is float32 on a CPU, where MindSpore has no bfloat16 products.
    threads: cores that this process is restricted to, for good; default no restriction.
    num_speculative_tokens: tokens that the checkpoint's first MTP layer drafts per round; answers are those without,
    as `engine.speculation` says. Default 0, no speculation.
    deterministic: an answer's numbers depend on nothing but its request, bit for bit: every step has the one largest
    shape, prompts are computed one at a time and always whole, and every sequence can have a full-length cache. Slower.
    Default False: numbers may differ in their last bits with what else runs, within the tolerance of `msds verify`.
    eplb_step_interval: steps after which experts move between the ranks of ep, if that evens their load out, as
    `engine.balance` says. Default 0, never. num_redundant_experts: replicas in each MoE layer beyond one slot per
    expert, given to those that are used most. Default 0; more only with eplb_step_interval.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 8
    block_size: int = 16
    memory_fraction: float = 0.8
    prefill_chunk: int = 512
    max_waiting: int | None = None
    dtype: str = "auto"
    threads: int | None = None
    num_speculative_tokens: int = 0
    deterministic: bool = False
    eplb_step_interval: int = 0
    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "block_size", "prefill_chunk"):
            _check_count(name, getattr(self, name))
        for name in ("max_model_len", "threads", "max_waiting"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        drafts = self.num_speculative_tokens
        if isinstance(drafts, bool) or not isinstance(drafts, int) or not 0 <= drafts <= MAX_SPECULATIVE_TOKENS:
            raise OptionError(
                f"num_speculative_tokens is {drafts!r}: it must be a whole number from 0 (no speculation) to "
                f"{MAX_SPECULATIVE_TOKENS}"
            )
        if not isinstance(self.deterministic, bool):
            raise OptionError(f"deterministic is {self.deterministic!r}: it must be True or False")
        if self.deterministic and drafts:
            raise OptionError(
                f"deterministic and num_speculative_tokens {drafts} exclude each other: how many tokens a step has "
                "would depend on what else runs; leave one of them out"
            )
        for name in ("eplb_step_interval", "num_redundant_experts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError(f"{name} is {value!r}: it must be a whole number of at least 0")
        if self.num_redundant_experts and not self.eplb_step_interval:
            raise OptionError(
                f"num_redundant_experts is {self.num_redundant_experts} without eplb_step_interval: replicas go to the "
                "experts that are used most, which nobody would count; give the interval, such as 1000"
            )
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise OptionError(f"memory_fraction is {fraction!r}: it must be a number above 0 and at most 1")
        if self.dtype not in ("auto", *CPU_DTYPES):
            raise OptionError(
                f"dtype is {self.dtype!r}: on this device use 'auto' or one of {', '.join(CPU_DTYPES)} "
                "(MindSpore has no bfloat16 matrix product on CPU, and its float16 one is six times slower)"
            )

    @property
    def resolved_dtype(self) -> str:
        """The dtype of weights and cache."""
        return "float32" if self.dtype == "auto" else self.dtype

    def resolve_max_model_len(self, config: ModelConfig) -> int:
        """The length limit for a model; OptionError when more than the model's context is asked for."""
        context = max_context(config)
        if self.max_model_len is None:
            return min(context, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > context:
            raise OptionError(f"max_model_len is {self.max_model_len}: the model's context is {context} tokens")
        return self.max_model_len

    def blocks_per_text(self, max_model_len: int) -> int:
        """Cache blocks of a text of full length."""
        return -(-max_model_len // self.block_size)

    def seqs_per_replica(self, replicas: int) -> int:
        """Sequences that each replica of a model decodes together; OptionError where they do not divide evenly."""
        share, rest = divmod(self.max_num_seqs, replicas)
        if rest:
            near = [count for count in (share * replicas, (share + 1) * replicas) if count]
            raise OptionError(
                f"max_num_seqs is {self.max_num_seqs}, and {replicas} replicas (dp) decode as many sequences each: use "
                f"{' or '.join(map(str, near))}"
            )
        return share

    def plan_blocks(self, *, max_model_len: int, block_bytes: int, weight_bytes: int, free_bytes: int) -> int:
        """Cache blocks to allocate, the reserved one included.

        As many as `max_num_seqs` texts of full length need, or what memory_fraction of the free memory leaves after
        the weights. OptionError, with the numbers, when not even one text of full length fits.
        """
        per_text = self.blocks_per_text(max_model_len)
        wanted = 1 + self.max_num_seqs * per_text
        budget = int(free_bytes * self.memory_fraction) - weight_bytes
        affordable = budget // block_bytes
        if affordable < 1 + per_text:
            need = weight_bytes + (1 + per_text) * block_bytes
            raise OptionError(
                f"weights ({_gib(weight_bytes)}) and the cache of one text of {max_model_len} tokens "
                f"({_gib((1 + per_text) * block_bytes)}) need {_gib(need)}, but memory_fraction "
                f"{self.memory_fraction} of {_gib(free_bytes)} free is {_gib(int(free_bytes * self.memory_fraction))}: "
                f"lower max_model_len, raise memory_fraction or free memory"
            )
        if self.deterministic and affordable < wanted:
            raise OptionError(
                f"deterministic needs the cache of max_num_seqs {self.max_num_seqs} texts of {max_model_len} tokens at "
                f"once, {_gib(wanted * block_bytes)}, but there is room for {_gib(affordable * block_bytes)}: lower "
                f"max_num_seqs to {affordable // per_text} or max_model_len, or free memory"
            )
        return min(wanted, affordable)


def free_memory_bytes() -> int:
    """Memory this process can still take: what the kernel calls available, or the control group's rest if lower."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min(available, _cgroup_rest())


def _cgroup_rest() -> int:
    """Bytes left under a version-2 control group limit; unlimited when there is none."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            current = int(file.read())
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - current)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} is {value!r}: it must be a whole number of at least 1")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{math.ceil(size / 2**20)} MiB"
