"""Inlined branches: ONNX Runtime replaces an If with a constant condition by the nodes of one branch. Pure.

Their names are `_if_then_branch_`, the operator, and a number if the name exists (`_if_then_branch_Mul_token_0`); a
further If has its number before the operator (`_if_then_branch_token_1_Mul`). Their outputs have the names of the file
with the same prefix, except the outputs of the If (ONNX Runtime 1.27 and 1.31.1).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from partita.diagnosis.inlined_nodes import removed_nodes
from partita.observations.facts import GraphNode, SessionFacts

PREFIX = r"_if_(?P<side>then|else)_branch_(token_\d+_)?"
WORDS = re.compile(rf"^({PREFIX.replace('?P<side>', '?:')})+")
INLINED_NODE = re.compile(rf"(?P<branch>{PREFIX})(?P<op>[A-Za-z]\w*?)(_token_\d+)?")


def inlined_branches(facts: SessionFacts, order: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The file node of each executed node of an inlined branch, if known."""
    listed = (*order, *(node.name for node in facts.assigned or ()))
    names = {name: match for name in dict.fromkeys(listed) if (match := INLINED_NODE.fullmatch(name))}
    if not names:
        return {}
    gone = removed_nodes(facts.subgraph_nodes, facts, order)
    found = _by_tensors(facts.optimised or (), names, gone)
    joined = set(found.values())
    groups: dict[tuple[str, str], list[str]] = {}
    for name, match in names.items():
        if name not in found:
            groups.setdefault((match["branch"], match["op"]), []).append(name)
    for (branch, op), alike in groups.items():
        open_nodes = [
            node.name for node in gone if node.op_type == op and node.name not in joined and _is_in(node, branch)
        ]
        rivals = [each for each, ops in groups if ops == op and _side(each) == _side(branch)]
        if len(open_nodes) == len(alike) and len(rivals) == 1:
            found |= dict(zip(alike, open_nodes, strict=True))
    return {name: (inner,) for name, inner in found.items()}


def branches_in_subgraphs(
    facts: SessionFacts, order: Sequence[str], names: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The file node of each inlined node in a control-flow subgraph, by tensors only. `names`: also in the main graph.

    An If in a subgraph may have a constant condition, too. Names of several subgraphs are omitted.
    """
    inside = [node for holder in facts.optimised or () for node in holder.subgraph_nodes if node.name in names]
    once = [node for node in inside if INLINED_NODE.fullmatch(node.name) and _count(inside, node.name) == 1]
    found = _by_tensors(once, [node.name for node in once], removed_nodes(facts.subgraph_nodes, facts, order))
    return {name: (inner,) for name, inner in found.items()}


def _count(nodes: Iterable[GraphNode], name: str) -> int:
    return sum(node.name == name for node in nodes)


def _by_tensors(optimised: Iterable[GraphNode], names: Iterable[str], gone: Sequence[GraphNode]) -> dict[str, str]:
    """Executed nodes -> the only file node with the same output names."""
    inlined = frozenset(names)
    found: dict[str, str] = {}
    for node in optimised:
        made = {WORDS.sub("", output): words[0] for output in node.outputs if (words := WORDS.match(output))}
        if node.name in inlined and made:
            behind = [
                each.name
                for each in gone
                if each.op_type == node.op_type and any(_is_in(each, made[o]) for o in each.outputs if o in made)
            ]
            if len(behind) == 1:
                found[node.name] = behind[0]
    return found


def _is_in(node: GraphNode, name: str) -> bool:
    """Whether a file node is in the (innermost) branch in an executed name."""
    return node.subgraph_attribute == f"{_side(name)}_branch"


def _side(name: str) -> str:
    sides = [match["side"] for match in re.finditer(PREFIX, name)]
    return sides[-1] if sides else ""
