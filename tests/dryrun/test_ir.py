"""Reading collectives and Parameters from the text of a graph."""

import pytest

from msds_graphs.dryrun.ir import Collective, read_graph
from msds_graphs.errors import GraphError

TEXT = """\
# Total params: 3
%para1_x: <Tensor[Int32], (8, 1)> : [8, 1]
%para2_params.layers.0.o_proj.weight: <Ref[Tensor[BFloat16]], (32, 64), ref_key=a, is_parameter>  :  has_default
%para3_params.layers.1.gate.bias: <Ref[Tensor[Float32]], (64), ref_key=b, is_parameter>  :  has_default
subgraph @1_step() {
  %0(CNode_1) = PrimFunc_MatMul(%para1_x, %para2_params.layers.0.o_proj.weight)
      : (<Tensor[BFloat16], (4, 32)>, <Tensor[BFloat16], (32, 64)>) -> (<Tensor[BFloat16], (4, 64)>)
  %1(y) = AllReduce(%0) {instance name: r} primitive_attrs: {group: "msds_0_8_1", fusion: I64(0), op: "sum"}
      : (<Tensor[BFloat16], (4, 64)>) -> (<Tensor[BFloat16], (4, 64)>)
      # Fullname with scope: (Default/AllReduce-op0)
      # In file /a/deepseek.py:10~12, 4~5/    def f(x):/
      # In file /a/collectives.py:90, 11~38/    return x/
  %2(CNode_2) = PrimFunc_Add(%1, %para3_params.layers.1.gate.bias)
      : (<Tensor[Float32], (4, 64)>, <Tensor[Float32], (64)>) -> (<Tensor[Float32], (4, 64)>)
  %3(y) = AllGather(%2) primitive_attrs: {group: "5-123", group_ranks: "0-2-4", rank_size: I64(3)}
      : (<Tensor[Float32], (4, 64)>) -> (<Tensor[Float32], (12, 64)>)
  %4(z) = AlltoAll(%3) primitive_attrs: {split_dim: I64(0), group: "g"}
      : (<Tensor[Bool], (12, 64)>) -> (<Tensor[Bool], (12, 64)>)
  Return(%4)
"""


def test_collectives_and_parameters():
    graph = read_graph(TEXT.splitlines())
    assert graph.collectives == (
        Collective(
            "all_reduce",
            "msds_0_8_1",
            "bfloat16",
            (4, 64),
            (4, 64),
            "params.layers.0.o_proj.weight",
            ("/a/collectives.py:90", "/a/deepseek.py:10"),
        ),
        Collective(
            "all_gather", "5-123", "float32", (4, 64), (12, 64), "params.layers.1.gate.bias", (), members=(0, 2, 4)
        ),
        Collective("all_to_all", "g", "bool", (12, 64), (12, 64), "params.layers.1.gate.bias", ()),
    )
    assert graph.parameters == {
        "params.layers.0.o_proj.weight": ("bfloat16", (32, 64)),
        "params.layers.1.gate.bias": ("float32", (64,)),
    }
    assert graph.num_nodes == 5
    assert [call.nbytes for call in graph.collectives] == [4 * 64 * 2, 12 * 64 * 4, 12 * 64]


EXCHANGE = """\
  %5(made) = PrimFunc_MoeDistributeDispatch(%4, %3, I64(16), None, "msds_exchange_0_16_1", I64(1)) cnode_attrs: {a}
      : (<Tensor[BFloat16], (4, 64)>, <Tensor[Int32], (4, 3)>, <Int64, NoShape>, <None, NoShape>, <String, NoShape>, \
<Int64, NoShape>) -> (<Tuple[Tensor[BFloat16],Tensor[Float32]*2], TupleShape((64, 64), (64), (12))>)
  %6(back) = PrimFunc_MoeDistributeCombine(%5, %3, "msds_exchange_0_16_1")
      : (<Tensor[BFloat16], (64, 64)>, <Tensor[Int32], (4, 3)>, <String, NoShape>) -> (<Tensor[BFloat16], (4, 64)>)
"""


def test_the_operators_of_an_exchange():
    """Of what dispatch gives, the rows; its group is an operand."""
    sent, back = read_graph([*TEXT.splitlines()[:-1], *EXCHANGE.splitlines()]).collectives[-2:]
    place = "params.layers.1.gate.bias"
    assert sent == Collective("dispatch", "msds_exchange_0_16_1", "bfloat16", (4, 64), (64, 64), place)
    assert back == Collective("combine", "msds_exchange_0_16_1", "bfloat16", (64, 64), (4, 64), place)


@pytest.mark.parametrize("name", ["AlltoAllV", "Send", "Broadcast", "NeighborExchange_AllGatherV", "MatmulAllReduce"])
def test_unknown_communication_is_refused(name):
    with pytest.raises(GraphError, match=name):
        read_graph(TEXT.replace("PrimFunc_Add", f"PrimFunc_{name}").splitlines())


def test_another_way_of_writing_is_refused():
    with pytest.raises(GraphError, match="new way"):
        read_graph(TEXT.replace('group: "msds_0_8_1", ', "").splitlines())


def test_an_unknown_number_type_is_refused():
    with pytest.raises(GraphError, match="Complex64"):
        read_graph(TEXT.replace("<Tensor[Bool]", "<Tensor[Complex64]").splitlines())
