"""Pure functions over trees become static graphs, one per shape bucket.

Names are resolved on first use: trees, specs, plans and buckets are host code and never import MindSpore.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "ArraySpec": "specs",
    "Bucket": "buckets",
    "Compiled": "compile",
    "GraphError": "errors",
    "Mesh": "mesh",
    "Plan": "plan",
    "Rules": "sharding",
    "ShardPlan": "sharding",
    "Tree": "trees",
    "TreeDef": "trees",
    "UnplannedShapeError": "errors",
    "assign": "binding",
    "bind": "binding",
    "compile_count": "counter",
    "count_compiles": "counter",
    "init_tree": "specs",
    "ladder": "buckets",
    "rank_shards": "sharding",
    "tree_flatten": "trees",
    "tree_from_items": "trees",
    "tree_get": "trees",
    "tree_items": "trees",
    "tree_map": "trees",
    "tree_unflatten": "trees",
    "value_and_grad": "grad",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'msds_graphs' has no attribute {name!r}")
    return getattr(import_module(f"msds_graphs.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
