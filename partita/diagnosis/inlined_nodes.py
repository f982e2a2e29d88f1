"""Nodes of inlined functions: operators that ONNX Runtime implements as functions, and model-local functions. Pure.

A node of a local function is named `_inlfunc_`, the function, a number for repeated calls, and its own name
(`Graph::InlineFunctionProto` in onnxruntime/core/graph/graph.cc). Nodes of other functions have no name.

The plan names an unnamed node by operator and running number (HardSigmoid0) in graph order. The profile names it by
operator and node index (HardSigmoid_3) in the order of execution. The log, the assignment list and the optimised graph
have no name for it. With several streams, graph order and execution order differ.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from partita.observations.facts import AssignedNode, GraphNode, NodeEvent, SessionFacts
from partita.observations.log_pattern import LogPattern
from partita.observations.names import INLINED

NUMBERED = re.compile(r"(?P<op>[A-Za-z](\w*?[A-Za-z])?)(?P<number>\d+)")
INDEXED = re.compile(r"(?P<op>[A-Za-z]\w*)_(?P<number>\d+)")
MOST_WAYS = 64
"""Maximum number of tested assignments of providers to streams; a run has two or three of each."""
NODE_GROUP = r"(?P<node>\S+)"
"""The group for a node's name in most patterns; a real name may contain blanks."""
Parts = Mapping[str, tuple[str, ...]]


def with_names(facts: SessionFacts, events: Sequence[NodeEvent]) -> SessionFacts:
    """The facts with the plan's names for nodes with other names in other sources, where the match is unique.

    `events`: of the main graph, in order.
    """
    plan = {name for stream in facts.plan or () for name in stream}
    planned = by_operator(plan - {node.name for node in facts.graph} - {event.name for event in facts.events})
    if not planned:
        return facts
    first = [event for event in events if event.run == events[0].run]
    names = _by_stream(facts.plan or (), first, planned)
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
    """Profile name -> plan name: a stream runs in order, and all nodes of a provider are in one stream.

    Empty if no assignment of providers to streams fits, or if several give different names.
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
    """Profile name -> plan name in one stream; None if the nodes do not match."""
    if len(stream) != len(events):
        return None
    names: dict[str, str] = {}
    for name, event in zip(stream, events, strict=True):
        if name in nameless and event.op_type == nameless[name] and INDEXED.fullmatch(event.name):
            names[event.name] = name
        elif name != event.name:
            return None
    return names


def _name_assigned(
    assigned: Sequence[AssignedNode],
    planned: Mapping[str, list[str]],
    providers: Mapping[str, str],
    inside: Collection[tuple[str, str]],
) -> tuple[AssignedNode, ...]:
    """The assignment list with names, where it has as many nodes of an operator on a provider as ran there.

    Nodes of one operator on one provider are interchangeable. Without a run, all nodes of an operator must be on one
    provider; the list may then have more nodes than names, because some were fused or folded later. `inside`: operators
    and providers of nodes that ran in control-flow subgraphs, which are also listed.
    """
    named = list(assigned)
    for op, names in planned.items():
        nameless = [position for position, node in enumerate(assigned) if not node.name and node.op_type == op]
        for provider in dict.fromkeys(assigned[position].provider for position in nameless):
            here = [position for position in nameless if assigned[position].provider == provider]
            ran = [name for name in names if providers.get(name) == provider]
            if not any(name in providers for name in names) and len(here) == len(nameless) >= len(names):
                here, ran = here[: len(names)], names
            in_subgraphs = (op, provider) in inside
            if len(here) == len(ran) or (in_subgraphs and ran and len(here) > len(ran)):
                for position, name in zip(here, ran, strict=False):
                    named[position] = replace(named[position], name=name)
    return tuple(named)


def _name_optimised(optimised: Sequence[GraphNode], planned: Mapping[str, list[str]]) -> tuple[GraphNode, ...]:
    """The optimised graph, in graph order, with names for operators with equal numbers in the plan."""
    named = list(optimised)
    for op, names in planned.items():
        nameless = [position for position, node in enumerate(optimised) if not node.name and node.op_type == op]
        if len(nameless) == len(names):
            for position, name in zip(nameless, names, strict=True):
                named[position] = replace(named[position], name=name)
    return tuple(named)


def by_operator(names: Iterable[str]) -> dict[str, list[str]]:
    """Operator -> names of the form operator and number, in the order of the numbers."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = NUMBERED.fullmatch(name)
        if match is not None:
            found.setdefault(match["op"], []).append((int(match["number"]), name))
    return {op: [name for _, name in sorted(numbered)] for op, numbered in found.items()}


def _nodes_without_name(facts: SessionFacts, order: Iterable[str]) -> tuple[str, ...]:
    """Nodes of the order that only the plan names."""
    known = {node.name for node in facts.graph}
    made = {node.name: node.op_type for node in facts.optimised or ()}
    made |= {event.name: event.op_type for event in facts.events}
    found = ((name, match["op"]) for name in order if name not in known and (match := NUMBERED.fullmatch(name)))
    return tuple(name for name, op in found if made.get(name, op) == op)


