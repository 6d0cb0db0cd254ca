"""Mesh: the ranks that a model is spread over, what each of them can hold and do, and what joins them. Host code.

Written `cpu:N` (N processes of one machine), `a2:N` (N NPUs of Atlas A2 servers, 8 per node) or `a3:N` (N dies of
Atlas A3 servers, 16 per node, two dies to a package). Every number below is a peak of the hardware, not a speed that
was measured; none of it was run on an NPU by us.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msds_graphs.errors import GraphError

GIB = 1 << 30
MOST_RANKS = 4096
"""No larger mesh is taken: planning looks at every way to cut one, which takes seconds here and forever far beyond."""


@dataclass(frozen=True)
class Link:
    """What one rank can send while it receives as much. bandwidth: bytes per second; latency: seconds per message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Hardware:
    """One kind of rank and how ranks are packed. Sizes in bytes, rates per second.

    flops: dtype name -> multiply and add operations per second, each counted. links: "package", "node" and "between"
    (nodes) -> Link, as far as the kind has them. parts: how many ranks a job may take of one node.
    """

    kind: str
    rank_name: str
    ranks_per_package: int
    ranks_per_node: int | None
    memory_bytes: int | None
    memory_bandwidth: float
    flops: Mapping[str, float]
    links: Mapping[str, Link]
    parts: tuple[int, ...] = ()
    note: str = ""

    def __hash__(self) -> int:
        return hash(self.kind)


A2 = Hardware(
    kind="a2",
    rank_name="NPU",
    ranks_per_package=1,
    ranks_per_node=8,  # Atlas 800T A2, 800I A2: eight Ascend 910B (Huawei's product pages)
    memory_bytes=64 * GIB,  # npu-smi of the 64 GB models shows 65536 MB
    memory_bandwidth=1.6e12,  # 910B with 64 GB: 1.6 TB/s, widely quoted, Huawei prints none: estimate
    flops={
        "bfloat16": 313e12,  # 910B3: 8 of them are the 2.5 PFLOPS that Huawei prints for an Atlas 800T A2
        "float16": 313e12,
        "int8": 626e12,  # twice the rate of float16, as on the 910C: estimate
        "float32": 78e12,  # a quarter of float16: estimate
    },
    links={
        # seven HCCS links to the seven others, 56 GB/s each counted in both directions (392 GB/s): Huawei's figure
        "node": Link(bandwidth=196e9, latency=10e-6),  # latency of a small HCCL step: estimate
        "between": Link(bandwidth=25e9, latency=25e-6),  # one 200 Gbit/s RoCE port per NPU; latency: estimate
    },
    parts=(1, 2, 4, 8),  # what Ascend's job schedulers give out of a node of eight (MindCluster, affinity scheduling)
    note="a2: Ascend 910B3 with 64 GB",
)

A3 = Hardware(
    kind="a3",
    rank_name="die",
    ranks_per_package=2,
    ranks_per_node=16,  # eight 910C packages of two dies (CloudMatrix384, arXiv 2506.12708, section 3)
    memory_bytes=64 * GIB,  # the same section: 128 GB per package
    memory_bandwidth=1.6e12,  # the same section: 3.2 TB/s per package
    flops={
        "bfloat16": 376e12,  # the same section: 752 TFLOPS per package
        "float16": 376e12,
        "int8": 752e12,  # the same section: 1504 TOPS per package
        "float32": 94e12,  # a quarter of float16: estimate
    },
    links={
        "package": Link(bandwidth=270e9, latency=5e-6),  # the same section: 270 GB/s each way between the dies
        "node": Link(bandwidth=196e9, latency=10e-6),  # the same section: UB plane, 392 GB/s each way per package
        # UB reaches through the whole supernode; single A3 servers joined by RoCE alone have an eighth of this
        "between": Link(bandwidth=196e9, latency=12e-6),  # latencies: estimates
    },
    parts=(1, *range(2, 17, 2)),  # one die, or whole packages (MindCluster, affinity scheduling of A3)
    note="a3: Ascend 910C dies with 64 GB, nodes joined by the UB plane of a supernode",
)

