"""Tree algebra: round trips over random trees, pairing by key, and errors that name the path."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.errors import GraphError
from msds_graphs.trees import (
    tree_flatten,
    tree_flatten_as,
    tree_from_items,
    tree_get,
    tree_items,
    tree_map,
    tree_structure,
    tree_unflatten,
)

LEAVES = st.integers() | st.none() | st.text(max_size=3)
KEYS = st.text("abcxyz_01", min_size=1, max_size=4).filter(lambda key: not key.isdecimal())


def trees(*, empty: bool) -> st.SearchStrategy[Any]:
    least = 0 if empty else 1
    return st.recursive(
        LEAVES,
        lambda children: (
            st.dictionaries(KEYS, children, min_size=least, max_size=4)
            | st.lists(children, min_size=least, max_size=4).map(tuple)
        ),
        max_leaves=12,
    )


class Pair(NamedTuple):
    left: Any
    right: Any


@given(trees(empty=True))
def test_flatten_and_unflatten_are_inverse(tree: Any) -> None:
    leaves, structure = tree_flatten(tree)
    assert structure.num_leaves == len(leaves) == len(structure.paths())
    assert tree_unflatten(structure, leaves) == tree


@given(trees(empty=False))
def test_items_and_from_items_are_inverse(tree: Any) -> None:
    assert tree_from_items(tree_items(tree)) == tree
    for path, leaf in tree_items(tree):
        assert tree_get(tree, path) == leaf


@given(trees(empty=True), st.randoms(use_true_random=False))
def test_key_order_does_not_matter_when_trees_are_paired(tree: Any, random: Any) -> None:
    def shuffled(node: Any) -> Any:
        if isinstance(node, dict):
            items = list(node.items())
            random.shuffle(items)
            return {key: shuffled(child) for key, child in items}
        return tuple(map(shuffled, node)) if isinstance(node, tuple) else node

    pairs = tree_map(lambda left, right: left == right, tree, shuffled(tree))
    assert all(tree_flatten(pairs)[0])


def test_flattening_follows_insertion_order_and_lists_become_tuples() -> None:
    tree = {"b": [1, {"z": 2, "a": 3}], "a": (4,)}
    assert tree_items(tree) == [("b.0", 1), ("b.1.z", 2), ("b.1.a", 3), ("a.0", 4)]
    assert tree_map(lambda leaf: leaf, tree) == {"b": (1, {"z": 2, "a": 3}), "a": (4,)}


def test_a_named_tuple_is_a_node_that_keeps_its_class() -> None:
    tree = {"p": Pair(1, (2,))}
    assert tree_items(tree) == [("p.left", 1), ("p.right.0", 2)]
    assert tree_map(lambda leaf: leaf * 10, tree) == {"p": Pair(10, (20,))}
    with pytest.raises(GraphError, match="'p': expected a Pair of 2, got a tuple of 2"):
        tree_map(lambda a, b: a, tree, {"p": (1, (2,))})


def test_a_single_leaf_is_a_tree() -> None:
    assert tree_items(7) == [("", 7)]
    assert tree_from_items([("", 7)]) == 7
    assert tree_get(7, "") == 7
    assert tree_structure(7).depth == 0
    assert tree_structure({"a": ({"b": 1},)}).depth == 3


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": 1, "c": 2}, r"tree 2: lacks \['b'\] and has unknown \['c'\]"),
        ({"a": 1}, r"tree 2: lacks \['b'\]"),
        ({"a": 1, "b": {"x": 3, "y": 4}}, r"tree 2 at 'b': has unknown \['y'\]"),
        ({"a": (1,), "b": {"x": 3}}, "tree 2 at 'a': expected a leaf, got a tuple of 1"),
        ({"a": 1, "b": 5}, r"tree 2 at 'b': expected a dict with keys \['x'\], got a int"),
    ],
)
def test_another_structure_is_named_by_path(other: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        tree_map(lambda a, b: a, {"a": 1, "b": {"x": 2}}, other)


@pytest.mark.parametrize("key", ["", "a.b", "3", 3, None])
def test_keys_that_would_make_paths_ambiguous_are_refused(key: Any) -> None:
    with pytest.raises(GraphError, match="dict key"):
        tree_flatten({"ok": {key: 1}})


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("a", 1), ("a", 2)], "'a' is given twice"),
        ([("a", 1), ("a.b", 2)], "runs through 'a', which is a leaf"),
        ([("a.b", 1), ("a", 2)], "'a' is given twice, or is a leaf and a node"),
        ([("l.0", 1), ("l.2", 2)], "indices .* at 'l'"),
        ([("", 1), ("a", 2)], "a tree that is one leaf"),
        ([("a", 1), ("", 2)], "a tree that is one leaf"),
        ([("l.0", 1), ("l.x", 2)], "dict key '0'"),
    ],
)
def test_items_that_make_no_tree_are_refused(pairs: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        tree_from_items(pairs)


def test_wrong_numbers_and_paths_are_refused() -> None:
    structure = tree_structure({"a": 1, "b": 2})
    with pytest.raises(GraphError, match="1 leaves for a tree of 2"):
        tree_unflatten(structure, [1])
    with pytest.raises(GraphError, match="no '5' at 'a': there is 0, 1"):
        tree_get({"a": (1, 2)}, "a.5")
    with pytest.raises(GraphError, match="there is a leaf"):
        tree_get({"a": 1}, "a.x")
    assert tree_flatten_as(structure, {"b": 20, "a": 10}) == [10, 20]
