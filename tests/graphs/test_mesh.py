"""Meshes: which sizes are legal, and which link a group of ranks spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_graphs.errors import GraphError
from msds_graphs.mesh import HARDWARE, MOST_RANKS, Mesh


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("cpu:3", 1, 3),
        ("a2:1", 1, 1),
        ("a2:4", 1, 4),
        ("a2:24", 3, 8),
        ("a3:1", 1, 1),
        ("a3:6", 1, 6),
        ("a3:48", 3, 16),
    ],
)
def test_legal_forms(text: str, nodes: int, per_node: int) -> None:
    mesh = Mesh.parse(text)
    assert (str(mesh), mesh.nodes, mesh.ranks_per_node) == (text, nodes, per_node)


@pytest.mark.parametrize("text", ["", "a2", "a2:", "a2:0", "a2:-8", "a2:x", "a4:8", "A2:8", "a2:8:8", "a2: 8", "a2:８"])
def test_anything_else_names_the_legal_forms(text: str) -> None:
    with pytest.raises(GraphError, match=r"cpu:N, a2:N .*whole nodes of 8.*, a3:N .*whole nodes of 16"):
        Mesh.parse(text)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("a2:13", "a2:8 and a2:16"), ("a2:3", "a2:2 and a2:4"), ("a3:3", "a3:2 and a3:4"), ("a3:17", "a3:16 and a3:32")],
)
def test_parts_of_nodes_name_the_nearest_sizes(text: str, nearest: str) -> None:
    with pytest.raises(GraphError, match=f"neither whole nodes of .* nor a legal part .*the nearest are {nearest}"):
        Mesh.parse(text)


@pytest.mark.parametrize("text", ["cpu:4097", "cpu:720720", "a2:1000000000", "a3:" + "9" * 5000])
def test_meshes_are_bounded(text: str) -> None:
    with pytest.raises(GraphError, match=f"^mesh {text[:8]}.* has too many ranks: at most {MOST_RANKS}$"):
        Mesh.parse(text)


def test_links_are_those_of_the_farthest_pair() -> None:
    a3 = Mesh.parse("a3:32")
    assert a3.link_kind([4]) is None
    assert a3.link_kind([4, 5]) == "package"
    assert a3.link_kind([5, 6]) == "node"
    assert a3.link_kind([0, 1, 15]) == "node"
    assert a3.link_kind([15, 16]) == "between"
    a2 = Mesh.parse("a2:16")
    assert a2.link_kind([0, 1]) == "node"
    assert a2.link_kind([7, 8]) == "between"
    assert Mesh.parse("cpu:4").link_kind([0, 3]) == "node"


@given(st.sampled_from(["a2", "a3"]), st.integers(1, 200))
def test_nodes_hold_equal_shares_and_larger_meshes_are_legal(kind: str, ranks: int) -> None:
    try:
        mesh = Mesh.parse(f"{kind}:{ranks}")
    except GraphError:
        return
    counts = [sum(mesh.node(rank) == node for rank in range(ranks)) for node in range(mesh.nodes)]
    assert set(counts) == {mesh.ranks_per_node}
    larger = mesh.larger()
    assert larger.ranks > ranks
    assert Mesh.parse(str(larger)) == larger


def test_hardware_is_what_is_published() -> None:
    """Atlas A2: eight NPUs a node. CloudMatrix384: a 910C package has 752 TFLOPS, 128 GB, 3.2 TB/s, two dies."""
    a2, a3 = HARDWARE["a2"], HARDWARE["a3"]
    assert a2.ranks_per_node == 8
    assert a2.memory_bytes == a3.memory_bytes == 64 * 2**30
    assert 2 * a3.flops["bfloat16"] == 752e12
    assert 2 * a3.flops["int8"] == 1504e12
    assert 2 * a3.memory_bandwidth == 3.2e12
    assert 2 * a3.links["node"].bandwidth == 392e9
