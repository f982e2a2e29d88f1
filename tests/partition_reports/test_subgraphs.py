"""Control-flow subgraphs: reported copies, possible unreported copies and unlisted nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partita.diagnosis.session_index import SessionIndex
from partita.explain import Explanation, find, headline
from partita.observations.facts import AssignedNode, GraphNode, PortFact, SessionFacts
from partita.partition_reports.outcome import state_name
from partita.partition_reports.phase_records import Subgraphs
from partita.partition_reports.placement import find_subgraphs
from partita.partition_reports.records import Report
from tests.partition_reports.report_changes import each_phase, mixed
from tests.partition_reports.samples import (
    CPU,
    CPU_CHAIN,
    GPU,
    GPU_CHAIN,
    event,
    phase_of,
    report_of,
    run_facts,
    section_of,
    session_facts,
    shown,
    windows,
)

COPY = f"[I:onnxruntime:, transformer_memcpy.cc:470 AddCopyNode] Add MemcpyToHost before t for {GPU}"


def node(name: str, op: str, inputs: str, outputs: str, body: str = "") -> GraphNode:
    return GraphNode(name, op, "", tuple(inputs.split()), tuple(outputs.split()), subgraph_attribute=body)


def listed(*entries: tuple[str, str, str]) -> tuple[AssignedNode, ...]:
    """The assignment list: name, operator and provider of each node."""
    return tuple(AssignedNode(name, op, "", provider, number) for number, (name, op, provider) in enumerate(entries))


MAIN = (node("mm", "MatMul", "x w", "h"), node("if", "If", "c", "y"))
INNER = (
    node("then/Det", "Det", "h", "then_y", "then_branch"),
    node("else/Relu", "Relu", "h", "else_t", "else_branch"),
    node("else/Det", "Det", "else_t", "else_y", "else_branch"),
)
PLACED = (("mm", "MatMul", GPU), ("if", "If", GPU))
INSIDE = (("then/Det", "Det", CPU), ("else/Relu", "Relu", GPU), ("else/Det", "Det", CPU))


def branching(**changes: Any) -> SessionFacts:
    """An If on the device, with nodes on the CPU in both branches, which read what a MatMul on the device makes."""
    given: dict[str, Any] = {
        "phases": ("decode",),
        "graph": MAIN,
        "subgraph_nodes": INNER,
        "plan": (("mm", "if"),),
        "plan_devices": ("1",),
        "assigned": listed(*PLACED, *INSIDE),
        "log": (COPY,),
        "registered": (GPU, CPU),
        "ports": (PortFact("x", "input", "input", "Cpu", "Cpu", 8), PortFact("c", "input", "input", "Cpu", "Cpu", 1)),
    }
    return session_facts(**(given | changes))


def bodies_of(facts: SessionFacts) -> Subgraphs:
    found = find_subgraphs(SessionIndex(facts))
    assert found is not None
    return found


def report_on(facts: SessionFacts) -> Report:
    return report_of(run_facts(facts, steps=(), prompt_tokens=0, new_tokens=1), GPU_CHAIN)


def test_copies_in_branches_are_counted_or_may_be_unreported():
    assert bodies_of(branching(log=(COPY, COPY))).copies == 2, "of a tensor in two branches"
    assert bodies_of(branching(log=())).copies is None, "a log that was not kept"
    found = bodies_of(branching())
    assert (found.copies, found.may_have_more_copies) == (1, True)
    for log, count in (((COPY, COPY), "2"), ((), "unknown")):
        said = " ".join(shown(report_on(branching(log=log))).split())
        assert f"Memcpy nodes {count}" in said and "may be copied as well (no source reports them)" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"assigned": listed(*PLACED, *((name, op, GPU) for name, op, _ in INSIDE))},
        {"plan": (("mm", "_if_then_branch_Det"),)},
        {"subgraph_nodes": tuple(replace(each, inputs=("k",)) for each in INNER)},
        {"assigned": None, "registered": (CPU,), "plan_devices": ("0",)},
    ],
    ids=["one device", "a constant condition", "no tensor of the main graph", "no other provider"],
)
def test_subgraph_without_cross_device_inputs_has_no_unreported_copies(changes):
    assert bodies_of(branching(**changes)).may_have_more_copies is False


def test_subgraph_nodes_on_the_cpu_are_counted_or_unknown():
    on_device = listed(*PLACED, *((name, op, GPU) for name, op, _ in INSIDE))
    assert "nodes on CPU 0" in " ".join(shown(report_on(branching(assigned=on_device))).split())
    found = bodies_of(branching(assigned=None))
    assert (found.nodes, found.is_known, found.may_have_more_copies) == (0, False, True)
    assert bodies_of(branching()).is_known
    said = " ".join(shown(report_on(branching(assigned=None))).split())
    assert "This ONNX Runtime does not list their nodes." in said


@pytest.mark.parametrize("branch_of", ["then/Det", "if/then/Det"])
def test_twice_fused_main_graph_node_is_not_a_subgraph_node(branch_of):
    """onnxruntime-gpu 1.31.1 fuses MatMul and Add before the list is made, and Relu after it."""
    graph = (node("mm", "MatMul", "x w", "m"), node("add", "Add", "m b", "a"), node("relu", "Relu", "a", "h"), MAIN[1])
    inner = (node(branch_of, "Det", "h", "then_y", "then_branch"), *INNER[1:])
    fused = ("mm/MatMulAddFusion", "Gemm", CPU)
    inside = ((branch_of, "Det", CPU), *INSIDE[1:], ("else/Det/DetFusion", "Det", CPU), ("if/made", "Det", CPU))
    facts = branching(
        graph=graph,
        subgraph_nodes=inner,
        plan=(("fused mm/MatMulAddFusion", "if"),),
        assigned=listed(fused, ("if", "If", CPU), *inside),
    )
    found = bodies_of(facts)
    assert [entry.name for entry in found.on_cpu] == [name for name, _, provider in inside if provider == CPU]
    assert found.nodes == len(inside)


TWIN = {
    "subgraph_nodes": (node("mm", "MatMul", "h w", "then_y", "then_branch"),),
    "assigned": listed(*PLACED, ("mm", "MatMul", CPU)),
}
"""A branch has a node of the name of one of the main graph, on the CPU."""


def test_subgraph_node_with_main_graph_name_is_its_own_fallback():
    report = report_on(branching(**TWIN))
    assert [(entry.name, entry.provider) for entry in phase_of(report, "decode").nodes] == [("mm", GPU), ("if", GPU)]
    assert [(entry.node, entry.provider, entry.cost) for entry in report.fallbacks] == [("mm", CPU, None)]
    assert (state_name(report), report.conflicts) == ("partly", ())
    assert "unexplained" not in str(section_of(report, "placement"))
    told = find(report, "mm")
    assert isinstance(told, Explanation)
    assert "the preferred provider" in headline(told) and "unexplained" not in headline(told)
    assert "another node named mm is in a control-flow subgraph of decode" in " ".join(told.notes)


@pytest.mark.parametrize("op", ["BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"])
def test_generation_operators_hold_subgraphs(op):
    """The decoder subgraph's nodes are profiled and listed but are not in the plan."""
    events = (
        event(0, 0, "search", op, CPU, host_us=100),
        event(0, 1, "decoder/MatMul", "MatMul", CPU, start_us=10),
        event(0, 2, "last", "Neg", CPU, start_us=500),
    )
    session = branching(
        graph=(node("search", op, "x", "y"), node("last", "Neg", "y", "z")),
        subgraph_nodes=(node("decoder/MatMul", "MatMul", "ids w", "logits"),),
        plan=None,
        events=events,
        runs=windows("decode"),
        assigned=listed(("search", op, CPU), ("last", "Neg", CPU), ("decoder/MatMul", "MatMul", CPU)),
    )
    phase = phase_of(report_of(run_facts(session, steps=()), CPU_CHAIN), "decode")
    assert [each.name for each in phase.nodes] == ["search", "last"]
    assert phase.subgraphs is not None and [each.name for each in phase.subgraphs.on_cpu] == ["decoder/MatMul"]


def test_possible_unreported_copies_lower_state_to_partly():
    def harmless(report):
        costs = (entry.cost.model_copy(update={"copies": (), "harmless": True}) for entry in report.fallbacks)
        told = zip(report.fallbacks, costs, strict=True)
        return report.model_copy(update={"fallbacks": tuple(e.model_copy(update={"cost": c}) for e, c in told)})

    report = harmless(mixed())
    assert state_name(report) == "nearly"
    bodies = Subgraphs(nodes=1, copies=0, may_have_more_copies=True)
    assert state_name(each_phase(report, lambda phase: {"subgraphs": bodies})) == "partly"
