"""LLM: a checkpoint folder in, answers out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msds.config import ModelConfig, read_config
from msds.engine.balance import ExpertBalance
from msds.engine.engine import Engine
from msds.engine.ladder import shared_prefill, step_ladders
from msds.engine.schedule_types import SchedulerPolicy
from msds.engine.sequence import Delta, GenerationSequence, Output, RequestInfo
from msds.engine.speculation import Speculation
from msds.errors import OptionError, PromptError, SamplingError, TokenizerError
from msds.model import Model, checked_ranks, load
from msds.models.specs import model_specs, tree_bytes
from msds.models.specs.parts import expert_counts_spec, expert_topology, rank_bytes, spread_experts
from msds.models.specs.placement import ExpertPlacement
from msds.options import EngineOptions, free_memory_bytes
from msds.sampling import SamplingParams
from msds.text.reasoning import Start
from msds.text.token_ids import check_token_ids
from msds.weights import held_spec, without_mtp
from msds_graphs.errors import GraphError
from msds_graphs.plan import Plan
from msds_graphs.ranks import ALONE, Ranks
from msds_graphs.trees import Tree

if TYPE_CHECKING:
    from msds.engine.runner import Runner
    from msds.launch.team import Follower, Leader

Prompt = str | Sequence[int]
TextListener = Callable[[int, int, str], None]
"""Called with (prompt index, choice index, new text) as text becomes final."""


class LLM:
    """A model ready to generate.

    path: a Hugging Face folder. Options and their defaults: `EngineOptions` (max_model_len, max_num_seqs, block_size,
    memory_fraction, prefill_chunk, dtype, threads, num_speculative_tokens, eplb_step_interval and others). plan:
    implementation per op. warm_up: compile every planned shape now instead of on first use. check_sha256, shard_cache:
    as for `msds.load`. progress: show loading and compiling; None on a terminal. ranks, team: this process among
    several that hold the model together, each of which makes an LLM with the same other arguments; only the leader's
    generates.

    Raises ConfigError, CheckpointError, TokenizerError or OptionError before anything large is allocated.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        plan: Plan | None = None,
        warm_up: bool = False,
        check_sha256: bool | None = None,
        progress: bool | None = None,
        ranks: Ranks | None = None,
        team: Leader | Follower | None = None,
        shard_cache: str | Path | None = None,
        **options: Any,
    ) -> None:
        # Nine parameters: those of `load`, by keyword, and the engine's.
        self.options = _engine_options(options)
        folder = Path(path)
        stored = read_config(path)
        self.max_model_len = self.options.resolve_max_model_len(stored)
        if self.options.threads is not None:
            _restrict_cores(self.options.threads, 0 if team is None else team.place.number_here)
        speculates = self.options.num_speculative_tokens > 0
        if speculates and not getattr(stored, "num_nextn_predict_layers", 0):
            raise OptionError(
                f"num_speculative_tokens is {self.options.num_speculative_tokens}, but {folder} ({stored.model_type}) "
                "has no MTP layer to draft with: leave it out, or use a checkpoint whose num_nextn_predict_layers is 1"
            )
        self._ranks, self._team = ALONE if ranks is None else checked_ranks(ranks), team
        self._seqs_per_replica = self.options.seqs_per_replica(self._ranks.size("dp"))
        loaded = stored if speculates else without_mtp(stored)
        placements = self._placements(loaded)
        num_blocks = self._plan_blocks(loaded, placements)
        self.model: Model = load(
            folder,
            dtype=self.options.dtype,
            mtp=speculates,
            plan=plan,
            ranks=ranks,
            placements=placements,
            check_sha256=check_sha256,
            progress=progress,
            shard_cache=shard_cache,
        )
        self.engine = self._build_engine(num_blocks)
        self.num_weight_updates = 0
        if team is not None:
            team.agree("being loaded", 1)
        if warm_up:
            self.warm_up(progress=progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_text: TextListener | None = None,
    ) -> list[Output]:
        """Answers in the order of the prompts, `n` each.

        prompts: one text, one list or array of token ids, or a list of either; texts get the tokenizer's BOS, if any.
        sampling: one for all or one per prompt; default: the checkpoint's generation_config.json.
        on_text: called as text becomes final, for streaming.
        PromptError, SamplingError or TokenizerError before anything runs; an answer whose numbers break ends with
        finish_reason "error" and leaves the others alone.
        """
        batch = _as_prompts(prompts)
        token_ids = [self._encode(prompt) for prompt in batch]
        prepared = [(ids, Start.CLOSED) for ids in token_ids]
        return self._run(prepared, self._params_for(sampling, len(batch)), on_text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_text: TextListener | None = None,
    ) -> list[Output]:
        """As `generate`, for one conversation or a list of them, rendered by the checkpoint's chat template.

        messages: OpenAI's form, [{"role": "user", "content": "..."}]. tools and chat_template_kwargs go to the
        template as they are. A constraint is in force after the thinking, as the rendered prompt leaves it.
        """
        conversations = _as_conversations(messages)
        token_ids = [
            self.model.chat.encode(conversation, tools=tools, template_kwargs=chat_template_kwargs)
            for conversation in conversations
        ]
        chat, with_tools = self.model.chat, bool(tools)
        prepared = [(ids, chat.start_of_answer(ids, with_tools=with_tools)) for ids in token_ids]
        return self._run(prepared, self._params_for(sampling, len(token_ids)), on_text)

    def default_sampling(self, **explicit: Any) -> SamplingParams:
        """Sampling parameters of the checkpoint's generation_config.json, with `explicit` ones on top."""
        return SamplingParams.from_generation_config(self.model.generation, **explicit)

    def warm_up(self, *, progress: bool | None = None) -> None:
        """Compile every planned shape; prints a table of buckets, seconds and padding unless progress is False."""
        self.engine.runner.warm_up(None if progress is False else print)

    def update_weights(self, tree: Tree) -> None:
        """New weights without recompiling: the canonical tree (`msds.load(...)`'s spec) as NumPy arrays.

        Checked as a whole before anything changes (CheckpointError). What is being generated goes on, recomputed; the
        first token after the return comes from the new weights. Call it between steps, from the thread that generates.
        """
        self.engine.runner.update_weights(tree)
        self.engine.invalidate()
        self.num_weight_updates += 1

    def _run(
        self,
        prompts: Sequence[tuple[Sequence[int], Start]],
        params: Sequence[SamplingParams],
        on_text: TextListener | None,
    ) -> list[Output]:
        if self.engine.has_work or self.engine.is_driven:
            raise OptionError(
                "this LLM is generating already, or an AsyncEngine has it: one call at a time; AsyncEngine.generate "
                "serves several"
            )
        for ids, _ in prompts:
            check_token_ids(ids, self.model.config.vocab_size)
        # all of them before anything runs; the references keep them ready
        _grammars = [self.engine.compile(one.constraint) for one in params if one.constraint is not None]
        outputs: list[Output] = []

        def listen(sequence: GenerationSequence, delta: Delta) -> None:
            if on_text is not None and delta.text:
                on_text(sequence.info.prompt_index, sequence.choice_index, delta.text)
            if delta.finish_reason is not None:
                outputs.append(sequence.output())

        try:
            for index, ((ids, start), sampling) in enumerate(zip(prompts, params, strict=True)):
                self.engine.add(ids, sampling, listen, RequestInfo(prompt_index=index, start=start))
            while self.engine.step():
                pass
        finally:
            self.engine.abort_all()  # after an error or an interrupt nothing may keep its blocks
        return sorted(outputs, key=lambda output: (output.prompt_index, output.choice_index))

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.model.tokenizer is None:
            raise TokenizerError(f"{self.model.folder} has no tokenizer.json: give the prompt as token ids")
        return self.model.tokenizer.encode(prompt)

    def _params_for(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling is None:
            sampling = self.default_sampling()
        if isinstance(sampling, SamplingParams):
            sampling = [sampling] * count
        if not isinstance(sampling, Sequence) or not all(isinstance(one, SamplingParams) for one in sampling):
            raise SamplingError(f"sampling is {sampling!r}: give SamplingParams, or one for each prompt")
        if len(sampling) != count:
            raise SamplingError(f"{len(sampling)} sampling parameters for {count} prompts: give one, or one for each")
        if self.model.tokenizer is None and any(params.stop for params in sampling):
            raise SamplingError("stop strings need a tokenizer, which this folder lacks: use stop_token_ids")
        return list(sampling)

    def _placements(self, config: ModelConfig) -> tuple[ExpertPlacement, ...]:
        """Where experts are at first, if they are to be balanced; OptionError where they cannot be."""
        if not self.options.eplb_step_interval:
            return ()
        try:
            return spread_experts(
                config, self._ranks.plan, self.options.num_redundant_experts, nodes=self._num_machines
            )
        except GraphError as error:
            raise OptionError(str(error)) from None

    @property
    def _num_machines(self) -> int:
        """Those that the ranks are on; one where nobody has said."""
        return 1 if self._team is None else self._team.place.ranks // self._team.place.ranks_here

    def _plan_blocks(self, config: ModelConfig, placements: Sequence[ExpertPlacement]) -> int:
        """Cache blocks of a replica, decided from the config alone, before any weights are read; equal on all ranks."""
        dtype, specs = self.options.resolved_dtype, model_specs(config)
        sharing = 1 if self._team is None else self._team.place.ranks_here
        blocks = replace(self.options, max_num_seqs=self._seqs_per_replica).plan_blocks(
            max_model_len=self.max_model_len,
            block_bytes=self._bytes(specs.cache_spec(config, 1, self.options.block_size, dtype), config),
            weight_bytes=self._held_bytes(config, placements),
            free_bytes=free_memory_bytes() // sharing,
        )
        return blocks if self._team is None else self._team.agree("cache blocks", blocks)

    def _bytes(self, spec_tree: Tree, config: ModelConfig) -> int:
        """Bytes of what this process holds of a tree."""
        try:
            return rank_bytes(spec_tree, config, self._ranks)
        except GraphError as error:
            raise OptionError(str(error)) from None

    def _held_bytes(self, config: ModelConfig, placements: Sequence[ExpertPlacement]) -> int:
        """Bytes of this process's weights, with what balancing experts adds: slots, tables and counters."""
        try:
            held = held_spec(config, self.options.resolved_dtype, Plan(ranks=self._ranks), placements)
        except GraphError as error:
            raise OptionError(str(error)) from None
        return tree_bytes(held) + (expert_counts_spec(config).nbytes if placements else 0)

    def _build_engine(self, num_blocks: int) -> Engine:
        options = self.options
        num_drafts = options.num_speculative_tokens
        prefill_buckets, decode_buckets = step_ladders(
            max_model_len=self.max_model_len,
            max_num_seqs=self._seqs_per_replica,
            prefill_chunk=options.prefill_chunk,
            block_size=options.block_size,
            num_drafts=num_drafts,
            one_shape=options.deterministic,
        )
        runner = self._make_runner(
            num_blocks=num_blocks,
            block_size=options.block_size,
            prefill_buckets=prefill_buckets,
            decode_buckets=decode_buckets,
            num_drafts=num_drafts,
            counts_experts=options.eplb_step_interval > 0,
        )
        chunk_sizes = tuple(sorted({bucket["Q"] for bucket in prefill_buckets}))
        policy = SchedulerPolicy(
            max_num_seqs=self._seqs_per_replica,
            chunk_sizes=chunk_sizes,
            shared=shared_prefill(prefill_buckets, options.block_size),
            max_waiting=options.max_waiting,
            prefix_cache=not options.deterministic,
        )
        speculation = Speculation(num_drafts) if num_drafts else None
        balance = None
        if options.eplb_step_interval:
            nodes, groups = expert_topology(self.model.config, self._ranks.plan, self._num_machines)
            balance = ExpertBalance(options.eplb_step_interval, nodes=nodes, groups=groups)
        return Engine(runner, max_model_len=self.max_model_len, policy=policy, speculation=speculation, balance=balance)

    def _make_runner(self, **options: Any) -> Runner:
        from msds.engine.ranks import LeadingRunner
        from msds.engine.runner import Runner
        from msds.launch.team import Leader

        if isinstance(self._team, Leader):
            return LeadingRunner(self.model, team=self._team, **options)
        return Runner(self.model, **options)


def _engine_options(options: Mapping[str, Any]) -> EngineOptions:
    known = [field.name for field in fields(EngineOptions)]
    for name in options:
        if name not in known:
            raise OptionError(f"option {name!r} is unknown: the options are {', '.join(known)}")
    return EngineOptions(**options)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes) or len(prompts) == 0:
        raise PromptError("no prompts: give a text, a list of token ids, or a list of either")
    if all(isinstance(item, (int, np.integer)) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    items = [item.tolist() if isinstance(item, np.ndarray) else item for item in prompts]
    for index, item in enumerate(items):
        if not isinstance(item, (str, Sequence)) or isinstance(item, bytes):
            raise PromptError(f"prompt {index} is {item!r}: give a text or a list of token ids")
    return items  # type: ignore[return-value]


def _as_conversations(messages: Any) -> list[Sequence[Mapping[str, Any]]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) == 0:
        raise PromptError('no messages: give a list such as [{"role": "user", "content": "..."}]')
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def _restrict_cores(count: int, part: int) -> None:
    """Let every thread of this process, and those to come, run on `count` of its cores only, those of its part.

    MindSpore sizes its thread pools by the cores it sees; its own settings for fewer threads change nothing on a CPU.
    """
    cores = sorted(os.sched_getaffinity(0))
    own = cores[part * count : (part + 1) * count]
    if len(own) < count:
        asked = f"threads is {count}" if part == 0 else f"threads is {count} for each of at least {part + 1} processes"
        raise OptionError(f"{asked}: this process may use {len(cores)} cores")
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), own)
