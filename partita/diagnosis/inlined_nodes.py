"""Nodes that ONNX Runtime puts in the place of a function: an operator that it has only as one, or a local one. Pure.

Nodes of a local function are named `_inlfunc_`, the function, a number where it is called again, and their own name
(`Graph::InlineFunctionProto` in onnxruntime/core/graph/graph.cc). All others have no name.

The plan calls them by operator and a running number (HardSigmoid0) in the order of the graph, the profile by operator
and the number of the node (HardSigmoid_3) in the order of execution, the log, the assignment list and the optimised
graph not at all. The order of the graph and that of execution differ as soon as there are several streams.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from partita.observations.facts import AssignedNode, GraphNode, NodeEvent, SessionFacts
from partita.observations.log_pattern import LogPattern
from partita.observations.names import INLINED

NUMBERED = re.compile(r"(?P<op>[A-Za-z](\w*?[A-Za-z])?)(?P<number>\d+)")
INDEXED = re.compile(r"(?P<op>[A-Za-z]\w*)_(?P<number>\d+)")
MOST_WAYS = 64
"""So many ways to lay providers on streams are looked at; a run has two or three of each."""
NODE_GROUP = r"(?P<node>\S+)"
"""How most patterns spell a node's name, which may hold blanks in truth."""
Parts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class FallbackNode:
    """A node without a name that is not on the preferred provider."""

    name: str
    op_type: str


def with_names(facts: SessionFacts, events: Sequence[NodeEvent]) -> SessionFacts:
    """The facts with the plan's names for nodes that other sources call otherwise, where it is clear which is which.

    `events`: those of the main graph, in order.
    """
    plan = {name for stream in facts.plan or () for name in stream}
    planned = by_operator(plan - {node.name for node in facts.graph} - {event.name for event in facts.events})
    if not planned:
        return facts
    first = [event for event in events if event.run == events[0].run]
    names = _by_stream(facts.plan or (), first, planned) or _by_count(first, planned, plan)
    main = {event.name for event in events}
    inside = {
        (event.op_type, event.provider)
        for event in facts.events
        if event.name not in main and INDEXED.fullmatch(event.name)
    }
    renamed = tuple(replace(event, name=names.get(event.name, event.name)) for event in facts.events)
    providers = {names.get(event.name, event.name): event.provider for event in first}
    return replace(
        facts,
        events=renamed,
        assigned=_name_assigned(facts.assigned, planned, providers, inside) if facts.assigned is not None else None,
        optimised=_name_optimised(facts.optimised, planned) if facts.optimised is not None else None,
    )


def _by_stream(
    plan: Sequence[Sequence[str]], events: Sequence[NodeEvent], planned: Mapping[str, list[str]]
) -> dict[str, str]:
    """Names of the plan by those of the profile: a stream runs in order, and all nodes of a provider are in one stream.

    Empty when no way of laying providers on streams fits, or when two ways give other names.
    """
    nameless = {name: op for op, names in planned.items() for name in names}
    providers = sorted({event.provider for event in events})
    found: list[dict[str, str]] = []
    for way in itertools.islice(itertools.product(range(len(plan)), repeat=len(providers)), MOST_WAYS):
        streams = dict(zip(providers, way, strict=True))
        names: dict[str, str] | None = {}
        for number, stream in enumerate(plan):
            ran = [event for event in events if streams[event.provider] == number]
            joined = _join_stream(stream, ran, nameless)
            names = {**names, **joined} if names is not None and joined is not None else None
        if names is not None and names not in found:
            found.append(names)
    return found[0] if len(found) == 1 else {}


def _join_stream(
    stream: Sequence[str], events: Sequence[NodeEvent], nameless: Mapping[str, str]
) -> dict[str, str] | None:
    """Names of one stream by those of the profile; None when its nodes are not these."""
    if len(stream) != len(events):
        return None
    names: dict[str, str] = {}
    for name, event in zip(stream, events, strict=True):
        if name in nameless and event.op_type == nameless[name] and INDEXED.fullmatch(event.name):
            names[event.name] = name
        elif name != event.name:
            return None
    return names


