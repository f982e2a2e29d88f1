"""Branches of an If with a constant condition: their nodes run under names that ONNX Runtime makes of operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from partita.diagnosis.explanation import explain_node, nodes_to_probe
from partita.diagnosis.inlined_nodes import inlined_branches
from partita.diagnosis.session_index import index_session
from partita.observations.facts import AssignedNode, GraphNode, NodeProbe, ProbeRun, Substitution
from partita.observations.names import CPU
from tests.diagnosis.test_inlined_nodes import CUDA, KERNEL, WANTED, node
from tests.partition_reports.samples import session_facts

CHOICE = (node("choice", "If", ("yes",), ("p",)), node("last", "Neg", ("p",), ("y",)))
THEN, ELSE = "then_branch", "else_branch"
MUL, TOKEN, OTHER = "_if_then_branch_Mul", "_if_then_branch_Mul_token_0", "_if_then_branch_token_1_Mul"


def inner(name: str, op: str, output: str, body: str = THEN) -> GraphNode:
    return replace(node(name, op, ("h",), (output,)), subgraph_attribute=body)


def facts_of(ran: tuple[str, ...], bodies: tuple[GraphNode, ...], **changes: Any) -> Any:
    """The If is gone, and nodes of these names run."""
    listed = tuple(AssignedNode(name, "Mul", "", CPU, number) for number, name in enumerate((*ran, "last")))
    given = {"graph": CHOICE, "subgraph_nodes": bodies, "plan": ((*ran, "last"),), "events": (), "assigned": listed}
    return session_facts(of=CUDA, **({"patterns": (KERNEL,)} | given | changes))


def found(ran: tuple[str, ...], bodies: tuple[GraphNode, ...], **changes: Any) -> dict[str, tuple[str, ...]]:
    return inlined_branches(facts_of(ran, bodies, **changes), (*ran, "last"))


TWO = (inner("a", "Mul", "ma"), inner("b", "Mul", "mb"), inner("c", "Mul", "mc", ELSE))


def test_as_many_nodes_of_an_operator_as_the_branch_has_are_those_in_order():
    assert found((MUL, TOKEN), TWO) == {MUL: ("a",), TOKEN: ("b",)}
    assert found(("_if_else_branch_Mul",), TWO) == {"_if_else_branch_Mul": ("c",)}


def test_nothing_is_guessed_where_some_were_folded_or_two_branches_could_be_meant():
    assert found((TOKEN,), TWO) == {}
    assert found((MUL, OTHER), TWO) == {}


def test_experiments_are_made_with_the_node_of_the_file_and_outweigh_the_line():
    line = f"CUDA kernel not found in registries for Op type: Mul node name: {MUL}"
    facts = facts_of((MUL,), TWO[:1], log=(line,))
    index = index_session(facts)
    assert nodes_to_probe(index, (WANTED,), WANTED) == ("a", "last")
    helped = ProbeRun(
        "type", "float32 in place of int64", "supported", "", substitution=Substitution("float32", "int64")
    )
    probe = NodeProbe("a", (ProbeRun("as_is", "", "rejected", ""), helped))
    known = facts.of(CUDA)
    tried = replace(facts, providers={**facts.providers, CUDA: replace(known, probes={"a": probe})})
    told = explain_node(index_session(tried), "run", MUL, "Mul", CPU, (WANTED,))
    assert (told.reason, told.evidence_kind) == ("no_kernel_type", "probed")
