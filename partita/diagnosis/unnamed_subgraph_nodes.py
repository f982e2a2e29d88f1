"""Nodes without a name in If, Loop and Scan, where ONNX Runtime inlined a function there. Pure.

The plan has no control-flow subgraphs, so it does not name these nodes. They get names as the plan gives to nodes of
the main graph, by operator and a running number (`Max0`) that continues the main graph's numbers: in the order in which
they ran, or in that of the assignment list where not all of them did. The optimised graph has the subgraphs and so the
number of these nodes in each control-flow node. A SequenceMap becomes a Loop, and no node of it that could be fused is
outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from partita.diagnosis.inlined_nodes import INDEXED, NUMBERED, by_operator, removed_nodes
from partita.diagnosis.sequence_map import has_graph_attribute
from partita.observations.facts import GraphNode, NodeEvent, SessionFacts

Owners = Mapping[str, tuple[str, ...]]


def with_names(facts: SessionFacts, inside: Iterable[NodeEvent], order: Sequence[str]) -> SessionFacts:
    """The facts with names for nodes of control-flow subgraphs that have none.

    Where the main graph has a function that is gone, nodes of the list may come from it and have been fused since. Then
    only as many are named as are in subgraphs of the optimised graph, or ran in subgraphs. No node is named of an
    operator of which the main graph has a node that is not in the list.

    Args:
        facts: The facts of one session.
        inside: Events within control flow, in order.
        order: Nodes of the main graph, which were matched with the list before.
    """
    listed = list(facts.assigned or ())
    unnamed: dict[str, list[int]] = {}
    for position, node in enumerate(listed):
        if not node.name:
            unnamed.setdefault(node.op_type, []).append(position)
    if not unnamed:
        return facts
    known = {node.name for node in listed} | _of_file(facts)
    loose = {match["op"] for name in order if name not in known and (match := NUMBERED.fullmatch(name))}
    ran = _ran(inside, known)
    unfolded = any(not has_graph_attribute(node) for node in removed_nodes(facts.graph, facts, order))
    events: dict[str, str] = {}
    for op, positions in unnamed.items():
        seen, first = ran.get(op, {}), _first_number(op, (*known, *order))
        providers = [listed[position].provider for position in positions]
        there = _count_in_subgraphs(facts, op)
        all_inside = not unfolded or (there is not None and there >= len(positions))
        as_they_ran = not all_inside or Counter(seen.values()) == Counter(providers)
        numbers = _numbers(providers, list(seen.values()) if as_they_ran else providers)
        if op not in loose:
            for position, number in zip(positions, numbers, strict=True):
                if number is not None:
                    listed[position] = replace(listed[position], name=f"{op}{first + number}")
            if as_they_ran and set(range(len(seen))) <= set(numbers):
                events |= {name: f"{op}{first + number}" for number, name in enumerate(seen)}
    renamed = tuple(replace(event, name=events.get(event.name, event.name)) for event in facts.events)
    return replace(facts, assigned=tuple(listed), events=renamed if events else facts.events)


def _numbers(listed: Iterable[str], wanted: Sequence[str]) -> list[int | None]:
    """For each listed node, by its provider, the first free place that has this provider."""
    free: dict[int, str] = dict(enumerate(wanted))
    numbers: list[int | None] = []
    for provider in listed:
        number = next((each for each, home in free.items() if home == provider), None)
        if number is not None:
            del free[number]
        numbers.append(number)
    return numbers


def _count_in_subgraphs(facts: SessionFacts, op: str) -> int | None:
    """Nodes of an operator without a name in subgraphs of the optimised graph; None when it is not known."""
    if facts.optimised is None:
        return None
    return sum(len(_unnamed(node, op)) for node in facts.optimised)


def _unnamed(holder: GraphNode, op: str) -> list[GraphNode]:
    return [node for node in holder.inside if not node.name and node.op_type == op]


def _of_file(facts: SessionFacts) -> set[str]:
    """Names of all nodes of the file."""
    return {node.name for node in (*facts.graph, *facts.inner)}


def _ran(inside: Iterable[NodeEvent], known: Collection[str]) -> dict[str, dict[str, str]]:
    """By operator: the nodes without a name that ran, by the profile's names, and their providers, in order."""
    found: dict[str, dict[str, str]] = {}
    for event in inside:
        match = INDEXED.fullmatch(event.name)
        if match is not None and match["op"] == event.op_type and event.name not in known:
            found.setdefault(event.op_type, {}).setdefault(event.name, event.provider)
    return found


def _first_number(op: str, names: Iterable[str]) -> int:
    """The first number that no node of an operator has in its name, nor any after it."""
    numbers = (int(match["number"]) for name in names if (match := NUMBERED.fullmatch(name)) and match["op"] == op)
    return max(numbers, default=-1) + 1


def owners(facts: SessionFacts, order: Sequence[str], unfolded: Owners) -> dict[str, tuple[str, ...]]:
    """The nodes that `with_names` named, and for each the file nodes that it may come from.

    `unfolded`: file nodes of the main graph's nodes that came from a function. Nodes in their subgraphs came from it.
    """
    known = _of_file(facts) | set(order)
    own = [
        node.name
        for node in facts.assigned or ()
        if node.name not in known and (match := NUMBERED.fullmatch(node.name)) and match["op"] == node.op_type
    ]
    inner = removed_nodes(facts.inner, facts, order) if own else []
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
    """The file nodes of each node with a name of its own in the subgraphs of nodes that came from a function."""
    known = _of_file(facts) | set(order)
    return {
        inner.name: unfolded[holder.name]
        for holder in facts.optimised or ()
        if holder.name in unfolded
        for inner in holder.inside
        if inner.name and inner.name not in known
    }
