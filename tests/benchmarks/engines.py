"""The two engines under one interface. Each lives in a process of its own; `Remote` is its handle.

Texts are random token ids, the same for both engines, and so is every token that is fed to a decode step (the next one
of the text, not the engine's own choice): routing, cache and work are then equal, and the chosen ids comparable.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tests.benchmarks.machine import pin_threads

PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Setting:
    """max_len: tokens of the longest text; max_batch: texts decoded together."""

    folder: Path
    threads: int
    max_len: int
    max_batch: int
    vocab_size: int

    def texts(self) -> npt.NDArray[np.int64]:
        """[max_batch, max_len]; ids 0 and 1 are left out, which some configs give a meaning."""
        return np.random.default_rng(0).integers(2, self.vocab_size, (self.max_batch, self.max_len))


@dataclass(frozen=True)
class Steps:
    """seconds: of each decode step; chosen: greedy ids [steps, batch]."""

    seconds: list[float]
    chosen: npt.NDArray[np.int64]


class Engine(Protocol):
    """What is measured; every method leaves the engine idle."""

    def imports(self) -> float:
        """Seconds to import the libraries."""

    def load(self) -> float:
        """Seconds from the imported libraries to weights that are ready to run."""

    def compile(self) -> list[tuple[str, float]]:
        """(what, seconds) per compiled shape; empty where nothing is compiled."""

    def prefill(self, count: int) -> tuple[float, npt.NDArray[np.float32]]:
        """Seconds for the first `count` tokens of text 0 from an empty cache, and the last token's logits [vocab]."""

    def fill(self, count: int) -> None:
        """Have the first `count` tokens of every text in the cache; what is there already is kept."""

    def decode(self, batch: int, start: int, count: int) -> Steps:
        """`count` steps of the first `batch` texts, which hold `start` tokens before and after."""

    def generate(self, batch: int, prompt: int, count: int) -> float:
        """Seconds of the engine's own greedy generation of `count` tokens after `prompt` ones, no early end.

        Every call has new prompts, the same for both engines: msds would find repeated ones in its prefix cache.
        """


