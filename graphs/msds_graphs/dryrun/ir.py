"""What a validated graph says about communication: its collectives and Parameters, read from its text. Host code.

MindSpore writes the graph after its front end has checked it, with `MS_DEV_SAVE_GRAPHS`. A node takes two lines:

    %5(y) = AllReduce(%4) {...} primitive_attrs: {group: "msds_0_8_1", ...} ...
        : (<Tensor[Float16], (32, 64)>) -> (<Tensor[Float16], (32, 64)>)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msds_graphs.errors import GraphError
from msds_graphs.specs import ITEM_SIZES

KINDS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AlltoAll": "all_to_all",
    "MoeDistributeDispatch": "dispatch",
    "MoeDistributeCombine": "combine",
}
"""MindSpore's name of a collective -> ours."""
_OTHERS = re.compile(
    r"\b(?:\w*All(?:Reduce|Gather|ToAll|toAll)\w*|ReduceScatter\w+|Broadcast|Send|Receive|\w*Barrier)\b"
)
"""Primitives that communicate in a way this file does not know: reading over them would count too little."""
_NODE = re.compile(r"\s+%(\w+)\([^)]*\) = (?:PrimFunc_)?(\w+)\(")
_PARAMETER = re.compile(r"%para\d+_(\S+): <Ref\[Tensor\[(\w+)\]\], \(([\d, ]*)\)")
_OPERAND = re.compile(r"%([\w.]+)")
_TENSOR = re.compile(r"Tensor\[(\w+)\]\]?>?, \(([\d, ]*)\)")
_TUPLE = re.compile(r"<Tuple\[Tensor\[(\w+)\].*TupleShape\(\(([\d, ]*)\)")
"""Of several results, the first."""
_SOURCE = re.compile(r"# In file (\S+?):(\d+)")


@dataclass(frozen=True)
class Collective:
    """One collective of a graph.

    kind: a value of KINDS. group: the name of its communication group. dtype, shape: what goes in; result: the shape
    that comes out. after: the Parameter that the graph used last before it, which says in which layer it is. source:
    where in the functions it was called, innermost first, as `file:line`. members: the ranks of a group that MindSpore
    made by itself; empty for groups that were made for it, of which it writes the name alone.
    """

    kind: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    result: tuple[int, ...]
    after: str = ""
    source: tuple[str, ...] = ()
    members: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the larger of what goes in and what comes out: of the array that the group has a share in."""
        return max(math.prod(self.shape), math.prod(self.result)) * ITEM_SIZES[self.dtype]

    @property
    def signature(self) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
        """What must be the same on all ranks of the group."""
        return self.kind, self.dtype, self.shape, self.result


@dataclass(frozen=True)
class GraphText:
    """What was read of a graph. parameters: name -> (dtype, shape), of those that the graph uses."""

    collectives: tuple[Collective, ...]
    parameters: dict[str, tuple[str, tuple[int, ...]]]
    num_nodes: int


def read_graph(lines: Iterable[str]) -> GraphText:
    """The collectives in the order of the text, and the Parameters. GraphError for communication it does not know."""
    parameters: dict[str, tuple[str, tuple[int, ...]]] = {}
    found: list[Collective] = []
    values: dict[str, str] = {}  # a node that reads a Parameter -> the Parameter
    after, num_nodes = "", 0
    for head, body in _nodes(lines, parameters):
        match = _NODE.match(head)
        assert match is not None
        num_nodes += 1
        operands = _OPERAND.findall(head[match.end() : _end_of_call(head, match.end())])
        used = [
            name
            for name in (values.get(operand, operand.partition("_")[2]) for operand in operands)
            if name in parameters
        ]
        after = used[-1] if used else after
        if match[2] == "Load" and used:
            values[match[1]] = used[0]
        if match[2] in KINDS:
            found.append(_collective(match[2], head, body, after))
        elif _OTHERS.fullmatch(match[2]):
            raise GraphError(f"the graph has {match[2]}, which the dry run does not count: use {', '.join(KINDS)}")
    return GraphText(tuple(found), parameters, num_nodes)


def _nodes(lines: Iterable[str], parameters: dict[str, tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, list[str]]]:
    """(first line, following lines) of each node; Parameters go into `parameters` as they come by."""
    head, body = "", list[str]()
    for line in lines:
        if (match := _PARAMETER.match(line)) is not None:
            parameters[match[1]] = (_dtype(match[2]), _shape(match[3]))
        elif _NODE.match(line):
            if head:
                yield head, body
            head, body = line, []
        elif head:
            body.append(line)
    if head:
        yield head, body


def _end_of_call(head: str, start: int) -> int:
    """Where the operands end that begin at `start`."""
    end = head.find(")", start)
    return len(head) if end < 0 else end


def _collective(primitive: str, head: str, body: list[str], after: str) -> Collective:
    # an attribute of collectives; of the operators that exchange tokens the one text among the operands
    group = re.search(r'group: "([^"]+)"', head) or re.search(r'"([^"]+)"', head.partition(" primitive_attrs:")[0])
    inputs, _, outputs = body[0].partition(") -> (") if body else ("", "", "")
    given, made = _TENSOR.search(inputs), _TUPLE.search(outputs) or _TENSOR.search(outputs)
    if group is None or given is None or made is None:
        raise GraphError(
            f"cannot read the collective {head.strip()!r} {body[:1]}: MindSpore writes graphs in a new way"
        )
    ranks = re.search(r'group_ranks: "([\d-]+)"', head)
    members = tuple(map(int, ranks[1].split("-"))) if ranks else ()
    sources = tuple(f"{match[1]}:{match[2]}" for match in map(_SOURCE.search, reversed(body)) if match is not None)
    return Collective(
        KINDS[primitive], group[1], _dtype(given[1]), _shape(given[2]), _shape(made[2]), after, sources, members
    )


def _dtype(name: str) -> str:
    """MindSpore's name of a dtype -> that of a spec."""
    lower = {"Bool": "bool", "BFloat16": "bfloat16", "Float8E4M3FN": "float8_e4m3fn", "Float8E5M2": "float8_e5m2"}
    dtype = lower.get(name, name.lower())
    if dtype not in ITEM_SIZES:
        raise GraphError(f"the graph has the number type {name}, which no spec has")
    return dtype


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())
