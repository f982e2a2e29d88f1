"""Unnamed nodes of control-flow subgraphs: each has a name, a row and a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from partita.diagnosis.explanation import explain_node, find_fallbacks, nodes_to_probe
from partita.diagnosis.session_index import SessionIndex, index_session
from partita.observations.facts import AssignedNode
from partita.observations.names import CPU
from partita.partition_reports.placement import find_subgraphs
from tests.diagnosis.test_inlined_nodes import CUDA, FORCED, FORCED_LINE, KERNEL, WANTED, node
from tests.partition_reports.samples import event, session_facts

BRANCH = node("crop", "CenterCropPad", ("h", "s"), ("a",))
CHOICE = (node("choice", "If", ("c", "h", "s"), ("p",)), node("last", "Neg", ("p",), ("y",)))
ALL = (("Shape", CUDA), ("Sub", CPU), ("Div", CPU), ("Sub", CUDA), ("Slice", CUDA))
"""What the list has of the branch: operators and providers, those of a provider together in reality."""


def index_of(ran: tuple[tuple[str, str], ...], listed: tuple[tuple[str, str], ...], **changes: Any) -> SessionIndex:
    """An If with a function in its branch; `ran`: names of the profile and providers, of nodes in the branch."""
    frame = event(0, 0, "choice", "If", CUDA, host_us=90)
    inside = tuple(
        event(0, order, name, name.partition("_")[0], provider, start_us=order, host_us=1)
        for order, (name, provider) in enumerate(ran, 1)
    )
    given: dict[str, Any] = {
        "graph": CHOICE,
        "subgraph_nodes": (BRANCH,),
        "plan": (("choice", "last"),),
        "events": (frame, *inside, event(0, 90, "last", "Neg", CUDA)),
        "assigned": (
            *(AssignedNode(each.name, each.op_type, "", CUDA, number) for number, each in enumerate(CHOICE)),
            *(AssignedNode("", op, "", provider, 9 + number) for number, (op, provider) in enumerate(listed)),
        ),
        "patterns": (KERNEL, FORCED),
    }
    return index_session(session_facts(of=CUDA, **(given | changes)))


def on_cpu(index: SessionIndex) -> list[str]:
    bodies = find_subgraphs(index)
    assert bodies is not None
    return [each.name for each in bodies.on_cpu]


RAN = (("Shape_1", CUDA), ("Sub_2", CUDA), ("Div_3", CPU), ("Sub_4", CPU), ("Slice_5", CUDA))


def test_unnamed_nodes_are_numbered_by_list_order():
    for ran in ((), RAN):
        index = index_of(ran, ALL)
        assert on_cpu(index) == ["Sub0", "Div0"]
        assert [entry.node for entry in find_fallbacks(index, "run", (WANTED,))] == ["Sub0", "Div0"]


def test_numbers_continue_after_main_graph_nodes():
    main = event(0, 80, "Sub_0", "Sub", CPU, start_us=5000)
    events = (*index_of(RAN, ()).facts.events, main)
    index = index_of(RAN, (*ALL, ("Sub", CPU)), plan=(("choice", "Sub0", "last"),), events=events)
    assert index.providers_by_source["Sub0"] == {"profile": {CPU}, "assignment": {CPU}}
    assert on_cpu(index) == ["Div0", "Sub2"]


def test_log_line_without_name_explains_unnamed_nodes():
    index = index_of(RAN, ALL, log=(FORCED_LINE,) * 2)
    told = explain_node(index, "run", "Div0", "Div", CPU, (WANTED,))
    assert (told.reason, told.evidence) == ("cpu_preferred", FORCED_LINE)
    assert index.replaces("Div0") == ("crop",)


def test_unnamed_nodes_are_probed_as_parts_of_removed_function():
    index = index_of(RAN, ALL)
    assert nodes_to_probe(index, (WANTED,), WANTED) == ("Sub0", "Div0")
    assert index.possible_functions["Div0"] == ("crop",)


def test_nodes_that_may_be_of_the_main_graph_are_not_named():
    graph = (*CHOICE, node("gone", "CenterCropPad", ("x", "s"), ("h",)))
    index = index_of(RAN[:3], ALL, graph=graph)
    assert on_cpu(index) == ["", ""], "they may be the function's, and be fused by now"


def test_optimised_graph_determines_unnamed_nodes_of_subgraphs():
    graph = (*CHOICE, node("gone", "CenterCropPad", ("x", "s"), ("h",)))
    choice, last = CHOICE
    holder = replace(choice, subgraph_nodes=tuple(node("", op, (), ()) for op, _ in ALL))
    index = index_of((), ALL, graph=graph, optimised=(holder, last))
    assert on_cpu(index) == ["Sub0", "Div0"]
    fewer = replace(choice, subgraph_nodes=holder.subgraph_nodes[2:])
    assert on_cpu(index_of((), ALL, graph=graph, optimised=(fewer, last))) == ["", "Div0"], "a Sub was fused, or both"
