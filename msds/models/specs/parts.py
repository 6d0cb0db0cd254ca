"""The part of every array that one rank holds: for loading it, for cutting it from a whole tree, for its shape."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from msds.config import DeepseekConfig, ModelConfig
from msds.models.specs import tree_bytes
from msds.models.specs.placement import ExpertPlacement, balance_experts
from msds.models.specs.rules import check_plan, is_executed, sharding_rules
from msds_graphs.errors import GraphError
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan, rank_shards
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import Tree, tree_flatten, tree_unflatten

_EXPERTS = re.compile(r"(layers|mtp)\.(\d+)\.mlp\.experts\.\w+")


@dataclass(frozen=True)
class Part:
    """index: the slice of the whole array; experts: rows held along axis 0 instead, in this order; padding: rows of
    zeros after that."""

    index: tuple[slice, ...]
    experts: tuple[int, ...] | None = None
    padding: int = 0

    def cut(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The part of a whole array, as an array of its own."""
        if self.experts is not None:
            narrow = (slice(None), *self.index[1:])
            return np.ascontiguousarray(array[list(self.experts)][narrow])
        held = array[self.index]
        if not self.padding:
            return np.ascontiguousarray(held)
        return np.concatenate((held, np.zeros((self.padding, *held.shape[1:]), held.dtype)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part, padding included."""
        shape = [part.stop - part.start for part in self.index]
        if self.experts is not None:
            shape[0] = len(self.experts)
        return (shape[0] + self.padding, *shape[1:])


def rank_parts(
    spec_tree: Tree, config: ModelConfig, ranks: Ranks, placements: Sequence[ExpertPlacement] = ()
) -> dict[str, Part]:
    """Path -> part of each array of a spec tree (weights or cache). GraphError for a plan that cannot be executed.

    placements: one per MoE layer, the layers of `mtp` last; none: runs of experts.
    """
    if not is_executed(ranks.plan):
        raise GraphError(f"plan {ranks.plan}: pp is planned but not executed; use dp, tp and ep")
    check_plan(config, ranks.plan)
    check_placements(config, ranks, placements)
    shards = rank_shards(spec_tree, sharding_rules(config), ranks.plan, ranks.rank)
    parts = {}
    for path, shard in shards.items():
        assert not any(shard.padding[1:]), f"{path} is padded along {shard.padding}"
        parts[path] = Part(shard.index, None, shard.padding[0])
        if placements and (match := _EXPERTS.fullmatch(path)):
            held = placements[moe_layers(config).index((match[1], int(match[2])))].slots[ranks.index("ep")]
            parts[path] = replace(parts[path], experts=held)
    return parts


def moe_layers(config: ModelConfig) -> list[tuple[str, int]]:
    """Where the MoE layers of a tree are: ("layers" or "mtp", number)."""
    if not isinstance(config, DeepseekConfig) or not config.n_routed_experts:
        return []
    main = [("layers", i) for i in range(config.num_hidden_layers) if config.is_moe_layer(i)]
    return main + [("mtp", i) for i in range(config.num_nextn_predict_layers)]


def spread_experts(
    config: ModelConfig, plan: ShardPlan, num_redundant: int, *, nodes: int = 1
) -> tuple[ExpertPlacement, ...]:
    """A placement per MoE layer before anything is known of their load, with `num_redundant` slots more than experts.

    nodes: machines that the ranks are on. GraphError as `check_redundant`.
    """
    check_redundant(config, plan, num_redundant)
    assert isinstance(config, DeepseekConfig)
    experts, (ep_nodes, groups) = config.n_routed_experts, expert_topology(config, plan, nodes)
    slots = (experts + num_redundant) // plan.ep
    first = balance_experts([1.0] * experts, plan.ep, slots, nodes=ep_nodes, groups=groups)
    return (first,) * len(moe_layers(config))


def check_redundant(config: ModelConfig, plan: ShardPlan, num_redundant: int) -> None:
    """GraphError where there are no experts, one rank holds them all, or the slots cannot be dealt to the ranks."""
    if not moe_layers(config):
        raise GraphError(f"{config.model_type} as configured has no routed experts: there is nothing to balance")
    assert isinstance(config, DeepseekConfig)
    experts, ep = config.n_routed_experts, plan.ep
    if ep == 1:
        raise GraphError(
            f"plan {plan} has no ep: all experts of a layer are on each rank, and there is nothing to balance; "
            "use several ranks with a plan such as tp2.ep2"
        )
    if (experts + num_redundant) % ep:
        raise GraphError(
            f"num_redundant_experts is {num_redundant}: {experts} experts and {num_redundant} replicas cannot be dealt "
            f"evenly to {ep} ranks of ep; use {num_redundant - (experts + num_redundant) % ep + ep}"
        )
    if num_redundant > experts * (ep - 1):
        raise GraphError(
            f"num_redundant_experts is {num_redundant}: with {experts * (ep - 1)} each of {ep} ranks holds all "
            f"{experts} experts already"
        )


def expert_topology(config: ModelConfig, plan: ShardPlan, nodes: int) -> tuple[int, int]:
    """(nodes, groups) for `balance_experts`, of a plan on so many machines with as many consecutive ranks each.

    One node where the ranks that hold an expert together are on several; one group where a token may choose of all.
    """
    ranks_here, rest = plan.ranks // nodes, plan.stage_ranks // plan.ep
    is_cut = plan.ranks % nodes or ranks_here % rest or plan.stage_ranks % ranks_here
    groups = 1
    if isinstance(config, DeepseekConfig) and config.topk_method != "greedy" and config.topk_group < config.n_group:
        groups = config.n_group
    return 1 if is_cut else plan.stage_ranks // ranks_here, groups


def with_slots(spec_tree: Tree, num_redundant: int) -> Tree:
    """The spec tree of weights with so many more expert slots per layer than experts, over all ranks."""
    leaves, structure = tree_flatten(spec_tree)
    pairs = zip(structure.paths(), leaves, strict=True)
    return tree_unflatten(
        structure,
        [
            replace(leaf, shape=(leaf.shape[0] + num_redundant, *leaf.shape[1:])) if _EXPERTS.fullmatch(path) else leaf
            for path, leaf in pairs
        ],
    )


def expert_counts_spec(config: ModelConfig) -> ArraySpec:
    """What a cache holds beside its pages where experts are counted: [MoE layers, experts], those of `mtp` last."""
    return ArraySpec((len(moe_layers(config)), getattr(config, "n_routed_experts", 0)), "int32")


def check_placements(config: ModelConfig, ranks: Ranks, placements: Sequence[ExpertPlacement]) -> None:
    """GraphError unless there are none, or one per MoE layer that fits the model and the plan."""
    if not placements:
        return
    layers = moe_layers(config)
    if len(placements) != len(layers):
        raise GraphError(f"{len(placements)} placements of experts are given, the model has {len(layers)} MoE layers")
    for (name, number), placement in zip(layers, placements, strict=True):
        assert isinstance(config, DeepseekConfig)
        if (placement.num_experts, placement.ranks) != (config.n_routed_experts, ranks.plan.ep):
            raise GraphError(
                f"the placement of {name}.{number} is of {placement.num_experts} experts on {placement.ranks} ranks: "
                f"the model has {config.n_routed_experts}, the plan {ranks.plan} {ranks.plan.ep}"
            )


def local_specs(spec_tree: Tree, parts: Mapping[str, Part]) -> Tree:
    """The spec tree with the shapes that the rank holds."""
    leaves, structure = tree_flatten(spec_tree)
    return tree_unflatten(
        structure,
        [replace(leaf, shape=parts[path].shape) for path, leaf in zip(structure.paths(), leaves, strict=True)],
    )


def rank_bytes(spec_tree: Tree, config: ModelConfig, ranks: Ranks, placements: Sequence[ExpertPlacement] = ()) -> int:
    """Bytes of what the rank holds of a spec tree. GraphError as `rank_parts`."""
    return tree_bytes(local_specs(spec_tree, rank_parts(spec_tree, config, ranks, placements)))


def cut_tree(tree: Tree, parts: Mapping[str, Part]) -> Tree:
    """The rank's part of a whole tree of NumPy arrays."""
    leaves, structure = tree_flatten(tree)
    return tree_unflatten(
        structure, [parts[path].cut(leaf) for path, leaf in zip(structure.paths(), leaves, strict=True)]
    )


def with_tables(tree: Tree, config: ModelConfig, placements: Sequence[ExpertPlacement]) -> Tree:
    """The tree with the tables of each MoE layer's placement beside its experts; the tree itself without placements."""
    if not placements:
        return tree
    layers: dict[str, list[Any]] = {"layers": list(tree["layers"]), "mtp": list(tree["mtp"])}
    for (name, number), placement in zip(moe_layers(config), placements, strict=True):
        layer = layers[name][number]
        experts = layer["mlp"]["experts"] | placement.tables()
        layers[name][number] = layer | {"mlp": layer["mlp"] | {"experts": experts}}
    return tree | {name: tuple(rows) for name, rows in layers.items()}
