"""Profile events: those of control-flow subgraphs are separated, and nodes without a name get that of the plan."""

from __future__ import annotations

from partita.diagnosis.session_index import index_session
from partita.diagnosis.sources import main_graph_events
from partita.observations.facts import GraphNode, NodeEvent
from tests.partition_reports.samples import CPU, session_facts, windows


def event(run: int, order: int, name: str, start_us: int, host_us: int) -> NodeEvent:
    return NodeEvent(run, order, name, name.partition("_")[0], CPU, start_us, host_us, 4, ())


def looped(run: int, turns: int) -> list[NodeEvent]:
    """Relu_0, a loop of turns that each have an If with a Neg and an Add in it, and Relu_1."""
    begin = run * 1_000_000
    found = [event(run, 0, "Relu_0", begin, 5), event(run, 1, "Loop_0", begin + 10, 20 * turns)]
    for turn in range(turns):
        at = begin + 10 + 20 * turn
        found.append(event(run, len(found), "If_0", at, 15))
        found.append(event(run, len(found), "Neg_0", at + 1, 5))
        found.append(event(run, len(found), "Add_0", at + 16, 3))
    return [*found, event(run, len(found), "Relu_1", begin + 10 + 20 * turns, 5)]


def test_events_in_loop_and_nested_if_belong_to_subgraphs() -> None:
    main, bodies = main_graph_events(looped(0, 3) + looped(1, 3))
    assert [entry.name for entry in main] == ["Relu_0", "Loop_0", "Relu_1"] * 2
    assert bodies == {"If_0", "Neg_0", "Add_0"}


def test_named_nodes_in_the_format_of_the_profile_are_not_counted_as_unnamed() -> None:
    """The file names its nodes Mul_0 and Add_0, as the profile names nodes without a name."""
    graph = tuple(GraphNode(name, op, "", (), ()) for name, op in (("Mul_0", "Mul"), ("m", "Mish"), ("Add_0", "Add")))
    ran = [("Mul_0", "Mul"), ("Softplus_5", "Softplus"), ("Tanh_6", "Tanh"), ("Mul_7", "Mul"), ("Add_0", "Add")]
    events = tuple(NodeEvent(0, at, name, op, CPU, 10 * at, 5, 4, ()) for at, (name, op) in enumerate(ran))
    plan = ("Mul_0", "Softplus0", "Tanh0", "Mul0", "Add_0")
    index = index_session(session_facts(graph=graph, plan=(plan,), events=events, runs=windows("prefill")))
    assert tuple(each.name for each in index.events) == index.order == plan
