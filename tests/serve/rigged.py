"""A served model that says what it is told: the real engine and service over a runner whose logits are made up.

Only the device is replaced. `RiggedRunner` keeps, in place of keys and values, the token that was written to each slot
of the cache, and reads the whole text back through the block table, as attention would: an engine that writes or
reads the wrong slot says something else. What follows a text is the script whose prompt begins it; without one,
noise that is a function of the text.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette

from msds import LLM
from msds.engine.batch import Row, build_batch
from msds.engine.runner import StepResult
from msds.model import Model

PEAK = 30.0
"""Logit of the token that comes next; others lie between -1 and 1, so that no temperature up to 2 takes one."""

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- ('<｜Assistant｜>' if message['role'] == 'assistant' else '<｜User｜>') + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
CALL
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>THINK' -}}{%- endif -%}
"""
_NAME, _ARGUMENTS = "call['function']['name']", "call['function']['arguments']"
_CALL = {
    "deepseek_v3": f"{{{{- '{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}' + {_NAME} + '\\n```json\\n' + {_ARGUMENTS} + "
    f"'\\n```{CALL_END}{CALLS_END}' -}}}}",
    "deepseek_v31": f"{{{{- '{CALLS_BEGIN}{CALL_BEGIN}' + {_NAME} + '{SEPARATOR}' + {_ARGUMENTS} + "
    f"'{CALL_END}{CALLS_END}' -}}}}",
    "qwen": '{{- \'<tool_call>\\n{"name": "\' + '
    + _NAME
    + ' + \'", "arguments": \' + '
    + _ARGUMENTS
    + " + '}\\n</tool_call>' -}}",
}


class RiggedRunner:
    """Stands where `Runner` stands. V of the model's vocabulary; logits [S, N, V] as the real one gives."""

    def __init__(self, model: Model, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.num_blocks = num_blocks
        self.num_replicas = 1
        self.block_size = block_size
        self.num_compiled = 0
        self.gate = threading.Event()
        """Every step waits for it: clear it and the device hangs."""
        self.gate.set()
        self.num_steps = 0
        self.steps_until_closed: int | None = None
        """After so many steps the gate closes by itself."""
        self._slots = np.full(num_blocks * block_size, -1, np.int64)
        self._scripts: list[tuple[list[int], list[int]]] = []

    def script(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """After this prompt comes this output, then an end token; the last script for a prompt counts."""
        self._scripts.insert(0, (list(prompt_ids), list(output_ids)))

    def warm_up(self, progress: Any = None) -> None:
        """Nothing compiles here."""

    def prefill(self, rows: Sequence[Row], *, all_logits: bool = False) -> StepResult:
        """As `Runner.prefill`."""
        return self._run(rows, all_logits=all_logits)

    def decode(self, rows: Sequence[Row]) -> StepResult:
        """As `Runner.decode`."""
        return self._run(rows, all_logits=False)

    def _run(self, rows: Sequence[Row], *, all_logits: bool) -> StepResult:
        if self.steps_until_closed is not None:
            if self.steps_until_closed == 0:
                self.gate.clear()
                self.steps_until_closed = None
            else:
                self.steps_until_closed -= 1
        self.gate.wait()
        self.num_steps += 1
        vocab = self.model.config.vocab_size
        build_batch(rows, block_size=self.block_size, num_cache_blocks=self.num_blocks, vocab_size=vocab)  # checks
        texts = []
        for row in rows:
            table = np.asarray(row.block_table)
            positions = np.arange(row.context_len)
            slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
            self._slots[slots[row.start :]] = row.tokens
            texts.append(self._slots[slots].tolist())
        most = max(len(row.tokens) for row in rows)
        logits = np.zeros((len(rows), most if all_logits else 1, vocab), np.float32)
        for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
            first = row.start + 1 if all_logits else row.context_len
            for place, end in enumerate(range(first, row.context_len + 1)):
                logits[index, place] = self._logits(text[:end])
        return StepResult(logits, np.zeros((len(rows), most, 1), np.float32), np.ones((len(rows), most), np.bool_))

    def _logits(self, text: list[int]) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng(zlib.crc32(str(text).encode()))
        logits = rng.uniform(-1, 1, self.model.config.vocab_size).astype(np.float32)
        logits[self.model.allowed_vocab :] = -PEAK  # as padding of a real vocabulary
        scripted = self._next(text)
        if scripted is not None:
            logits[scripted] = PEAK
        return logits

    def _next(self, text: list[int]) -> int | None:
        for prompt, output in self._scripts:
            said = text[len(prompt) :]
            if text[: len(prompt)] == prompt and output[: len(said)] == said:
                return output[len(said)] if len(said) < len(output) else min(self.model.eos_token_ids)
        return None


def write_rigged_folder(source: Path, folder: Path, *, layout: str = "deepseek_v3", thinks: bool = True) -> Path:
    """A tiny checkpoint whose chat template writes calls in `layout` and, with `thinks`, opens with <think>."""
    shutil.copytree(source, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    template = _TEMPLATE.replace("CALL\n", _CALL[layout] + "\n").replace("THINK", "<think>\\n" if thinks else "")
    path.write_text(json.dumps(settings | {"chat_template": template}), encoding="utf-8")
    return folder


def rigged_llm(folder: Path, **options: Any) -> tuple[LLM, RiggedRunner]:
    """An LLM with the real engine, and its rigged runner."""
    llm = LLM(folder, progress=False, **options)
    real = llm.engine.runner
    rigged = RiggedRunner(llm.model, num_blocks=real.num_blocks, block_size=real.block_size)
    llm.engine.runner = rigged  # type: ignore[assignment]
    return llm, rigged


def byte_tokens(model: Model, data: bytes) -> list[int]:
    """One token per byte, so that any text can be cut anywhere."""
    assert model.tokenizer is not None
    known = {model.tokenizer.token_bytes(id_): id_ for id_ in range(model.allowed_vocab - 1, -1, -1)}
    return [known[bytes([byte])] for byte in data]


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Return once it holds; AssertionError if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


@contextlib.contextmanager
def listening(app: Starlette) -> Iterator[str]:
    """The app behind a real socket, uvicorn on a thread; its URL."""
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