class MsdsEngine:
    """msds through the LLM a user makes and the Runner that serves it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.texts = setting.texts()
        self.prompts = np.random.default_rng(1)
        self.tables: list[tuple[int, ...]] = []
        self.filled = 0
        self.llm: Any = None

    def imports(self) -> float:
        start = time.perf_counter()
        for module in ("msds.llm", "msds.engine.runner", "msds_graphs.compile"):
            import_module(module)
        return time.perf_counter() - start

    def load(self) -> float:
        import msds

        start = time.perf_counter()
        self.llm = msds.LLM(
            self.setting.folder,
            max_model_len=self.setting.max_len,
            max_num_seqs=self.setting.max_batch,
            prefill_chunk=PREFILL_CHUNK,
            threads=self.setting.threads,
            progress=False,
        )
        seconds = time.perf_counter() - start
        runner, setting = self.llm.engine.runner, self.setting
        per_text = -(-setting.max_len // runner.block_size)
        firsts = [1 + text * per_text for text in range(setting.max_batch)]
        if firsts[-1] + per_text > runner.num_blocks:
            raise RuntimeError(
                f"{runner.num_blocks} cache blocks are too few for {setting.max_batch} texts: free memory"
            )
        self.tables = [tuple(range(first, first + per_text)) for first in firsts]
        return seconds

    def compile(self) -> list[tuple[str, float]]:
        """First call of every planned shape less its second one, which only runs."""
        from msds.engine.ladder import step_ladders

        runner, setting = self.llm.engine.runner, self.setting
        prefill_buckets, decode_buckets = step_ladders(
            max_model_len=setting.max_len,
            max_num_seqs=setting.max_batch,
            prefill_chunk=PREFILL_CHUNK,
            block_size=runner.block_size,
        )
        planned = [("prefill", runner.prefill, bucket) for bucket in prefill_buckets]
        planned += [("decode", runner.decode, bucket) for bucket in decode_buckets]
        found = []
        for name, step, bucket in planned:
            start = bucket["B"] * runner.block_size - bucket["Q"]
            rows = [self._row(text, start, bucket["Q"]) for text in range(bucket["S"])]
            first, second = _seconds(step, rows), _seconds(step, rows)
            shape = " ".join(f"{key}={size}" for key, size in bucket.items())
            found.append((f"{name} {shape}", first - second))
        return found

    def prefill(self, count: int) -> tuple[float, npt.NDArray[np.float32]]:
        start = time.perf_counter()
        logits = self._prefill_text(0, 0, count)
        return time.perf_counter() - start, logits

    def fill(self, count: int) -> None:
        for text in range(self.setting.max_batch):
            self._prefill_text(text, self.filled, count)
        self.filled = max(self.filled, count)

    def decode(self, batch: int, start: int, count: int) -> Steps:
        seconds, chosen = [], []
        for place in range(start, start + count):
            begin = time.perf_counter()
            result = self.llm.engine.runner.decode([self._row(text, place, 1) for text in range(batch)])
            ids = result.logits[:, -1].argmax(-1)
            seconds.append(time.perf_counter() - begin)
            chosen.append(ids)
        return Steps(seconds, np.array(chosen))

    def generate(self, batch: int, prompt: int, count: int) -> float:
        import msds

        self.filled = 0  # the engine serves from the same cache
        sampling = msds.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        prompts = self.prompts.integers(2, self.setting.vocab_size, (batch, prompt)).tolist()
        return _seconds(self.llm.generate, prompts, sampling)

    def bytes_per_token(self) -> tuple[int, int]:
        """What a decode step of one text must read: active weights, and cache per token of context."""
        from msds.config.counting import count_parameters
        from msds_graphs.trees import tree_flatten

        model = self.llm.model
        slot = model.functions.cache_spec(model.config, 1, 1, model.dtype)
        return 4 * count_parameters(model.config).active, sum(leaf.nbytes for leaf in tree_flatten(slot)[0])

    def parts(self, context: int, rounds: int) -> list[tuple[str, list[float]]]:
        """See `tests.benchmarks.parts.measure`."""
        from tests.benchmarks.parts import measure

        return measure(self.llm.model, self.texts[0], context, rounds)

    def _row(self, text: int, start: int, count: int) -> Any:
        from msds.engine.batch import Row

        return Row(self.texts[text, start : start + count].tolist(), start, self.tables[text])

    def _prefill_text(self, text: int, start: int, count: int) -> npt.NDArray[np.float32]:
        logits = np.empty(0, np.float32)
        for begin in range(start, count, PREFILL_CHUNK):
            row = self._row(text, begin, min(PREFILL_CHUNK, count - begin))
            logits = self.llm.engine.runner.prefill([row]).logits[0, -1]
        return logits


class TransformersEngine:
    """transformers with its DynamicCache, default attention and expert implementations, last logits only."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.texts = setting.texts()
        self.prompts = np.random.default_rng(1)
        self.model: Any = None
        self.caches: dict[int, Any] = {}  # by batch

    def imports(self) -> float:
        start = time.perf_counter()
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        assert AutoModelForCausalLM  # resolved lazily: naming it imports the models' code
        logging.disable_progress_bar()
        torch.set_num_threads(self.setting.threads)
        torch.set_grad_enabled(False)
        return time.perf_counter() - start

    def load(self) -> float:
        import torch
        from transformers import AutoModelForCausalLM

        start = time.perf_counter()
        self.model = AutoModelForCausalLM.from_pretrained(self.setting.folder, dtype=torch.float32).eval()
        return time.perf_counter() - start

    def compile(self) -> list[tuple[str, float]]:
        return []

    def prefill(self, count: int) -> tuple[float, npt.NDArray[np.float32]]:
        start = time.perf_counter()
        out = self._forward(1, 0, count, self._new_cache())
        return time.perf_counter() - start, out[0].numpy()

    def fill(self, count: int) -> None:
        for batch in {1, self.setting.max_batch}:
            cache = self.caches.setdefault(batch, self._new_cache())
            for begin in range(cache.get_seq_length(), count, PREFILL_CHUNK):
                self._forward(batch, begin, min(PREFILL_CHUNK, count - begin), cache)

    def decode(self, batch: int, start: int, count: int) -> Steps:
        cache, seconds, chosen = self.caches[batch], [], []
        assert cache.get_seq_length() == start, f"the cache holds {cache.get_seq_length()} tokens, not {start}"
        for place in range(start, start + count):
            begin = time.perf_counter()
            ids = self._forward(batch, place, 1, cache).argmax(-1)
            seconds.append(time.perf_counter() - begin)
            chosen.append(ids.numpy())
        cache.crop(-count)
        return Steps(seconds, np.array(chosen))

    def generate(self, batch: int, prompt: int, count: int) -> float:
        import torch

        ids = torch.from_numpy(self.prompts.integers(2, self.setting.vocab_size, (batch, prompt)))
        mask = torch.ones_like(ids)
        lengths = {"min_new_tokens": count, "max_new_tokens": count}
        return _seconds(self.model.generate, ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _forward(self, batch: int, start: int, count: int, cache: Any) -> Any:
        import torch

        ids = torch.from_numpy(self.texts[:batch, start : start + count])
        return self.model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


ENGINES: dict[str, Any] = {"msds": MsdsEngine, "transformers": TransformersEngine}


def _seconds(action: Any, *arguments: Any, **keywords: Any) -> float:
    start = time.perf_counter()
    action(*arguments, **keywords)
    return time.perf_counter() - start


def peak_memory_bytes() -> int:
    """The largest resident size this process has had, mapped files included (VmHWM)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) * 1024


class Remote:
    """An engine in a process of its own, pinned to as many processors as it has threads."""

    def __init__(self, kind: str, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self.kind = kind
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, setting), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """The method's result; RuntimeError with the engine's traceback when it fails."""
        self._pipe.send((method, arguments))
        succeeded, result = self._pipe.recv()
        if not succeeded:
            raise RuntimeError(f"{self.kind}.{method}{arguments} failed:\n{result}")
        return result

    def close(self) -> None:
        """Ends the process and waits for it."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Any, kind: str, setting: Setting) -> None:
    pin_threads(setting.threads)
    engine = ENGINES[kind](setting)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = peak_memory_bytes() if method == "peak_memory" else getattr(engine, method)(*arguments)
            pipe.send((True, result))
        except Exception:
            pipe.send((False, traceback.format_exc()))
