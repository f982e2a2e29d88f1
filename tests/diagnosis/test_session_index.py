"""Entries of the assignment list and events of control-flow subgraphs, and nodes without a name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partita.diagnosis.explanation import find_fallbacks, nodes_to_probe
from partita.diagnosis.session_index import SessionIndex
from partita.diagnosis.sources import main_graph_events
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


def inside(index: SessionIndex) -> list[tuple[str, str]]:
    return sorted((entry.name, entry.provider) for entry in index.in_subgraphs() or ())


def test_subgraph_node_named_as_main_graph_node_has_own_fallback():
    (found,) = find_fallbacks(SessionIndex(called_twice()), "run", GPU_CHAIN)
    assert (found.node, found.op_type, found.provider) == (CLIP, "Clip", CPU)
    assert (found.module, found.source_line) == (None, None)


def test_subgraph_node_named_as_main_graph_node_is_not_probed():
    """Probes address main-graph nodes by name."""
    twin = node("mm", "MatMul", "k w", "k2", subgraph_attribute="then_branch")
    main = node("mm", "MatMul", "x w", "a")
    entries = listed(("mm", "MatMul", GPU), ("if", "If", GPU), ("mm", "MatMul", CPU))
    facts = called_twice(graph=(main, IF), subgraph_nodes=(twin,), plan=(("mm", "if"),), assigned=entries, log=())
    index = SessionIndex(facts)
    assert inside(index) == [("mm", CPU)]
    assert nodes_to_probe(index, GPU_CHAIN, GPU_CHAIN[0]) == ()


def test_entries_that_may_be_in_a_subgraph_count_without_optimised_graph():
    """MatMul, Add and Relu of a function: two nodes when the list is made, one when it is run."""
    gemm = "_inlfunc_F_mm/MatMulAddFusion"
    entries = listed(("cos", "Cos", CPU), ("if", "If", CPU), ("_inlfunc_F_relu", "Relu", CPU), (gemm, "Gemm", CPU))
    facts = called_twice(plan=((f"fused {gemm}", "if"),), assigned=entries, optimised=None, log=())
    assert inside(SessionIndex(facts)) == sorted((name, CPU) for name in ("cos", "_inlfunc_F_relu", gemm))


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
    assert inside(SessionIndex(constant_if(optimised=graph))) == []


def test_subgraph_of_possible_control_flow_node_counts():
    """Without a run, the operator of the planned node is unknown."""
    events: tuple[NodeEvent, ...] = ()
    assert len(inside(SessionIndex(constant_if(events=events)))) == 2


FORCED = LogPattern("cpu_preferred", r"Force fallback for node: (?P<node>\S+) because")


@pytest.mark.parametrize(("lines", "code"), [(1, "unexplained"), (2, "cpu_preferred"), (3, "unexplained")])
def test_log_lines_without_name_explain_nodes_only_if_their_number_fits(lines: int, code: str) -> None:
    facts = called_twice(
        graph=(node("crop", "CenterCropPad"),),
        subgraph_nodes=(),
        plan=(("Max0", "Sub0"),),
        plan_devices=("0",),
        assigned=listed(("", "Max", CPU), ("", "Sub", CPU)),
        log=("[I:onnxruntime:, x.cc:1 F] Force fallback for node:  because of its size",) * lines,
        patterns=(FORCED,),
    )
    found = find_fallbacks(SessionIndex(facts), "run", GPU_CHAIN)
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
    assert SessionIndex(facts).possible_functions == {"Max0": ("mish",)}


def looped(run: int, turns: int) -> list[NodeEvent]:
    """Relu_0, a loop of turns that each have an If with a Neg and an Add in it, and Relu_1."""
    begin = run * 1_000_000
    rows = [("Relu_0", begin, 5), ("Loop_0", begin + 10, 20 * turns)]
    for at in range(begin + 10, begin + 10 + 20 * turns, 20):
        rows += [("If_0", at, 15), ("Neg_0", at + 1, 5), ("Add_0", at + 16, 3)]
    rows.append(("Relu_1", begin + 10 + 20 * turns, 5))
    return [
        NodeEvent(run, place, name, name.partition("_")[0], CPU, start, host, 4, ())
        for place, (name, start, host) in enumerate(rows)
    ]


def test_events_in_loop_and_nested_if_belong_to_subgraphs() -> None:
    main, bodies = main_graph_events(looped(0, 3) + looped(1, 3))
    assert [entry.name for entry in main] == ["Relu_0", "Loop_0", "Relu_1"] * 2
    assert bodies == {"If_0", "Neg_0", "Add_0"}


def test_named_nodes_in_the_format_of_the_profile_are_not_counted_as_unnamed() -> None:
    """The file names its nodes Mul_0 and Add_0, as the profile names nodes without a name."""
    graph = tuple(node(name, op) for name, op in (("Mul_0", "Mul"), ("m", "Mish"), ("Add_0", "Add")))
    ran = ("Mul_0", "Softplus_5", "Tanh_6", "Mul_7", "Add_0")
    events = tuple(event(0, at, name, name.partition("_")[0], CPU, start_us=10 * at) for at, name in enumerate(ran))
    plan = ("Mul_0", "Softplus0", "Tanh0", "Mul0", "Add_0")
    index = SessionIndex(session_facts(graph=graph, plan=(plan,), events=events, runs=windows("prefill")))
    assert tuple(each.name for each in index.events) == index.order == plan


@pytest.mark.parametrize("has_run", [True, False])
def test_devices_show_the_providers_of_nodes_without_name(has_run: bool) -> None:
    """A GroupNormalization is the only node of the file: no node of its function has a name, and two are a Div."""
    ran = (("Shape_6", "Shape", GPU), ("Div_7", "Div", CPU), ("Div_21", "Div", GPU))
    facts = called_twice(
        graph=(node("norm", "GroupNormalization"),),
        subgraph_nodes=(),
        plan=(("Shape0", "Div1"), ("Div0",)),
        plan_devices=("1", "0"),
        events=tuple(event(0, at, *each) for at, each in enumerate(ran)) if has_run else (),
        runs=windows("run"),
        assigned=listed(("", "Shape", GPU), ("", "Div", GPU), ("", "Div", CPU)),
        log=(),
    )
    index = SessionIndex(facts)
    assert {each.name for each in index.events} == (index.present if has_run else set())
    entries = {name: each.provider for name, each in index.assignments.items()}
    assert entries == {"Shape0": GPU, "Div1": GPU, "Div0": CPU}
    assert [(entry.node, entry.provider) for entry in find_fallbacks(index, "run", GPU_CHAIN)] == [("Div0", CPU)]