def _by_count(events: Sequence[NodeEvent], planned: Mapping[str, list[str]], plan: Collection[str]) -> dict[str, str]:
    """The same for operators whose nodes are all on one provider, where the plan has as many of them as ran."""
    names: dict[str, str] = {}
    for op, wanted in planned.items():
        ran = [
            event
            for event in events
            if event.op_type == op and event.name not in plan and INDEXED.fullmatch(event.name)
        ]
        if len(ran) == len(wanted) and len({event.provider for event in ran}) == 1:
            names.update(zip((event.name for event in ran), wanted, strict=True))
    return names


def _name_assigned(
    assigned: Sequence[AssignedNode],
    planned: Mapping[str, list[str]],
    providers: Mapping[str, str],
    inside: Collection[tuple[str, str]],
) -> tuple[AssignedNode, ...]:
    """The assignment list with names where it has as many nodes of an operator on a provider as ran there.

    Nodes of one operator on one provider are alike in it. Without a run, an operator must be on one provider; there may
    be more nodes than names then, because some were fused or folded away after they had been assigned. `inside`:
    operators and providers of nodes that ran in control-flow subgraphs, which the list has as well.
    """
    named = list(assigned)
    for op, names in planned.items():
        nameless = [position for position, node in enumerate(assigned) if not node.name and node.op_type == op]
        for provider in dict.fromkeys(assigned[position].provider for position in nameless):
            here = [position for position in nameless if assigned[position].provider == provider]
            ran = [name for name in names if providers.get(name) == provider]
            if not any(name in providers for name in names) and len(here) == len(nameless) >= len(names):
                here, ran = here[: len(names)], names
            bodies = any((op, provider) == each for each in inside)
            if len(here) == len(ran) or (bodies and ran and len(here) > len(ran)):
                for position, name in zip(here, ran, strict=False):
                    named[position] = replace(named[position], name=name)
    return tuple(named)


def _name_optimised(optimised: Sequence[GraphNode], planned: Mapping[str, list[str]]) -> tuple[GraphNode, ...]:
    """The optimised graph, in the order in which the plan counts, with names where the numbers match."""
    named = list(optimised)
    for op, names in planned.items():
        nameless = [position for position, node in enumerate(optimised) if not node.name and node.op_type == op]
        if len(nameless) == len(names):
            for position, name in zip(nameless, names, strict=True):
                named[position] = replace(named[position], name=name)
    return tuple(named)


