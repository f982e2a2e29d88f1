"""File nodes behind fused and rewritten nodes, in small graphs."""

from __future__ import annotations

import pytest

from partita.diagnosis.explanation import find_fallbacks, nodes_to_probe
from partita.diagnosis.session_index import SessionIndex, index_session
from partita.observations.facts import AssignedNode, GraphNode, PortFact
from partita.partition_reports.placement import find_subgraphs
from tests.partition_reports.samples import (
    CPU,
    GPU,
    GPU_CHAIN,
    session_facts,
)

NPU = "QNNExecutionProvider"
IN = PortFact("x", "input", "input", "Cpu", "Cpu", 64)
OUT = PortFact("y", "output", "output", "Cpu", "Cpu", 64)


def node(name: str, inputs: str, outputs: str, op: str | None = None) -> GraphNode:
    """A node; the operator is read off its name unless given."""
    module, slash, kind = name.rpartition("/")
    return GraphNode(
        name,
        op or kind.rstrip("_0123456789"),
        "",
        tuple(inputs.split()),
        tuple(outputs.split()),
        module if slash else None,
    )


def index_of(graph, optimised=None, plan=None, assigned=(), **changes) -> SessionIndex:
    names = tuple(each.name for each in optimised or ()) if plan is None else tuple(plan)
    return index_session(
        session_facts(
            graph=tuple(graph),
            optimised=optimised and tuple(optimised),
            plan=(names,),
            assigned=tuple(assigned),
            ports=(IN, OUT),
            **changes,
        )
    )


def listed(*entries: tuple[str, str]) -> list[AssignedNode]:
    """The assignment list: provider, and names of the nodes of one entry."""
    return [
        AssignedNode(name, name.rpartition("/")[2], "", provider, number)
        for number, (provider, names) in enumerate(entries)
        for name in names.split()
    ]


CHAIN = (
    node("m.a/Add", "x b", "s"),
    node("m.ln/LayerNormalization", "s g", "l"),
    node("m.fc/MatMul", "l w", "h"),
    node("m.out/Relu", "h", "y"),
)


def test_fused_subgraph_node_has_reason_and_replaced_nodes():
    """The list follows the first fusions: MatMul and Add in a branch are `mm/MatMulAddFusion` in it."""
    graph = (node("if", "c", "y", "If"),)
    inner = (node("mm", "h w", "t", "MatMul"), node("add", "t b", "u", "Add"), node("neg", "u", "v", "Neg"))
    placed = {"if": GPU, "mm/MatMulAddFusion": CPU, "neg": GPU, "neg/Inserted": CPU}
    entries = tuple(AssignedNode(name, "Gemm", "", home, number) for number, (name, home) in enumerate(placed.items()))
    index = index_of(graph, plan=("if",), assigned=entries, subgraph_nodes=inner)
    assert [entry.node for entry in find_fallbacks(index, "run", GPU_CHAIN)] == ["mm/MatMulAddFusion", "neg/Inserted"]
    assert (index.replaces("mm/MatMulAddFusion"), index.replaces("neg/Inserted")) == (("mm",), ())
    assert nodes_to_probe(index, GPU_CHAIN, GPU_CHAIN[0]) == ("mm",), "it is tried as the node of the file"
    bodies = find_subgraphs(index)
    assert bodies is not None
    assert {each.name: each.replaces for each in bodies.on_cpu} == {
        "mm/MatMulAddFusion": ("mm",),
        "neg/Inserted": (),
    }


# --- regions with several executed nodes ------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("b_nchwc", "c_nchwc", "d_nchwc"), ("one", "two", "three")])
def test_branches_in_another_order_are_matched_only_by_name(names):
    """Residual block: ONNX Runtime computes the shortcut's Conv last, fused with the sum."""
    graph = (
        node("Relu_0", "x", "a"),
        node("Conv_1", "a u", "d"),
        node("Conv_2", "a v", "b"),
        node("Conv_3", "b w", "c"),
        node("Add_4", "d c", "e"),
        node("Neg_5", "e", "y"),
    )
    runs = (
        node("Relu_0", "x", "a"),
        node("ReorderInput", "a", "r0"),
        node(names[0], "r0 v_blocked", "r1", "Conv"),
        node(names[1], "r1 w_blocked", "r2", "Conv"),
        node(names[2], "r0 u_blocked none r2", "r3", "Conv"),
        node("ReorderOutput", "r3", "e"),
        node("Neg_5", "e", "y"),
    )
    index = index_of(graph, runs)
    told = [index.replaces(name) for name in names]
    if names[0] == "b_nchwc":
        assert told == [("Conv_2",), ("Conv_3",), ("Conv_1", "Add_4")]
    else:
        assert told == [(), (), ()], "in order, nodes would read what their exported nodes do not: nothing is said"


BIASED = (
    node("enc/MatMul", "x w", "m"),
    node("enc/Add", "m b", "a"),
    node("act/Relu", "a", "y"),
)
AS_GEMM = (
    node("gemm_input_reshape", "x shape", "g0", "Reshape"),
    node("enc/MatMul/MatMulAddFusion", "g0 w b", "g1", "Gemm"),
    node("gemm_output_reshape", "g1 shape_back", "a", "Reshape"),
    node("act/Relu", "a", "y"),
)


def test_nodes_added_around_pinned_nodes_are_inserted():
    entries = listed(*((CPU, each.name) for each in AS_GEMM))
    index = index_of(BIASED, AS_GEMM, assigned=entries, pins={"enc/MatMul": "cpu:enc"})
    found = {each.node: each.reason for each in find_fallbacks(index, "run", GPU_CHAIN)}
    assert found["gemm_input_reshape"] == found["gemm_output_reshape"] == "runtime_inserted"
    assert found["enc/MatMul/MatMulAddFusion"] == "pinned_by_user"
    assert found["act/Relu"] == "unexplained", "which is not pinned"
