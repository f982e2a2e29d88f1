"""Inlined branches of an If with a constant condition: ONNX Runtime names their nodes after the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from partita.diagnosis.inlined_nodes import inlined_branches
from partita.observations.facts import AssignedNode, GraphNode
from partita.observations.names import CPU
from tests.diagnosis.test_inlined_nodes import CUDA, KERNEL, node
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


def test_equal_node_counts_per_operator_are_matched_in_order():
    assert found((MUL, TOKEN), TWO) == {MUL: ("a",), TOKEN: ("b",)}
    assert found(("_if_else_branch_Mul",), TWO) == {"_if_else_branch_Mul": ("c",)}


def test_folded_or_ambiguous_branch_nodes_are_unmatched():
    assert found((TOKEN,), TWO) == {}
    assert found((MUL, OTHER), TWO) == {}
