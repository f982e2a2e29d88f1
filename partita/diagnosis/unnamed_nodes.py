"""Names for nodes without one, and the functions that contain them. Pure.

ONNX Runtime inlines functions: operators that it implements as functions, and functions of the file. A node of a
function of the file is named `_inlfunc_`, the function, a number for repeated calls, and its own name
(`Graph::InlineFunctionProto` in onnxruntime/core/graph/graph.cc). Nodes of other functions have no name: the plan names
them by operator and running number (HardSigmoid0) in graph order, the profile by operator and node index
(HardSigmoid_3) in the order of execution. The log, the assignment list and the optimised graph have no name for them.

The plan does not include control-flow subgraphs. Their listed nodes without a name get names that continue the numbers
of the plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from partita.diagnosis.sources import main_graph_events, providers_by_device
from partita.observations.facts import AssignedNode, GraphNode, NodeEvent, SessionFacts
from partita.observations.grouping import grouped
from partita.observations.names import INLINED

NUMBERED = re.compile(r"(?P<op>[A-Za-z](\w*?[A-Za-z])?)(?P<number>\d+)")
BRANCH = re.compile(r"(?P<branch>_if_(?P<side>then|else)_branch_(token_\d+_)?)(?P<op>[A-Za-z]\w*?)(_token_\d+)?")
Named = TypeVar("Named", AssignedNode, GraphNode, NodeEvent)
INDEXED = re.compile(r"(?P<op>[A-Za-z]\w*)_(?P<number>\d+)")


def with_names(facts: SessionFacts) -> SessionFacts:
    """The facts with names for nodes without one, those of the plan for nodes of the main graph."""
    facts = _with_file_names(facts)
    events, _ = main_graph_events(facts.events)
    known = {node.name for node in facts.graph} | {event.name for event in facts.events}
    planned = by_operator({name for stream in facts.plan or () for name in stream} - known)
    first = [event for event in events if event.run == events[0].run]
    ran_on = providers_by_device(facts) | {event.name: event.provider for event in first}
    names = _names_in_profile(facts.plan or (), first, planned, ran_on) if planned else {}
    providers = {names.get(name, name): provider for name, provider in ran_on.items()}
    return replace(
        facts,
        events=tuple(replace(event, name=names.get(event.name, event.name)) for event in facts.events),
        assigned=_name_assigned(facts, planned, providers) if facts.assigned is not None else None,
        optimised=_name_optimised(facts.optimised, planned) if facts.optimised is not None else None,
    )


def _with_file_names(facts: SessionFacts) -> SessionFacts:
    """The facts with the file's names for the nodes of a SequenceMap's graph.

    ONNX Runtime lists them twice: before it inlines the function, and in the resulting Loop under a name with a prefix.
    """
    prefix = f"{INLINED}SequenceMap_"
    names = {f"{prefix}{node.name}": node.name for node in facts.subgraph_nodes if node.name}
    again = {names[node.name] for node in facts.assigned or () if node.name in names}
    if not again:
        return facts

    def renamed(nodes: Iterable[Named]) -> tuple[Named, ...]:
        return tuple(replace(node, name=names.get(node.name, node.name)) for node in nodes)

    holders = [replace(node, subgraph_nodes=renamed(node.subgraph_nodes)) for node in facts.optimised or ()]
    return replace(
        facts,
        assigned=renamed(node for node in facts.assigned or () if node.name not in again),
        events=renamed(facts.events),
        optimised=None if facts.optimised is None else tuple(holders),
        log=tuple(line.replace(prefix, "") for line in facts.log),
    )


def _names_in_profile(
    plan: Sequence[Sequence[str]], events: Sequence[NodeEvent], planned: Mapping[str, list[str]], ran_on: dict[str, str]
) -> dict[str, str]:
    """Profile name -> plan name. A stream runs in order, and all nodes of a provider are in one stream.

    The device of a stream, or its named nodes, show its providers (`ran_on`). Nodes of an operator are omitted if a
    stream has not as many as ran on its providers.
    """
    homes = [{ran_on[name] for name in stream if name in ran_on} for stream in plan]
    unknown = {event.provider for event in events}.difference(*homes)
    homes = [home if home and not all(homes) else home | unknown for home in homes]
    found: dict[str, str] = {}
    for stream, home in zip(plan, homes, strict=True):
        for op, names in planned.items():
            ours = [name for name in stream if name in names]
            ran = [event for event in events if event.op_type == op and INDEXED.fullmatch(event.name)]
            ran = [event for event in ran if event.provider in home and event.name not in stream]
            if len(ours) == len(ran):
                found |= {event.name: name for event, name in zip(ran, ours, strict=True)}
    return found


def _name_assigned(
    facts: SessionFacts, planned: Mapping[str, list[str]], providers: Mapping[str, str]
) -> tuple[AssignedNode, ...]:
    """The assignment list with names. Nodes of one operator on one provider are interchangeable.

    Without a run and a device, all nodes of an operator must be on one provider. The others may be in control-flow
    subgraphs, as many as the optimised graph has there.
    """
    named = list(facts.assigned or ())
    plan = {name for stream in facts.plan or () for name in stream}
    numbers = by_operator(plan | op_types_of(named, facts.graph, facts.subgraph_nodes).keys())
    for op in dict.fromkeys(node.op_type for node in named if not node.name):
        names = planned.get(op, [])
        left = [place for place, node in enumerate(named) if not node.name and node.op_type == op]
        homes = dict.fromkeys(named[place].provider for place in left)
        for provider in homes:
            here = [place for place in left if named[place].provider == provider]
            alone = len(homes) == 1 and not any(name in providers for name in names)
            for place, name in zip(here, (n for n in names if alone or providers.get(n) == provider), strict=False):
                named[place] = replace(named[place], name=name)
        left = [place for place in left if not named[place].name]
        if facts.optimised is not None:
            inner = (each for node in facts.optimised for each in node.subgraph_nodes)
            left = left[: sum(not node.name and node.op_type == op for node in inner)]
        next_number = int(numbers[op][-1].removeprefix(op)) + 1 if op in numbers else 0
        for number, place in enumerate(left if facts.subgraph_nodes else (), next_number):
            named[place] = replace(named[place], name=f"{op}{number}")
    return tuple(named)


def _name_optimised(optimised: Sequence[GraphNode], planned: Mapping[str, list[str]]) -> tuple[GraphNode, ...]:
    """The optimised graph, in graph order, with names for operators with equal numbers in the plan."""
    counts = Counter(node.op_type for node in optimised if not node.name)
    left = {op: iter(names) for op, names in planned.items() if counts[op] == len(names)}
    return tuple(
        replace(node, name=next(left[node.op_type])) if not node.name and node.op_type in left else node
        for node in optimised
    )


def by_operator(names: Iterable[str]) -> dict[str, list[str]]:
    """Operator -> names of the form operator and number, in the order of the numbers."""
    matches = [match for name in names if (match := NUMBERED.fullmatch(name))]
    matches.sort(key=lambda match: int(match["number"]))
    return {op: [match[0] for match in own] for op, own in grouped(matches, lambda match: match["op"]).items()}


def op_types_of(*sources: Iterable[AssignedNode | GraphNode | NodeEvent] | None) -> dict[str, str]:
    """Operators of nodes by name; a later source overrides an earlier one."""
    return {node.name: node.op_type for source in sources for node in source or ()}


def function_nodes(
    facts: SessionFacts, names: Iterable[str], gone: Collection[GraphNode]
) -> dict[str, tuple[str, ...]]:
    """Node of an inlined function -> the file nodes of `gone` that may contain it; for a named function, its callers.

    `names`: executed or listed nodes. `gone`: file nodes that are neither.
    """
    known = {node.name for node in (*facts.graph, *facts.subgraph_nodes)}
    made = op_types_of(facts.assigned, facts.optimised, facts.events)
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        match = NUMBERED.fullmatch(name)
        if name.startswith(INLINED) and name not in known:
            calls = [node for node in gone if name.startswith(f"{INLINED}{node.op_type}_")]
            longest = max((len(node.op_type) for node in calls), default=0)
            found[name] = tuple(node.name for node in calls if len(node.op_type) == longest)
        elif match is not None and name not in known and made.get(name, match["op"]) == match["op"]:
            found[name] = tuple(node.name for node in gone)
    return found


def branch_nodes(names: Iterable[str], gone: Iterable[GraphNode]) -> dict[str, tuple[str, ...]]:
    """Executed node of a branch of an If with constant condition -> its file node, by operator and order.

    `gone`: nodes of control-flow subgraphs that are not executed. Omits an operator of two inlined branches.
    """
    alike = [match for name in dict.fromkeys(names) if (match := BRANCH.fullmatch(name))]
    found: dict[str, tuple[str, ...]] = {}
    for (side, op), matches in grouped(alike, lambda match: (match["side"], match["op"])).items():
        inner = [node for node in gone if (node.op_type, node.subgraph_attribute) == (op, f"{side}_branch")]
        if len(inner) == len(matches) and len({match["branch"] for match in matches}) == 1:
            found |= {match[0]: (node.name,) for match, node in zip(matches, inner, strict=True)}
    return found
