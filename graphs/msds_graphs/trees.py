"""Tree algebra: nested dict / tuple with anything else as leaves.

A list is accepted wherever a tuple is and becomes a tuple. A named tuple is a node whose children carry its
field names. A dict is flattened in insertion order, and two dicts with the same keys are the same structure
whatever their order: every function that takes several trees pairs leaves by key, never by position.

The path of a leaf joins keys and indices by dots: `layers.3.self_attn.q_a_proj.weight`. So that a path reads
back unambiguously, dict keys are non-empty strings without a dot that are not all digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msds_graphs.errors import GraphError

Tree: TypeAlias = Any
"""A leaf, a dict of trees keyed by strings, or a tuple of trees; recursive, so the checker sees Any."""


@dataclass(frozen=True)
class TreeDef:
    """The structure of a tree without its leaves.

    kind: dict, tuple, a named tuple class, or None for a leaf; keys: the children's names, in order.
    """

    kind: type | None
    keys: tuple[str, ...] = ()
    children: tuple[TreeDef, ...] = ()
    num_leaves: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        count = 1 if self.kind is None else sum(child.num_leaves for child in self.children)
        object.__setattr__(self, "num_leaves", count)

    @property
    def depth(self) -> int:
        """How many nodes lie between the root and the deepest leaf, the root included; 0 for a leaf."""
        return 0 if self.kind is None else 1 + max((child.depth for child in self.children), default=0)

    def paths(self, prefix: str = "") -> tuple[str, ...]:
        """The path of each leaf, in flattening order."""
        if self.kind is None:
            return (prefix,)
        return tuple(
            path for key, child in zip(self.keys, self.children, strict=True) for path in child.paths(join(prefix, key))
        )


LEAF = TreeDef(None)


def join(prefix: str, key: str) -> str:
    """`prefix.key`, or `key` at the root."""
    return f"{prefix}.{key}" if prefix else key


def at(path: str) -> str:
    """Where a path is, for messages: `at 'layers.0.bias'`, or `at the root`."""
    return f"at {path!r}" if path else "at the root"


def is_named_tuple(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _is_node(tree: Tree) -> bool:
    return isinstance(tree, (dict, tuple, list))


def _node_kind(tree: Tree) -> type:
    if isinstance(tree, dict):
        return dict
    return type(tree) if is_named_tuple(tree) else tuple


def _child_items(tree: Tree, path: str) -> list[tuple[str, Tree]]:
    if isinstance(tree, dict):
        for key in tree:
            _check_key(key, path)
        return list(tree.items())
    if is_named_tuple(tree):
        return list(zip(tree._fields, tree, strict=True))
    return [(str(index), child) for index, child in enumerate(tree)]


def _check_key(key: object, path: str) -> None:
    if not isinstance(key, str) or not key or "." in key or key.isdecimal():
        raise GraphError(
            f"dict key {key!r} {at(path)} cannot be in a path: keys are strings, not empty, "
            "without '.' and not all digits (use a tuple for numbered children)"
        )


def tree_flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    """The leaves in order, and the structure that `tree_unflatten` puts them back into."""
    leaves: list[Any] = []
    return leaves, _flatten_into(leaves, tree, "")


def _flatten_into(leaves: list[Any], tree: Tree, path: str) -> TreeDef:
    if not _is_node(tree):
        leaves.append(tree)
        return LEAF
    items = _child_items(tree, path)
    children = tuple(_flatten_into(leaves, child, join(path, key)) for key, child in items)
    return TreeDef(_node_kind(tree), tuple(key for key, _ in items), children)


def tree_structure(tree: Tree) -> TreeDef:
    return tree_flatten(tree)[1]


def tree_unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    """The tree of structure `treedef` with these leaves; GraphError when their number differs."""
    given = list(leaves)
    if len(given) != treedef.num_leaves:
        raise GraphError(f"{len(given)} leaves for a tree of {treedef.num_leaves}: pass one leaf per path")
    return _unflatten(treedef, iter(given))


def _unflatten(treedef: TreeDef, leaves: Iterator[Any]) -> Tree:
    kind = treedef.kind
    if kind is None:
        return next(leaves)
    children = [_unflatten(child, leaves) for child in treedef.children]
    if kind is dict:
        return dict(zip(treedef.keys, children, strict=True))
    return tuple(children) if kind is tuple else kind(*children)


def tree_flatten_as(treedef: TreeDef, tree: Tree, what: str = "tree") -> list[Any]:
    """The leaves of `tree` in the order of `treedef`; GraphError naming the first path where they differ."""
    leaves: list[Any] = []
    _flatten_as(leaves, treedef, tree, "", what)
    return leaves


def _flatten_as(leaves: list[Any], treedef: TreeDef, tree: Tree, path: str, what: str) -> None:
    kind = treedef.kind
    if kind is None:
        if _is_node(tree):
            raise GraphError(f"{what} {at(path)}: expected a leaf, got {describe(tree)}")
        leaves.append(tree)
        return
    if kind is dict:
        if not isinstance(tree, dict) or tree.keys() != set(treedef.keys):
            raise GraphError(_mismatch(treedef, tree, path, what))
        for key, child in zip(treedef.keys, treedef.children, strict=True):
            _flatten_as(leaves, child, tree[key], join(path, key), what)
        return
    if not _is_node(tree) or _node_kind(tree) is not kind or len(tree) != len(treedef.keys):
        raise GraphError(_mismatch(treedef, tree, path, what))
    for key, child, value in zip(treedef.keys, treedef.children, tree, strict=True):
        _flatten_as(leaves, child, value, join(path, key), what)


def _mismatch(treedef: TreeDef, tree: Tree, path: str, what: str) -> str:
    where = f"{what} at {path!r}" if path else what
    if treedef.kind is dict and isinstance(tree, dict):
        missing = [key for key in treedef.keys if key not in tree]
        extra = [key for key in tree if key not in treedef.keys]
        parts = [f"lacks {missing}"] * bool(missing) + [f"has unknown {extra}"] * bool(extra)
        return f"{where}: {' and '.join(parts)}; its keys are {list(treedef.keys)}"
    assert treedef.kind is not None
    return f"{where}: expected {_describe_def(treedef)}, got {describe(tree)}"


def _describe_def(treedef: TreeDef) -> str:
    if treedef.kind is dict:
        return f"a dict with keys {list(treedef.keys)}"
    name = "tuple" if treedef.kind is tuple else getattr(treedef.kind, "__name__", "")
    return f"a {name} of {len(treedef.keys)}"


def describe(tree: Tree) -> str:
    """A short phrase for error messages: the kind of node, or the leaf's type."""
    if isinstance(tree, dict):
        return f"a dict with keys {list(tree)}"
    if _is_node(tree):
        return f"a {_node_kind(tree).__name__} of {len(tree)}"
    return f"a {type(tree).__name__}"


