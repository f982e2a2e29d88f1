"""Branches of an If whose condition is a constant: ONNX Runtime puts the nodes of one in its place. Pure.

They are named `_if_then_branch_`, their operator, and a number where that name is taken
(`_if_then_branch_Mul_token_0`); another If has its number before the operator (`_if_then_branch_token_1_Mul`). What
they make is called as in the file, with the same words before it, but for the outputs of the If (seen with 1.27 and
1.31.1).
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
    """The file node of each executed node of an inlined branch; no entry where it is not known."""
    listed = (*order, *(node.name for node in facts.assigned or ()))
    names = {name: match for name in dict.fromkeys(listed) if (match := INLINED_NODE.fullmatch(name))}
    if not names:
        return {}
    gone = removed_nodes(facts.inner, facts, order)
    found = _by_tensors(facts.optimised or (), names, gone)
    taken = set(found.values())
    groups: dict[tuple[str, str], list[str]] = {}
    for name, match in names.items():
        if name not in found:
            groups.setdefault((match["branch"], match["op"]), []).append(name)
    for (branch, op), alike in groups.items():
        left = [node.name for node in gone if node.op_type == op and node.name not in taken and _is_in(node, branch)]
        rivals = [each for each, ops in groups if ops == op and _side(each) == _side(branch)]
        if len(left) == len(alike) and len(rivals) == 1:
            found |= dict(zip(alike, left, strict=True))
    return {name: (inner,) for name, inner in found.items()}


def branches_in_subgraphs(
    facts: SessionFacts, order: Sequence[str], names: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The same by tensors alone, for nodes in control-flow subgraphs with `names` that the main graph has as well.

    An If within a subgraph may have a constant condition, too. A name that two subgraphs have is left out.
    """
    inside = [node for holder in facts.optimised or () for node in holder.inside if node.name in names]
    once = [node for node in inside if INLINED_NODE.fullmatch(node.name) and _count(inside, node.name) == 1]
    found = _by_tensors(once, [node.name for node in once], removed_nodes(facts.inner, facts, order))
    return {name: (inner,) for name, inner in found.items()}


def _count(nodes: Iterable[GraphNode], name: str) -> int:
    return sum(node.name == name for node in nodes)


def _by_tensors(optimised: Iterable[GraphNode], names: Iterable[str], gone: Sequence[GraphNode]) -> dict[str, str]:
    """Nodes whose outputs have a name that one node of the file gives to its own."""
    wanted = frozenset(names)
    found: dict[str, str] = {}
    for node in optimised:
        made = {WORDS.sub("", output): words[0] for output in node.outputs if (words := WORDS.match(output))}
        if node.name in wanted and made:
            behind = [
                each.name
                for each in gone
                if each.op_type == node.op_type and any(_is_in(each, made[o]) for o in each.outputs if o in made)
            ]
            if len(behind) == 1:
                found[node.name] = behind[0]
    return found


def _is_in(node: GraphNode, name: str) -> bool:
    """Whether a file node is in the branch of an executed name; of branches within branches in the innermost."""
    return node.body == f"{_side(name)}_branch"


def _side(name: str) -> str:
    sides = [match["side"] for match in re.finditer(PREFIX, name)]
    return sides[-1] if sides else ""
