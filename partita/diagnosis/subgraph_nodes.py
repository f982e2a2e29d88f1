"""Nodes in control-flow subgraphs: their entries in the assignment list, and names for those without one. Pure.

The list does not name the graph, and a node name is unique only within a graph: a name that ONNX Runtime derives from
an operator, a function or a fusion (`_if_then_branch_Clip`, `_inlfunc_F_clip`, `gemm_input_reshape`) may be in the main
graph and in every subgraph. So the entries of a name are counted: as many as the main graph has belong to it, and the
others to subgraphs. An entry without evidence counts as in a subgraph, so that a check never passes wrongly.

The plan does not include control-flow subgraphs, so it does not name nodes of functions that ONNX Runtime inlined
there. They get names in the form of the plan, operator and running number (`Max0`), in the order of the assignment
list, which continue the numbers of the main graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from partita.diagnosis import naming
from partita.diagnosis.graphs import CONTROL_FLOW
from partita.diagnosis.inlined_nodes import NUMBERED, by_operator, removed_nodes
from partita.observations.facts import AssignedNode, GraphNode, NodeEvent, SessionFacts
from partita.observations.names import INLINED

Owners = Mapping[str, tuple[str, ...]]
Named = TypeVar("Named", AssignedNode, GraphNode, NodeEvent)


def with_names(facts: SessionFacts, order: Sequence[str]) -> SessionFacts:
    """The facts with names for unnamed listed nodes of control-flow subgraphs.

    E.g. `cuda-mish-in-a-branch` and `webgpu-bernoulli-in-a-branch` of tests/planted.

    An operator is omitted if its unnamed nodes may be in the main graph: if the main graph has a node of it that is not
    in the list, or if ONNX Runtime inlined a function there and the optimised graph does not show all in subgraphs.

    Args:
        facts: The facts of one session.
        order: Nodes of the main graph, already matched with the list.
    """
    listed = list(facts.assigned or ())
    known = {node.name for node in listed} | _of_file(facts)
    loose = {match["op"] for name in order if name not in known and (match := NUMBERED.fullmatch(name))}
    unfolded = bool(removed_nodes(facts.graph, facts, order))
    for op in {node.op_type: None for node in listed if not node.name}:
        positions = [position for position, node in enumerate(listed) if not node.name and node.op_type == op]
        if op not in loose and (not unfolded or _count_in_subgraphs(facts, op) >= len(positions)):
            first = _first_number(op, (*known, *order))
            for number, position in enumerate(positions, first):
                listed[position] = replace(listed[position], name=f"{op}{number}")
    return replace(facts, assigned=tuple(listed))


def _count_in_subgraphs(facts: SessionFacts, op: str) -> int:
    """Number of unnamed nodes of an operator in subgraphs of the optimised graph; 0 without that graph."""
    return sum(len(_unnamed(node, op)) for node in facts.optimised or ())


def _unnamed(holder: GraphNode, op: str) -> list[GraphNode]:
    return [node for node in holder.subgraph_nodes if not node.name and node.op_type == op]


def _of_file(facts: SessionFacts) -> set[str]:
    """Names of all nodes of the file."""
    return {node.name for node in (*facts.graph, *facts.subgraph_nodes)}


def _first_number(op: str, names: Iterable[str]) -> int:
    """The number after the largest number in a name of this operator."""
    numbers = (int(match["number"]) for name in names if (match := NUMBERED.fullmatch(name)) and match["op"] == op)
    return max(numbers, default=-1) + 1


def owners(facts: SessionFacts, order: Sequence[str], unfolded: Owners) -> dict[str, tuple[str, ...]]:
    """Nodes named by `with_names` -> file nodes whose functions may contain them. Same cases.

    `unfolded`: file nodes of the main graph's nodes from inlined functions; nodes in their subgraphs have the same file
    nodes.
    """
    known = _of_file(facts) | set(order)
    own = [
        node.name
        for node in facts.assigned or ()
        if node.name not in known and (match := NUMBERED.fullmatch(node.name)) and match["op"] == node.op_type
    ]
    inner = removed_nodes(facts.subgraph_nodes, facts, order) if own else []
    gone = inner or (removed_nodes(facts.graph, facts, order) if own else [])
    found: dict[str, tuple[str, ...]] = {}
    for name in own:
        op = next(iter(by_operator([name])))
        holders = [node.name for node in facts.optimised or () if _unnamed(node, op)]
        made = dict.fromkeys(each for holder in holders for each in unfolded.get(holder, ()))
        within = bool(holders) and all(holder in unfolded for holder in holders)
        found[name] = tuple(made) if within else tuple(node.name for node in gone)
    return found


def owners_by_name(facts: SessionFacts, order: Sequence[str], unfolded: Owners) -> dict[str, tuple[str, ...]]:
    """Named nodes in subgraphs of nodes from inlined functions -> the file nodes of these functions."""
    known = _of_file(facts) | set(order)
    return {
        inner.name: unfolded[holder.name]
        for holder in facts.optimised or ()
        if holder.name in unfolded
        for inner in holder.subgraph_nodes
        if inner.name and inner.name not in known
    }


def with_file_names(facts: SessionFacts) -> SessionFacts:
    """The facts with the file's names for the nodes of a SequenceMap's graph.

    ONNX Runtime lists them twice: before it inlines the function, and in the resulting Loop under a name with a prefix.
    """
    prefix = f"{INLINED}SequenceMap_"
    names = {f"{prefix}{node.name}": node.name for node in facts.subgraph_nodes if node.name}
    listed = facts.assigned or ()
    again = {names[node.name] for node in listed if node.name in names}
    if not again:
        return facts

    def renamed(nodes: Iterable[Named]) -> tuple[Named, ...]:
        return tuple(replace(node, name=names.get(node.name, node.name)) for node in nodes)

    holders = (replace(node, subgraph_nodes=renamed(node.subgraph_nodes)) for node in facts.optimised or ())
    return replace(
        facts,
        assigned=renamed(node for node in listed if node.name not in again),
        events=renamed(facts.events),
        optimised=None if facts.optimised is None else tuple(holders),
        log=tuple(line.replace(prefix, "") for line in facts.log),
    )


@dataclass(frozen=True, slots=True)
class MainGraph:
    """The executed main graph, by node name."""

    counts: Mapping[str, int]
    op_types: Mapping[str, str | None]
    providers: Mapping[str, str]
    """Provider of a node by other sources than the list: the profile, or the devices of the plan."""
    compiled: Collection[AssignedNode]
    """Entries in its compiled subgraphs."""
    has_subgraphs: bool
    """Whether a node of it may be control flow."""


def split_list(
    facts: SessionFacts, main: MainGraph, inner_names: Collection[str], ran: Collection[str]
) -> tuple[tuple[AssignedNode, ...], tuple[AssignedNode, ...]]:
    """The entries of the assignment list in the main graph, and those in control-flow subgraphs.

    Args:
        facts: The facts of one session.
        main: The executed main graph.
        inner_names: New names of unnamed entries in control-flow subgraphs.
        ran: Names of nodes that ran only in subgraphs.
    """
    listed = facts.assigned or ()
    if not (main.has_subgraphs if facts.optimised is None else any(node.subgraph_nodes for node in facts.optimised)):
        return listed, ()
    in_main, in_subgraphs = (
        Counter(node.name for node in nodes if node.name) for nodes in (facts.graph, facts.subgraph_nodes)
    )
    names = {*in_main, *in_subgraphs}
    below = {*in_subgraphs, *(node.name for node in facts.graph if node.op_type in CONTROL_FLOW)}

    def is_of_main(name: str) -> bool:
        """Whether the name of a new node begins with the name of a node that only the main graph has.

        E.g. MatMul, Add and Relu before an If: the list has `NAME/MatMulAddFusion`, the plan a node that fuses it.
        """
        if name in in_subgraphs or name in ran:
            return False
        known = naming.replaced_by(name, names)
        return bool(known) and known[-1] not in below

    inner = {place for place, node in enumerate(listed) if node.name and node.name in inner_names}
    groups: dict[tuple[str, str], list[int]] = {}  # nodes without a name are distinguished by operator
    for place, node in enumerate(listed):
        if place not in inner and node not in main.compiled:
            groups.setdefault((node.name, "" if node.name else node.op_type), []).append(place)
    counts = in_main - Counter(node.name for node in main.compiled)
    for (name, _), places in groups.items():
        rest = _without_main(listed, places, main)
        if is_of_main(name):
            inside = 0
        elif counts[name] and in_subgraphs[name]:
            inside = min(len(rest), in_subgraphs[name])
        else:
            inside = max(min(len(rest), len(places) - counts[name]), 0)
        inner.update(rest[:inside])
    found: tuple[list[AssignedNode], list[AssignedNode]] = ([], [])
    for place, node in enumerate(listed):
        found[place in inner].append(node)
    return tuple(found[0]), tuple(found[1])


def _without_main(listed: Sequence[AssignedNode], places: Sequence[int], main: MainGraph) -> list[int]:
    """The entries of a name without the most similar ones, as many as the main graph has.

    ONNX Runtime partitions the subgraphs before the graph, one provider after the other, so the last entry on a
    provider is in the main graph.
    """
    name = listed[places[0]].name
    op, provider = main.op_types.get(name), main.providers.get(name)
    homes = sorted({listed[place].provider for place in places}, reverse=True)

    def likeness(place: int) -> tuple[bool, bool, int, int]:
        entry = listed[place]
        return entry.op_type == op, entry.provider == provider, homes.index(entry.provider), place

    ranked = sorted(places, key=likeness)
    chosen = set(ranked[len(ranked) - min(main.counts.get(name, 0), len(ranked)) :])
    return [place for place in places if place not in chosen]
