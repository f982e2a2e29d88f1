"""Entries of the assignment list: those of control-flow subgraphs are separated from the main graph's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partita.diagnosis.explanation import find_fallbacks, nodes_to_probe
from partita.diagnosis.session_index import SessionIndex, index_session
from partita.observations.facts import AssignedNode, GraphNode, NodeEvent, SessionFacts
from partita.observations.patterns import LogPattern
from tests.partition_reports.samples import CPU, GPU, GPU_CHAIN, event, session_facts, windows

CLIP = "_inlfunc_F_clip"


def node(name: str, op: str, inputs: str = "x", outputs: str = "y", **changes: Any) -> GraphNode:
    return replace(GraphNode(name, op, "", tuple(inputs.split()), tuple(outputs.split())), **changes)


def listed(*entries: tuple[str, str, str]) -> tuple[AssignedNode, ...]:
    return tuple(AssignedNode(name, op, "", provider, number) for number, (name, op, provider) in enumerate(entries))


IF = node("if", "If", "c", "y")
CALL = node("call", "F", "x", "a")
IN_BODY = node("inner_call", "F", "k", "k2", subgraph_attribute="then_branch")


def called_twice(**changes: Any) -> SessionFacts:
    """A function that the main graph calls on the device and a branch calls on the CPU: ONNX Runtime unfolds both calls
    into nodes of one name, as 1.31.1 does.
    """
    given: dict[str, Any] = {
        "phases": ("run",),
        "graph": (CALL, IF),
        "subgraph_nodes": (IN_BODY, node("cos", "Cos", "a", "e", subgraph_attribute="else_branch")),
        "plan": ((CLIP, "if"),),
        "plan_devices": ("1",),
        "registered": (GPU, CPU),
        "assigned": listed(("cos", "Cos", GPU), (CLIP, "Clip", GPU), ("if", "If", GPU), (CLIP, "Clip", CPU)),
        "log": (f"[I:onnxruntime:, x.cc:1 F] Unsupported: Op type: Clip node name: {CLIP}",),
    }
    return session_facts(**(given | changes))


def optimised(*inside: GraphNode, main: tuple[GraphNode, ...] = (node(CLIP, "Clip", "x", "a"),)) -> Any:
    return (*main, replace(IF, subgraph_nodes=inside))


def inside(index: SessionIndex) -> list[tuple[str, str]]:
    return sorted((entry.name, entry.provider) for entry in index.in_subgraphs() or ())


def test_subgraph_node_named_as_main_graph_node_has_own_fallback():
    (found,) = find_fallbacks(index_session(called_twice()), "run", GPU_CHAIN)
    assert (found.node, found.op_type, found.provider) == (CLIP, "Clip", CPU)
    assert (found.module, found.source_line) == (None, None)


def test_subgraph_node_named_as_main_graph_node_is_not_probed():
    """Probes address main-graph nodes by name."""
    twin = node("mm", "MatMul", "k w", "k2", subgraph_attribute="then_branch")
    main = node("mm", "MatMul", "x w", "a")
    entries = listed(("mm", "MatMul", GPU), ("if", "If", GPU), ("mm", "MatMul", CPU))
    facts = called_twice(graph=(main, IF), subgraph_nodes=(twin,), plan=(("mm", "if"),), assigned=entries, log=())
    index = index_session(facts)
    assert inside(index) == [("mm", CPU)]
    assert nodes_to_probe(index, GPU_CHAIN, GPU_CHAIN[0]) == ()


FUSED = listed(
    *(("cos", "Cos", CPU), ("if", "If", CPU)),
    *(("_inlfunc_F_relu", "Relu", CPU), ("_inlfunc_F_mm/MatMulAddFusion", "Gemm", CPU)),
)
FUSED_MAIN = node("fused _inlfunc_F_mm/MatMulAddFusion", "FusedGemm", "x", "a")


def fused(*made: GraphNode, **changes: Any) -> SessionFacts:
    """MatMul, Add and Relu of a function: two nodes when the list is made, one when it is run."""
    graph = optimised(node("cos", "Cos"), *made, main=(FUSED_MAIN,))
    given: dict[str, Any] = {"plan": ((FUSED_MAIN.name, "if"),), "assigned": FUSED, "optimised": graph, "log": ()}
    return called_twice(**(given | changes))


def test_possible_subgraph_nodes_count_without_optimised_graph():
    assert len(inside(index_session(fused(optimised=None)))) == 3


def constant_if(**changes: Any) -> SessionFacts:
    """An If with a constant condition: its branch was put in its place, and two nodes of that were fused."""
    entries = listed(("sin", "Sin", CPU), ("_if_then_branch_Conv", "Conv", CPU), ("_if_then_branch_Relu", "Relu", CPU))
    events = (event(0, 0, "y0_nchwc", "Conv", CPU), event(0, 1, "sin", "Sin", CPU, start_us=50))
    inner = (
        node("conv", "Conv", subgraph_attribute="then_branch"),
        node("relu", "Relu", subgraph_attribute="then_branch"),
    )
    given: dict[str, Any] = {
        "graph": (IF, node("sin", "Sin")),
        "subgraph_nodes": inner,
        "plan": (("y0_nchwc", "sin"),),
        "assigned": entries,
        "events": events,
        "runs": windows("run"),
        "log": (),
    }
    return called_twice(**(given | changes))


@pytest.mark.parametrize("graph", [None, (node("y0_nchwc", "Conv"), node("sin", "Sin"))])
def test_no_subgraph_nodes_without_executed_control_flow(graph):
    assert inside(index_session(constant_if(optimised=graph))) == []


def test_subgraph_of_possible_control_flow_node_counts():
    """Without a run, the operator of the planned node is unknown."""
    events: tuple[NodeEvent, ...] = ()
    assert len(inside(index_session(constant_if(events=events)))) == 2


FORCED = LogPattern("cpu_preferred", r"Force fallback for node: (?P<node>\S+) because")


@pytest.mark.parametrize(("lines", "code"), [(1, "unexplained"), (2, "cpu_preferred"), (3, "unexplained")])
def test_log_lines_without_name_explain_nodes_only_if_their_number_fits(lines: int, code: str) -> None:
    facts = called_twice(
        graph=(node("crop", "CenterCropPad"),),
        subgraph_nodes=(),
        plan=(("Max0", "Sub0"),),
        assigned=listed(("", "Max", CPU), ("", "Sub", CPU)),
        log=("[I:onnxruntime:, x.cc:1 F] Force fallback for node:  because of its size",) * lines,
        patterns=(FORCED,),
    )
    found = find_fallbacks(index_session(facts), "run", GPU_CHAIN)
    assert [(entry.node, entry.reason) for entry in found] == [("Max0", code), ("Sub0", code)]


def test_function_of_a_subgraph_has_one_owner_beside_a_folded_node() -> None:
    """ONNX Runtime folded the node `two` of the main graph; the branch calls a function with an unnamed Max."""
    facts = called_twice(
        graph=(node("two", "Add"), IF),
        subgraph_nodes=(node("mish", "Mish", subgraph_attribute="then_branch"),),
        plan=(("if",),),
        assigned=listed(("", "Max", CPU), ("if", "If", GPU)),
        log=(),
    )
    assert index_session(facts).possible_functions == {"Max0": ("mish",)}
