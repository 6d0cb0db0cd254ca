"""A loaded model: the parameter tree, the pure functions over it, and the teacher-forced logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from msds.checkpoint import MANIFEST_NAME, verify_manifest
from msds.config import GenerationConfig, ModelConfig, max_context, read_config, read_generation_config
from msds.constraints.grammars import GrammarCompiler
from msds.errors import CheckpointError, OptionError, PlacementError, PromptError, TokenizerError
from msds.layouts import open_checkpoint
from msds.models import model_functions
from msds.models.specs.parts import (
    Part,
    check_placements,
    cut_tree,
    expert_counts_spec,
    local_specs,
    moe_layers,
    rank_parts,
)
from msds.models.specs.placement import ExpertPlacement
from msds.options import EngineOptions
from msds.text.chat_format import ChatFormat
from msds.text.token_ids import check_token_ids
from msds.text.tokenizer import Tokenizer, has_tokenizer
from msds.weights import (
    check_shard_cache,
    derived_tree,
    held_spec,
    load_weights,
    open_shard_cache,
    settle_mtp,
    stored_skips,
    through_cache,
)
from msds_graphs import exchange_limits
from msds_graphs.errors import GraphError
from msds_graphs.plan import Plan
from msds_graphs.ranks import Ranks
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import Tree, TreeDef, tree_flatten, tree_flatten_as, tree_unflatten
from msds_ops import IMPLEMENTATIONS


class Model:
    """What `load` returns.

    config: as loaded (MTP layers counted only if they are in the tree). params: the canonical tree with the derived
    leaves beside it (`derived_tree`), bound as MindSpore Parameters. functions: the module of pure functions (spec,
    cache_spec, forward, prefill, decode, and mtp and draft for DeepSeek). plan: which implementation each op uses, and
    the rank whose part of the model this is; placements: which rank holds which experts, per MoE layer. tokenizer, and
    grammars, which compiles constraints for it: None where the folder has none. generation: defaults of
    generation_config.json.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        params: Tree,
        plan: Plan,
        functions: ModuleType,
        dtype: str,
        placements: tuple[ExpertPlacement, ...] = (),
    ) -> None:
        from msds_graphs.binding import bind, fresh_prefix

        self.folder = folder
        self.config = config
        self.functions = functions
        self.plan = plan
        self.dtype = dtype
        self.placements = placements
        self.params = bind(params, fresh_prefix("params"))
        self.tokenizer: Tokenizer | None = Tokenizer.open(folder) if has_tokenizer(folder) else None
        self.grammars = None if self.tokenizer is None else GrammarCompiler(self.tokenizer)
        self._chat: ChatFormat | None = None
        self.generation: GenerationConfig = read_generation_config(folder)
        self._forward: Any = None

    @property
    def chat(self) -> ChatFormat:
        """How conversations are written, opened on first use; TokenizerError where there is no chat template."""
        if self._chat is None:
            if self.tokenizer is None:
                raise TokenizerError(
                    f"{self.folder} has no tokenizer: chat needs one; prompts of token ids work without"
                )
            self._chat = ChatFormat.open(self.folder, self.tokenizer)
        return self._chat

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text: of config.json, generation_config.json and the tokenizer together."""
        ids = {*self.config.eos_token_ids, *self.generation.eos_token_ids}
        if self.tokenizer is not None and self.tokenizer.eos_id is not None:
            ids.add(self.tokenizer.eos_id)
        return frozenset(ids)

    @property
    def allowed_vocab(self) -> int:
        """Ids below this may be chosen: those of the model that the tokenizer, where there is one, knows."""
        if self.tokenizer is None:
            return self.config.vocab_size
        return min(self.config.vocab_size, self.tokenizer.vocab_size)

    def cache_spec(self, num_blocks: int, block_size: int) -> Tree:
        """The paged cache of this rank before any array exists."""
        spec = self.functions.cache_spec(self.config, num_blocks, block_size, self.dtype)
        if self.plan.ranks.plan.ranks == 1:
            return spec
        return local_specs(spec, rank_parts(spec, self.config, self.plan.ranks))

    def expert_counts_spec(self) -> ArraySpec:
        """As `parts.expert_counts_spec`."""
        return expert_counts_spec(self.config)

    def logits(self, token_ids: Sequence[int], positions: Sequence[int] | None = None) -> npt.NDArray[np.float32]:
        """Teacher-forced logits of one text by the defining `forward`: [T] ids -> [T, vocab] float32.

        `positions` defaults to 0, 1, ...; they must ascend and stay below the model's context. PromptError otherwise.
        The first call of each length class (powers of four from 16) compiles a graph. A model of several ranks is
        called on all of them at once, with texts of one length class; each replica gets the logits of its own.
        """
        ids = check_token_ids(token_ids, self.config.vocab_size)
        try:
            places = np.arange(len(ids)) if positions is None else np.asarray(positions)
        except ValueError:
            raise PromptError("positions must be one list of whole numbers") from None
        if places.dtype.kind not in "iu":
            raise PromptError(f"positions are {places.dtype}: they must be whole numbers")
        if places.shape != ids.shape or (np.diff(places) < 1).any() or places[0] < 0:
            raise PromptError("positions must be as many as the token ids, ascending and not negative")
        if places[-1] >= max_context(self.config):
            raise PromptError(f"position {places[-1]} is outside the model's context of {max_context(self.config)}")
        batch = {
            "tokens": ids[None].astype(np.int32),
            "positions": places[None].astype(np.int32),
            "query_lens": np.array([len(ids)], np.int32),
        }
        logits: npt.NDArray[np.float32] = self._compiled_forward()(batch)["logits"][0]
        return logits

    def update_weights(self, tree: Tree) -> None:
        """Put new weights into every compiled step, without compiling: NumPy arrays in the canonical tree of `spec`.

        The whole tree is checked before anything changes: CheckpointError for another structure, shape or dtype, or a
        value that is not finite. A rank of several takes its part of the same whole tree.
        """
        from msds_graphs.binding import assign

        values, structure = self.checked_weights(tree)
        whole = tree_unflatten(structure, values)
        if self.plan.ranks.plan.ranks > 1:
            spec = self.functions.spec(self.config, self.dtype)
            whole = cut_tree(whole, rank_parts(spec, self.config, self.plan.ranks, self.placements))
        assign(self.params, derived_tree(whole, self.functions, self.config, self.placements))

    def checked_weights(self, tree: Tree) -> tuple[list[npt.NDArray[Any]], TreeDef]:
        """The leaves of new weights, and their structure, if they can be put in; CheckpointError otherwise."""
        try:
            leaves, structure = tree_flatten(self.functions.spec(self.config, self.dtype))
            values = tree_flatten_as(structure, tree, "the new weights")
        except GraphError as error:
            raise CheckpointError(f"new weights do not fit the model: {error}") from None
        for path, spec, value in zip(structure.paths(), leaves, values, strict=True):
            if not isinstance(value, np.ndarray) or value.shape != spec.shape or str(value.dtype) != spec.dtype:
                got = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
                raise CheckpointError(
                    f"new weights at {path}: {got} is given, {spec.dtype} {list(spec.shape)} is needed"
                )
            if not np.isfinite(value).all():
                raise CheckpointError(f"new weights at {path} hold a value that is not finite")
        return list(values), structure

    def weight_structure(self) -> TreeDef:
        """The structure of the canonical tree."""
        return tree_flatten(self.functions.spec(self.config, self.dtype))[1]

    def place_experts(self, placements: Sequence[ExpertPlacement]) -> None:
        """Move experts to other ranks between steps, without compiling; outputs stay the same. All ranks call it.

        placements: one per MoE layer, those of `mtp` last, of as many slots as the model was loaded with. OptionError
        for others, or for a model that was loaded without placements. PlacementError, on all ranks, where a layer
        cannot be moved on one: it and those after it stay as they are, those before it have moved, and `placements`
        says so. Layers are moved one after the other, each at once.
        """
        from msds.experts import move_experts

        if not self.placements:
            raise OptionError("this model was loaded without placements of experts: load it with placements=")
        try:
            check_placements(self.config, self.plan.ranks, placements)
        except GraphError as error:
            raise OptionError(str(error)) from None
        for old, new in zip(self.placements, placements, strict=True):
            if old.slots_per_rank != new.slots_per_rank:
                raise OptionError(
                    f"a placement has {new.slots_per_rank} slots per rank, the model was loaded with "
                    f"{old.slots_per_rank}: the number of slots is fixed"
                )
        for index, (name, number) in enumerate(moe_layers(self.config)):
            old, new = self.placements[index], placements[index]
            if old == new:
                continue
            try:
                move_experts(self.params[name][number]["mlp"]["experts"], old, new, self.plan.ranks)
            except PlacementError as error:
                raise PlacementError(f"experts of {name}.{number} stay where they are: {error}") from error
            self.placements = (*self.placements[:index], new, *self.placements[index + 1 :])

    def _compiled_forward(self) -> Any:
        if self._forward is None:
            from msds_graphs.compile import compile

            config, plan, definition = self.config, self.plan, self.functions.forward

            def forward(params, cache, batch):  # type: ignore[no-untyped-def]  # parsed by MindSpore
                return definition(params, batch, config, plan), cache

            lengths = [16]
            while lengths[-1] < max_context(config):
                lengths.append(min(4 * lengths[-1], max_context(config)))
            self._forward = compile(
                forward,
                bound=self.params,
                batch={
                    "tokens": ArraySpec((1, "Q"), "int32"),
                    "positions": ArraySpec((1, "Q"), "int32"),
                    "query_lens": ArraySpec((1,), "int32"),
                },
                buckets=[{"Q": length} for length in lengths],
                outputs={"logits": (None, "Q", None), "hidden": (None, "Q", None), "is_finite": (None, "Q")},
                name="forward",
            )
        return self._forward


def load(
    path: str | Path,
    *,
    dtype: str = "auto",
    mtp: bool | None = None,
    plan: Plan | None = None,
    ranks: Ranks | None = None,
    placements: Sequence[ExpertPlacement] = (),
    check_sha256: bool | None = None,
    progress: bool | None = None,
    shard_cache: str | Path | None = None,
) -> Model:
    """Load a folder: config.json, optionally a tokenizer, and safetensors of Hugging Face or a MindSpore training run.

    dtype: "auto" (float32 on a CPU) or "float32". mtp: load the MTP layers: None if they are stored, True or raise,
    False never. plan: implementation per op, default the portable ones. ranks: load only the part of this rank of a
    plan, `msds.Ranks(msds.ShardPlan.parse("tp2"), rank)`, from any checkpoint of the whole model; its collectives need
    `create_groups`. None: all on one rank.
    placements: which rank of `ep` holds which experts, one per MoE layer; none: runs of them. check_sha256: read every
    file once more and compare it with the manifest: None if the folder has SHA256SUMS, True with any known manifest or
    raise, False never. progress: show a bar; None on a terminal. shard_cache: a folder where what this rank holds is
    kept as it was converted, and read from when nothing has changed that shaped it; what is damaged there is made anew,
    and what a changed checkpoint leaves behind is removed.
    Raises ConfigError, CheckpointError, TokenizerError or OptionError before anything large is allocated.
    """
    # Nine parameters: all that decides what is loaded and how, by keyword.
    folder = Path(path)
    stored = read_config(path)
    plan = checked_plan(plan or Plan())
    if ranks is not None:
        plan = Plan(plan.impl, checked_ranks(ranks))
    resolved = EngineOptions(dtype=dtype).resolved_dtype
    if shard_cache is not None:
        check_shard_cache(shard_cache, folder)
    checkpoint = open_checkpoint(folder, stored)
    try:
        config = settle_mtp(checkpoint, stored, mtp)
        functions = model_functions(config)
        spec = functions.spec(config, resolved)
        parts = _parts(spec, config, plan.ranks, placements)
        kept = None
        if shard_cache is not None:
            kept = open_shard_cache(shard_cache, checkpoint, config, resolved, plan, placements)
        check_digests(folder, check_sha256, progress=progress)

        def convert() -> Tree:
            skipped = stored_skips(stored, config)
            canonical = load_weights(checkpoint, spec, config, skipped, parts, progress=progress)
            return derived_tree(canonical, functions, config, placements)

        if kept is None:
            params = convert()
        else:
            params = through_cache(kept, held_spec(config, resolved, plan, placements), convert, progress=progress)
    finally:
        checkpoint.close()
    return Model(folder, config, params, plan, functions, resolved, tuple(placements))


def _parts(
    spec: Tree, config: ModelConfig, ranks: Ranks, placements: Sequence[ExpertPlacement]
) -> dict[str, Part] | None:
    """What this rank holds, None for all; OptionError for a plan or placements that the model cannot follow."""
    if ranks.plan.ranks == 1 and placements:
        raise OptionError("placements of experts need ranks to place them on: give ranks=, or leave them out")
    try:
        return None if ranks.plan.ranks == 1 else rank_parts(spec, config, ranks, placements)
    except GraphError as error:
        raise OptionError(str(error)) from None


def check_digests(folder: Path, wanted: bool | None, *, progress: bool | None) -> None:
    """Compare files with their manifest as `load` says; CheckpointError when they differ or there is none to use."""
    if wanted is False or (wanted is None and not (folder / MANIFEST_NAME).is_file()):
        return
    if verify_manifest(folder, progress=progress) == 0:
        raise CheckpointError(
            f"{folder} has no sha256 manifest to check against: put a {MANIFEST_NAME} there, or leave the check out"
        )


def checked_ranks(ranks: object) -> Ranks:
    """What `ranks=` is given, if it can be that; OptionError otherwise."""
    if not isinstance(ranks, Ranks):
        raise OptionError(
            f'ranks is {ranks!r}: give one rank of a plan, such as msds.Ranks(msds.ShardPlan.parse("tp2"), rank=0), or '
            "leave it out for the whole model"
        )
    return ranks


def checked_plan(plan: Plan) -> Plan:
    """The plan, if every op it names exists and has the implementation; OptionError otherwise."""
    known = {**IMPLEMENTATIONS, "exchange": exchange_limits.IMPLEMENTATIONS}
    for op, implementation in plan.impl:
        if op not in known:
            raise OptionError(f"plan names op {op!r}: the ops with a choice are {', '.join(known)}")
        if implementation not in known[op]:
            raise OptionError(f"op {op} has no {implementation!r} implementation: use {', '.join(known[op])}")
    return plan