def tree_map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """f(leaf, *leaves of rest) on every leaf; GraphError naming the first path where a structure differs."""
    leaves, treedef = tree_flatten(tree)
    others = [tree_flatten_as(treedef, other, f"tree {number}") for number, other in enumerate(rest, 2)]
    return tree_unflatten(treedef, (f(*row) for row in zip(leaves, *others, strict=True)))


def tree_items(tree: Tree) -> list[tuple[str, Any]]:
    """(path, leaf) pairs in flattening order; the path of a tree that is one leaf is ""."""
    leaves, treedef = tree_flatten(tree)
    return list(zip(treedef.paths(), leaves, strict=True))


def tree_from_items(pairs: Iterable[tuple[str, Any]]) -> Tree:
    """The tree with these (path, leaf) pairs: the inverse of `tree_items`.

    A node whose children are named 0..n-1 is a tuple, any other a dict in order of first appearance (so named
    tuples come back as dicts, and empty containers, which have no leaf, do not come back). GraphError for a
    path given twice, a path that is both a leaf and a node, and indices with gaps.
    """
    root: dict[str, Any] = {}
    for path, leaf in pairs:
        if not path or root.get("") is not None:
            if root:
                raise GraphError(f"path {path!r}: a tree that is one leaf (path '') has no other path")
            root[""] = _Boxed(leaf)
            continue
        _insert(root, path, leaf)
    return root[""].leaf if "" in root else _close(root, "")


@dataclass(frozen=True)
class _Boxed:
    """A leaf while the tree is under construction: it may itself be a dict or a tuple's subclass."""

    leaf: Any


def _insert(root: dict[str, Any], path: str, leaf: Any) -> None:
    *parents, last = path.split(".")
    node = root
    for key in parents:
        node = node.setdefault(key, {})
        if isinstance(node, _Boxed):
            raise GraphError(f"path {path!r} runs through {key!r}, which is a leaf itself")
    if last in node:
        raise GraphError(f"path {path!r} is given twice, or is a leaf and a node at once")
    node[last] = _Boxed(leaf)


def _close(node: dict[str, Any], path: str) -> Tree:
    closed = {
        key: child.leaf if isinstance(child, _Boxed) else _close(child, join(path, key)) for key, child in node.items()
    }
    if not closed or not all(key.isdecimal() for key in closed):
        for key in closed:
            _check_key(key, path)
        return closed
    expected = [str(index) for index in range(len(closed))]
    if sorted(closed, key=int) != expected:
        raise GraphError(f"indices {sorted(closed)} {at(path)} are not 0..{len(closed) - 1}")
    return tuple(closed[key] for key in expected)


def tree_get(tree: Tree, path: str) -> Tree:
    """The leaf or subtree at `path`; GraphError naming the first step that does not exist and what does."""
    node, done = tree, ""
    for key in path.split(".") if path else ():
        children = dict(_child_items(node, done)) if _is_node(node) else {}
        if key not in children:
            raise GraphError(f"no {key!r} {at(done)}: there is {_choices(children)}")
        node, done = children[key], join(done, key)
    return node


def _choices(children: dict[str, Tree]) -> str:
    names: Sequence[str] = list(children)
    if not names:
        return "a leaf"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
