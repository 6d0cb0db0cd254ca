"""The loop that turns requests into answers: admission, prefill in chunks, decode in batches. No tensors."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from msds.engine.batch import Row
from msds.engine.blocks import BlockPool
from msds.engine.ladder import next_chunk
from msds.engine.sampler import sample, token_logprobs
from msds.engine.sequence import GenerationSequence, Output
from msds.errors import OptionError, PromptError
from msds.sampling import SamplingParams

if TYPE_CHECKING:
    from msds.engine.runner import Runner, StepResult

TextListener = Callable[[int, int, str], None]
"""Called with (prompt index, choice index, new text) as text becomes final."""

BROKEN = "the model's hidden states are not finite for this text; its weights or its dtype cannot hold it"


class Engine:
    """Runs sequences to their end on a Runner. Used by one thread.

    Every sequence reserves blocks for its longest possible text when it is admitted, so that none can run out of
    cache half way; sequences that do not fit yet wait in order of arrival. Prefill of waiting sequences and decode
    of running ones alternate.
    """

    def __init__(self, runner: Runner, *, max_model_len: int, max_num_seqs: int) -> None:
        self.runner = runner
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.pool = BlockPool(runner.num_blocks, runner.block_size)
        self._chunk_sizes = sorted({bucket["Q"] for bucket in runner.prefill_buckets})
        self._waiting: deque[GenerationSequence] = deque()
        self._prefilling: deque[GenerationSequence] = deque()
        self._decoding: list[GenerationSequence] = []
        self._prefilled_last = False

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, *, prompt_index: int) -> list[GenerationSequence]:
        """Queue the `n` answers of one prompt. PromptError or OptionError, with the numbers, for what can never run."""
        model = self.runner.model
        length = len(prompt_ids)
        room = self.max_model_len - length
        if room < 1:
            raise PromptError(
                f"prompt {prompt_index} has {length} tokens, but max_model_len is {self.max_model_len} "
                "and at least one token must be generated: shorten the prompt or raise max_model_len"
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise PromptError(
                f"prompt {prompt_index} has {length} tokens and max_tokens is {params.max_tokens}, together more than "
                f"max_model_len, which is {self.max_model_len}: lower max_tokens to {room} or raise max_model_len"
            )
        max_tokens = params.max_tokens or room
        needed = self.pool.blocks_for(length + max_tokens)
        if needed > self.pool.num_usable:
            raise OptionError(
                f"prompt {prompt_index} needs {needed} cache blocks for {length} prompt and {max_tokens} generated "
                f"tokens, the cache has {self.pool.num_usable}: lower max_tokens or raise memory_fraction"
            )
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        sequences = [
            GenerationSequence(
                prompt_ids,
                params,
                seed=seed,
                prompt_index=prompt_index,
                choice_index=choice,
                max_tokens=max_tokens,
                eos_ids=model.eos_token_ids,
                vocab_size=model.config.vocab_size,
                tokenizer=model.tokenizer,
            )
            for choice in range(params.n)
        ]
        self._waiting.extend(sequences)
        return sequences

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self._waiting or self._prefilling or self._decoding)

    def step(self, on_text: TextListener | None = None) -> list[Output]:
        """One graph call: a prefill chunk or a decode step. Returns the answers that it finished."""
        self._admit()
        if self._prefilling and not (self._decoding and self._prefilled_last):
            self._prefilled_last = True
            return self._prefill_step(on_text)
        self._prefilled_last = False
        return self._decode_step(on_text)

    def abort(self) -> None:
        """Forget all sequences and free their blocks."""
        for sequence in (*self._prefilling, *self._decoding):
            self.pool.release(sequence.block_table)
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._prefilling) + len(self._decoding) < self.max_num_seqs:
            sequence = self._waiting[0]
            needed = self.pool.blocks_for(len(sequence.prompt_ids) + sequence.max_tokens)
            if needed > self.pool.num_free:
                return
            sequence.block_table = self.pool.allocate(needed)
            self._prefilling.append(self._waiting.popleft())

    def _prefill_step(self, on_text: TextListener | None) -> list[Output]:
        sequence = self._prefilling[0]
        start = sequence.num_computed
        count = next_chunk(len(sequence.prompt_ids) - start, self._chunk_sizes)
        chunk = sequence.prompt_ids[start : start + count]
        wants_prompt = sequence.params.prompt_logprobs is not None
        result = self.runner.prefill([Row(chunk, start, sequence.block_table)], all_logits=wants_prompt)
        sequence.num_computed += count
        if not result.is_finite[0]:
            sequence.fail(BROKEN)
        elif wants_prompt:
            self._take_prompt_logprobs(sequence, result, start, count)
        if not sequence.is_finished and sequence.num_computed < len(sequence.prompt_ids):
            return []
        self._prefilling.popleft()
        if not sequence.is_finished:
            self._decoding.append(sequence)
            self._sample([sequence], result.logits[:, -1] if not wants_prompt else result.logits[:, count - 1], on_text)
        return self._collect([sequence])

    def _decode_step(self, on_text: TextListener | None) -> list[Output]:
        sequences = list(self._decoding)
        rows = [Row(s.output_ids[-1:], s.num_tokens - 1, s.block_table) for s in sequences]
        result = self.runner.decode(rows)
        healthy = []
        for index, sequence in enumerate(sequences):
            sequence.num_computed += 1
            if result.is_finite[index]:
                healthy.append(index)
            else:
                sequence.fail(BROKEN)
        self._sample([sequences[i] for i in healthy], result.logits[healthy, -1], on_text)
        return self._collect(sequences)

    def _sample(
        self, sequences: list[GenerationSequence], logits: npt.NDArray[np.float32], on_text: TextListener | None
    ) -> None:
        if not sequences:
            return
        states = [sequence.state for sequence in sequences]
        chosen = sample(logits, states, allowed_vocab=self.runner.model.allowed_vocab)
        for sequence, sampled in zip(sequences, chosen, strict=True):
            delta = sequence.accept(sampled)
            if on_text is not None and delta:
                on_text(sequence.prompt_index, sequence.choice_index, delta)

    def _take_prompt_logprobs(self, sequence: GenerationSequence, result: StepResult, start: int, count: int) -> None:
        """Log-probabilities of the prompt tokens that this chunk's logits predict; the first token has none."""
        if start == 0:
            sequence.prompt_logprobs.append(None)
        num_top = sequence.params.prompt_logprobs or 0
        for offset in range(count):
            following = start + offset + 1
            if following < len(sequence.prompt_ids):
                row = result.logits[0, offset]
                sequence.prompt_logprobs.append(token_logprobs(row, sequence.prompt_ids[following], num_top))

    def _collect(self, sequences: list[GenerationSequence]) -> list[Output]:
        """Free what is finished and hand it out."""
        finished = [sequence for sequence in sequences if sequence.is_finished]
        for sequence in finished:
            self.pool.release(sequence.block_table)
            sequence.block_table = ()
            if sequence in self._decoding:
                self._decoding.remove(sequence)
        return [sequence.output() for sequence in finished]