def functions_expanded(facts: SessionFacts, order: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Node of a local function -> the file node that calls it, without an optimised graph.

    Compiling providers write no such graph: `openvino-local-function` and `qnn-local-function` of tests/planted.
    """
    return _callers(_of_local_functions(facts, order), removed_nodes(facts.graph, facts, order))


def _of_local_functions(facts: SessionFacts, order: Iterable[str]) -> tuple[str, ...]:
    """Nodes of the order with the name of a local function."""
    known = {node.name for node in facts.graph}
    return tuple(name for name in order if name.startswith(INLINED) and name not in known)


def _callers(local: Iterable[str], left: Sequence[GraphNode]) -> dict[str, tuple[str, ...]]:
    """Node of a local function -> its file node, if only one calls a function of that name."""
    found: dict[str, tuple[str, ...]] = {}
    for name in local:
        calls = [node for node in left if name.startswith(f"{INLINED}{node.op_type}_")]
        longest = max((len(node.op_type) for node in calls), default=0)
        calls = [node for node in calls if len(node.op_type) == longest]
        if len(calls) == 1:
            found[name] = (calls[0].name,)
    return found


def may_be_part_of(facts: SessionFacts, order: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Node of an inlined function -> all removed file nodes, one of which contains it."""
    parts = (*_nodes_without_name(facts, order), *_of_local_functions(facts, order))
    left = tuple(node.name for node in removed_nodes(facts.graph, facts, order)) if parts else ()
    return dict.fromkeys(parts, left)


def removed_nodes(nodes: Iterable[GraphNode], facts: SessionFacts, order: Iterable[str]) -> list[GraphNode]:
    """The file nodes in `nodes` that are neither executed nor in the assignment list."""
    present = {*order, *(node.name for node in facts.assigned or ())}
    return [node for node in nodes if node.name and node.name not in present]


def with_blank(pattern: LogPattern) -> re.Pattern[str] | None:
    """The pattern for lines with a blank in place of the name; None if the pattern has no node name."""
    if pattern.pattern.endswith(f" {NODE_GROUP}"):
        return re.compile(pattern.pattern.removesuffix(f" {NODE_GROUP}") + r"\s*$")
    if f" {NODE_GROUP} " in pattern.pattern:
        return re.compile(pattern.pattern.replace(f" {NODE_GROUP} ", " {2,}"))
    return None


def blank_lines(
    lines: Iterable[str], patterns: Iterable[LogPattern], fallbacks: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Node without a name (`fallbacks`) -> log lines about it, which have a blank in place of the name.

    E.g. `webgpu-bernoulli-unfolded` and `cuda-centre-crop-sizes-in-a-branch` of tests/planted.

    Lines with an operator are about its nodes, if there is a line for each. Other lines are about the remaining nodes,
    if their number is a multiple of the number of nodes: ONNX Runtime queries a provider more than once.
    """
    candidates = list(lines) if fallbacks else []
    spelled = [blank for pattern in patterns if (blank := with_blank(pattern)) is not None]
    found: dict[str, tuple[str, ...]] = {}
    for pattern in sorted(spelled, key=lambda each: "op" not in each.groupindex):
        fitting = [(match.groupdict().get("op"), line) for line in candidates if (match := pattern.search(line))]
        for op in dict.fromkeys(op for op, _ in fitting):
            nodes = [name for name in fallbacks if name not in found and op in (None, *by_operator([name]))]
            about = [line for each, line in fitting if each == op]
            enough = len(about) >= len(nodes) if op else bool(nodes) and len(about) % len(nodes) == 0
            found.update(dict.fromkeys(nodes if enough else (), (about[0],)))
    return found


PREFIX = r"_if_(?P<side>then|else)_branch_(token_\d+_)?"
INLINED_NODE = re.compile(rf"(?P<branch>{PREFIX})(?P<op>[A-Za-z]\w*?)(_token_\d+)?")


def inlined_branches(facts: SessionFacts, order: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The file node of each executed node of an inlined branch, if known."""
    listed = (*order, *(node.name for node in facts.assigned or ()))
    names = {name: match for name in dict.fromkeys(listed) if (match := INLINED_NODE.fullmatch(name))}
    if not names:
        return {}
    gone = removed_nodes(facts.subgraph_nodes, facts, order)
    found: dict[str, tuple[str, ...]] = {}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, match in names.items():
        groups.setdefault((match["branch"], match["op"]), []).append(name)
    for (branch, op), alike in groups.items():
        inner = [
            (node.name,) for node in gone if node.op_type == op and node.subgraph_attribute == f"{_side(branch)}_branch"
        ]
        rivals = [each for each, ops in groups if ops == op and _side(each) == _side(branch)]
        if len(inner) == len(alike) and len(rivals) == 1:
            found |= dict(zip(alike, inner, strict=True))
    return found


def _side(name: str) -> str:
    """The (innermost) branch in an executed name."""
    sides = [match["side"] for match in re.finditer(PREFIX, name)]
    return sides[-1] if sides else ""
