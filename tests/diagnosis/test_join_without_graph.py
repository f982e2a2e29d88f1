"""Nodes that have another name in the plan than in the file, without an optimised graph."""

from __future__ import annotations

from partita.diagnosis.explanation import explain_node
from partita.diagnosis.session_index import SessionIndex, index_session
from partita.observations.facts import AssignedNode, GraphNode, PortFact
from partita.observations.names import CPU
from partita.observations.records import ChainEntry
from tests.diagnosis.test_join_regions import node
from tests.partition_reports.samples import event, session_facts

NPU = "OpenVINOExecutionProvider"
WANTED = ChainEntry(provider=NPU, status="active")
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


def test_a_node_called_after_another_with_a_number_stands_for_it():
    index = index_of(POOL, [FIRST, ("Transpose", "Transpose"), ("pool_token_1", "NhwcMaxPool"), LAST])
    assert index.replaces("pool_token_1") == ("pool",), "the operator in another form"


def test_the_name_tells_where_nothing_ran():
    index = index_of(POOL, BLOCKS, ran=False)
    assert index.replaces("p_nchwc") == ("pool",)


def test_the_longest_name_is_meant():
    graph = (
        node("a", "x", "h", "Conv"),
        node("a_1", "h", "p", "Conv"),
        node("last", "p", "y", "Neg"),
    )
    index = index_of(graph, [("a_2_q", "Conv"), ("a_1_q", "Conv"), LAST])
    assert (index.replaces("a_2_q"), index.replaces("a_1_q")) == (("a",), ("a_1",))


def test_a_node_of_another_operator_is_not_meant():
    assert not index_of(POOL, [FIRST, ("pool_scale", "Mul"), LAST]).file_nodes_of


def test_without_a_telling_name_the_place_between_its_neighbours_does():
    index = index_of(POOL, [FIRST, ("made/up", "NhwcMaxPool"), LAST])
    assert index.replaces("made/up") == ("pool",)
    assert not index_of(POOL, [FIRST, LAST, ("made/up", "NhwcMaxPool")]).file_nodes_of, "it runs after the reader"


def test_a_node_that_is_found_tells_the_place_of_the_next():
    graph = (node("one", "x", "h", "Conv"), node("two", "h", "p", "Conv"), node("last", "p", "y", "Neg"))
    index = index_of(graph, [("h_nchwc", "Conv"), ("made_up", "Conv"), LAST])
    assert (index.replaces("h_nchwc"), index.replaces("made_up")) == (("one",), ("two",))


def test_two_nodes_that_could_be_meant_are_not_told_apart():
    assert not index_of(POOL, [FIRST, ("a", "MaxPool"), ("b", "MaxPool"), LAST]).file_nodes_of
    assert not index_of(POOL, [FIRST, ("pool_token_1", "MaxPool"), ("pool_token_2", "MaxPool"), LAST]).file_nodes_of


def test_what_another_node_needs_as_well_goes_with_what_reads_it():
    """The Sigmoid of a SiLU: the Mul, which is in a QuickGelu, reads what the Conv makes without it."""
    graph = (
        node("conv", "x", "c", "Conv"),
        node("sig", "c", "s", "Sigmoid"),
        node("mul", "c s", "m", "Mul"),
        node("last", "m", "y", "Neg"),
    )
    index = index_of(graph, [BLOCKS[1], ("c_nchwc", "Conv"), ("mul/QuickGeluFusion/", "QuickGelu"), BLOCKS[3], LAST])
    assert index.replaces("c_nchwc") == ("conv",)
    assert index.replaces("mul/QuickGeluFusion/") == ("sig", "mul")
    assert set(index.rewritten_with) == {"ReorderInput", "ReorderOutput"}
    needed = (*graph[:2], node("last", "c s", "y", "Neg"))
    assert index_of(needed, [("c_nchwc", "Conv"), LAST]).replaces("c_nchwc") == ("conv",), "the Neg reads it, too"


def test_another_providers_node_is_not_meant():
    facts = index_of(POOL, BLOCKS).facts
    elsewhere = tuple(AssignedNode(each.name, each.op_type, "", NPU, 0) for each in POOL)
    index = index_session(session_facts(graph=POOL, plan=facts.plan, assigned=elsewhere, events=facts.events))
    assert not index.replaces("p_nchwc")


def test_what_was_added_is_inserted_and_the_renamed_node_is_explained_as_itself():
    index = index_of(POOL, BLOCKS)
    told = explain_node(index, "run", "ReorderInput", "ReorderInput", CPU, (WANTED,))
    assert (told.reason, "when it rewrote pool" in told.evidence) == ("runtime_inserted", True)
    assert index.probed_as("p_nchwc") == ("p_nchwc", "pool")