CPU = Hardware(
    kind="cpu",
    rank_name="process",
    ranks_per_package=1,
    ranks_per_node=None,  # one machine
    memory_bytes=None,  # what is free on this machine, for its user to say
    memory_bandwidth=25e9,  # streaming float32 on the server cores that this project is measured on: estimate
    flops={"float32": 2e11},  # two such cores with AVX-512: estimate
    links={"node": Link(bandwidth=2e9, latency=1e-3)},  # MindSpore's CPU all-reduce, measured loosely: estimate
    note="cpu: one machine, rates of two server cores",
)

HARDWARE = {hardware.kind: hardware for hardware in (CPU, A2, A3)}
LEGAL_MESHES = (
    "cpu:N, a2:N (NPUs: 1, 2, 4 or 8 of one node, or whole nodes of 8), "
    "a3:N (dies: 1 or whole packages of 2 of one node, or whole nodes of 16)"
)


@dataclass(frozen=True)
class Mesh:
    """`ranks` ranks of one kind of hardware, numbered node by node and package by package."""

    hardware: Hardware
    ranks: int

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """`cpu:N`, `a2:N` or `a3:N`; GraphError with the legal forms, the nearest sizes or the bound, for the rest."""
        kind, _, count = text.partition(":")
        if kind not in HARDWARE or not count.isascii() or not count.isdigit() or not count.strip("0"):
            raise GraphError(f"mesh {text!r} is not one of {LEGAL_MESHES}, N from 1")
        digits = count.lstrip("0")
        if len(digits) > len(str(MOST_RANKS)) or int(digits) > MOST_RANKS:
            shown = digits if len(digits) < 20 else f"{digits[:20]}..."
            raise GraphError(f"mesh {kind}:{shown} has too many ranks: at most {MOST_RANKS}")
        hardware, ranks = HARDWARE[kind], int(digits)
        if not _is_legal(hardware, ranks):
            name, per_node = hardware.rank_name, hardware.ranks_per_node
            raise GraphError(
                f"mesh {text!r}: {ranks} {name}s are neither whole nodes of {per_node} nor a legal part of one node "
                f"({', '.join(map(str, hardware.parts))}); the nearest are "
                + " and ".join(f"{kind}:{size}" for size in _nearest(hardware, ranks))
            )
        return cls(hardware, ranks)

    def __str__(self) -> str:
        return f"{self.hardware.kind}:{self.ranks}"

    @property
    def nodes(self) -> int:
        """Servers."""
        per_node = self.hardware.ranks_per_node
        return 1 if per_node is None else -(-self.ranks // per_node)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of this mesh on each of its nodes."""
        return self.ranks // self.nodes

    def node(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.ranks_per_node

    def link_kind(self, ranks: Iterable[int]) -> str | None:
        """The farthest link that a group of ranks spans: "package", "node" or "between"; None for one rank."""
        group = list(ranks)
        if len(group) < 2:
            return None
        if len({self.node(rank) for rank in group}) > 1:
            return "between"
        packages = {rank // self.hardware.ranks_per_package for rank in group}
        return "package" if len(packages) == 1 and "package" in self.hardware.links else "node"

    def larger(self) -> Mesh:
        """The next larger mesh of the kind: the next legal part of a node, then twice the nodes."""
        if self.hardware.ranks_per_node is None or self.ranks >= self.hardware.ranks_per_node:
            return Mesh(self.hardware, 2 * self.ranks)
        return Mesh(self.hardware, next(part for part in self.hardware.parts if part >= 2 * self.ranks))


def _is_legal(hardware: Hardware, ranks: int) -> bool:
    per_node = hardware.ranks_per_node
    return per_node is None or ranks in hardware.parts or ranks % per_node == 0


def _nearest(hardware: Hardware, ranks: int) -> list[int]:
    """The largest legal size below and the smallest above."""
    below = next(size for size in range(ranks, 0, -1) if _is_legal(hardware, size))
    above = ranks
    while not _is_legal(hardware, above):
        above += 1
    return [below, above]
