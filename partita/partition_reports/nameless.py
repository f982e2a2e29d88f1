"""Nodes without a name: those that ONNX Runtime puts in the place of an operator that it has only as a function. Pure.

The plan calls them by operator and a running number (HardSigmoid0), the profile by operator and node index
(HardSigmoid_3), the assignment list and the optimised graph not at all. Their order is the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from partita.partition_reports.facts import SessionFacts

NUMBERED = re.compile(r"(?P<op>[A-Za-z]\w*?)(?P<number>\d+)")
INDEXED = re.compile(r"(?P<op>[A-Za-z]\w*)_(?P<number>\d+)")


def with_names(facts: SessionFacts) -> SessionFacts:
    """The facts with the plan's names for nodes that other sources call otherwise, where their numbers agree."""
    plan = {name for stream in facts.plan or () for name in stream}
    seen = {node.name for node in facts.graph} | {event.name for event in facts.events}
    planned = by_operator(NUMBERED, plan - seen)
    if not planned:
        return facts
    timed = by_operator(INDEXED, {event.name for event in facts.events} - plan)
    names = {
        old: new
        for op, wanted in planned.items()
        if len(timed.get(op, ())) == len(wanted)
        for old, new in zip(timed[op], wanted, strict=True)
    }
    events = tuple(replace(event, name=names.get(event.name, event.name)) for event in facts.events)
    return name_lists(replace(facts, events=events), planned)


def name_lists(facts: SessionFacts, planned: dict[str, list[str]]) -> SessionFacts:
    """The same for the assignment list and the optimised graph.

    The list lacks nodes of some providers, so that it is only joined where it has all of an operator, or where those of
    the profile that it can mean are told by their provider.
    """
    providers = {event.name: event.provider for event in facts.events}
    assigned = list(facts.assigned or ())
    for op, names in planned.items():
        nameless = [position for position, node in enumerate(assigned) if not node.name and node.op_type == op]
        listed = {assigned[position].provider for position in nameless}
        fitting = names if len(nameless) == len(names) else [name for name in names if providers.get(name) in listed]
        if len(fitting) == len(nameless):
            for position, name in zip(nameless, fitting, strict=True):
                assigned[position] = replace(assigned[position], name=name)
    optimised = list(facts.optimised or ())
    for op, names in planned.items():
        nameless = [position for position, node in enumerate(optimised) if not node.name and node.op_type == op]
        if len(nameless) == len(names):
            for position, name in zip(nameless, names, strict=True):
                optimised[position] = replace(optimised[position], name=name)
    return replace(
        facts,
        assigned=tuple(assigned) if facts.assigned is not None else None,
        optimised=tuple(optimised) if facts.optimised is not None else None,
    )


def by_operator(pattern: re.Pattern[str], names: Iterable[str]) -> dict[str, list[str]]:
    """Names of the form of `pattern`, by operator, in the order of their numbers."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            found.setdefault(match["op"], []).append((int(match["number"]), name))
    return {op: [name for _, name in sorted(numbered)] for op, numbered in found.items()}


def unfolded(facts: SessionFacts, order: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each node without a name, the exported nodes that it may be a part of: gone, and turned down by the log.

    Empty when they are of several operators, so that it is not clear which.
    """
    ran = set(order)
    known = {node.name for node in facts.graph}
    parts = [name for name in ran - known if NUMBERED.fullmatch(name) and not name.startswith("Memcpy")]
    gone = [node for node in facts.graph if node.name and node.name not in ran]
    told = [
        node
        for node in gone
        if any(f"Op type: {node.op_type} node name: {node.name}" in line for line in facts.log)
    ]  # fmt: skip
    if not parts or len({node.op_type for node in told}) != 1:
        return {}
    return dict.fromkeys(parts, tuple(node.name for node in told))
