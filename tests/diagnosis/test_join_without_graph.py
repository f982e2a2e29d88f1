"""Nodes renamed in the plan, matched to file nodes without an optimised graph."""

from __future__ import annotations

from partita.diagnosis.session_index import SessionIndex, index_session
from partita.observations.facts import AssignedNode, GraphNode, PortFact
from partita.observations.names import CPU
from tests.diagnosis.test_join_regions import node
from tests.partition_reports.samples import event, session_facts

NPU = "OpenVINOExecutionProvider"
X = PortFact("x", "input", "input", "Cpu", "Cpu", 64)


def index_of(graph: tuple[GraphNode, ...], runs: list[tuple[str, str]], ran: bool = True) -> SessionIndex:
    """A session that placed all of `graph` on the CPU provider. `runs`: name and operator of what ran, in order."""
    return index_session(
        session_facts(
            of=NPU,
            graph=graph,
            plan=(tuple(name for name, _ in runs),),
            assigned=tuple(AssignedNode(each.name, each.op_type, "", CPU, number) for number, each in enumerate(graph)),
            events=tuple(event(0, place, name, op, CPU) for place, (name, op) in enumerate(runs)) if ran else (),
            ports=(X,),
        )
    )


POOL = (node("first", "x", "h", "Neg"), node("pool", "h", "p", "MaxPool"), node("last", "p", "y", "Neg"))
FIRST, LAST = ("first", "Neg"), ("last", "Neg")
BLOCKS = [FIRST, ("ReorderInput", "ReorderInput"), ("p_nchwc", "MaxPool"), ("ReorderOutput", "ReorderOutput"), LAST]


def test_ambiguous_nodes_are_unmatched():
    assert not index_of(POOL, [FIRST, ("a", "MaxPool"), ("b", "MaxPool"), LAST]).file_nodes_of
    assert not index_of(POOL, [FIRST, ("pool_token_1", "MaxPool"), ("pool_token_2", "MaxPool"), LAST]).file_nodes_of


def test_unmatched_node_of_a_fusion_is_ambiguous():
    """SiLU: the name of the QuickGelu shows that it replaces the Mul, and nothing where the Sigmoid is."""
    graph = (
        node("conv", "x", "c", "Conv"),
        node("sig", "c", "s", "Sigmoid"),
        node("mul", "c s", "m", "Mul"),
        node("last", "m", "y", "Neg"),
    )
    index = index_of(graph, [BLOCKS[1], ("c_nchwc", "Conv"), ("mul/QuickGeluFusion/", "QuickGelu"), BLOCKS[3], LAST])
    assert (index.replaces("c_nchwc"), index.replaces("mul/QuickGeluFusion/")) == (("conv",), ("mul",))
    assert index.is_added("ReorderInput") and index.replacement_candidates == {"sig": ()}


def test_node_of_another_provider_is_unmatched():
    facts = index_of(POOL, BLOCKS).facts
    elsewhere = tuple(AssignedNode(each.name, each.op_type, "", NPU, 0) for each in POOL)
    index = index_session(session_facts(graph=POOL, plan=facts.plan, assigned=elsewhere, events=facts.events))
    assert not index.replaces("p_nchwc")