def by_operator(names: Iterable[str]) -> dict[str, list[str]]:
    """Names that are an operator and a number, by operator, in the order of their numbers."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = NUMBERED.fullmatch(name)
        if match is not None:
            found.setdefault(match["op"], []).append((int(match["number"]), name))
    return {op: [name for _, name in sorted(numbered)] for op, numbered in found.items()}


def _nodes_without_name(facts: SessionFacts, order: Iterable[str]) -> tuple[str, ...]:
    """Nodes of the order that have their name from the plan alone."""
    known = {node.name for node in facts.graph}
    made = {node.name: node.op_type for node in facts.optimised or ()}
    made |= {event.name: event.op_type for event in facts.events}
    found = ((name, match["op"]) for name in order if name not in known and (match := NUMBERED.fullmatch(name)))
    return tuple(name for name, op in found if made.get(name, op) == op)


def functions_expanded(facts: SessionFacts, order: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """For each node of a function, the file nodes that it may be a part of, without an optimised graph.

    The function in the name of a node is enough where one node calls it. Nodes without a name come from the file nodes
    that are gone and that the log rejects, if these are of one operator.
    """
    parts, local = _nodes_without_name(facts, order), _of_local_functions(facts, order)
    left = removed_nodes(facts.graph, facts, order)
    return {**_callers(local, left), **_turned_down(facts, parts, left)}


def _of_local_functions(facts: SessionFacts, order: Iterable[str]) -> tuple[str, ...]:
    """Nodes of the order that ONNX Runtime named after a local function."""
    known = {node.name for node in facts.graph}
    return tuple(name for name in order if name.startswith(INLINED) and name not in known)


def _callers(local: Iterable[str], left: Sequence[GraphNode]) -> dict[str, tuple[str, ...]]:
    """The exported node that calls the function of each node, where no other calls one of that name."""
    found: dict[str, tuple[str, ...]] = {}
    for name in local:
        calls = [node for node in left if name.startswith(f"{INLINED}{node.op_type}_")]
        longest = max((len(node.op_type) for node in calls), default=0)
        calls = [node for node in calls if len(node.op_type) == longest]
        if len(calls) == 1:
            found[name] = (calls[0].name,)
    return found


def called_in_subgraphs(facts: SessionFacts, order: Sequence[str], names: Iterable[str]) -> Parts:
    """The same for nodes in control-flow subgraphs with `names` that the main graph has as well."""
    local = [name for name in names if name.startswith(INLINED)]
    return _callers(local, removed_nodes(facts.inner, facts, order)) if local else {}


def _turned_down(facts: SessionFacts, parts: Sequence[str], left: Sequence[GraphNode]) -> dict[str, tuple[str, ...]]:
    """For all nodes without a name, those nodes of one operator that are gone and that the log turns down."""
    told = [
        node for node in left if any(f"Op type: {node.op_type} node name: {node.name}" in line for line in facts.log)
    ]
    if len({node.op_type for node in told}) != 1:
        return {}
    return dict.fromkeys(parts, tuple(node.name for node in told))


def may_be_part_of(facts: SessionFacts, order: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Nodes that came from functions, and the file nodes that each may come from: all that are gone."""
    parts = (*_nodes_without_name(facts, order), *_of_local_functions(facts, order))
    left = tuple(node.name for node in removed_nodes(facts.graph, facts, order)) if parts else ()
    return dict.fromkeys(parts, left)


def removed_nodes(nodes: Iterable[GraphNode], facts: SessionFacts, order: Iterable[str]) -> list[GraphNode]:
    """Those of `nodes` of the file that no provider was given, and that do not run."""
    there = {*order, *(node.name for node in facts.assigned or ())}
    return [node for node in nodes if node.name and node.name not in there]


def with_blank(pattern: LogPattern) -> re.Pattern[str] | None:
    """The pattern for lines with a blank in place of the name; None when it is not about one node."""
    if pattern.pattern.endswith(f" {NODE_GROUP}"):
        return re.compile(pattern.pattern.removesuffix(f" {NODE_GROUP}") + r"\s*$")
    if f" {NODE_GROUP} " in pattern.pattern:
        return re.compile(pattern.pattern.replace(f" {NODE_GROUP} ", " {2,}"))
    return None


def blank_lines(
    lines: Iterable[str], patterns: Iterable[LogPattern], strays: Sequence[FallbackNode]
) -> dict[str, tuple[str, ...]]:
    """Log lines with a blank in place of the name, by the node without a name that they are about.

    Lines with an operator are about the nodes of this operator, when there are enough of them. The others are about the
    nodes that are left, when they are as many, or twice as many: ONNX Runtime queries a provider more than once.
    """
    said = list(lines) if strays else []
    spelled = [blank for pattern in patterns if (blank := with_blank(pattern)) is not None]
    found: dict[str, tuple[str, ...]] = {}
    for pattern in sorted(spelled, key=lambda each: "op" not in each.groupindex):
        fitting = [(match.groupdict().get("op"), line) for line in said if (match := pattern.search(line))]
        for op in dict.fromkeys(op for op, _ in fitting):
            nodes = [each.name for each in strays if each.name not in found and op in (None, each.op_type)]
            about = [line for each, line in fitting if each == op]
            enough = len(about) >= len(nodes) if op else bool(nodes) and len(about) % len(nodes) == 0
            found.update(dict.fromkeys(nodes if enough else (), (about[0],)))
    return found
