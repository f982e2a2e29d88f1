"""Sources of a session: events of the main graph, execution order, providers that each source names, log lines. Pure.

The patterns of providers interpret a log line for a fallback.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from partita.diagnosis import naming
from partita.diagnosis.graphs import COMPILED, CONTROL_FLOW
from partita.observations.facts import AssignedNode, NodeEvent, ProviderFacts, SessionFacts
from partita.observations.names import CPU
from partita.observations.records import Source

HOST_DEVICE = "0"
"""ONNX Runtime's device type of the CPU."""
PREFIX = re.compile(r"^\[[VIWEF]:[^\]]*\] ?")
MEMCPY_ADDED = re.compile(r"Add (?P<op>MemcpyFromHost|MemcpyToHost) (after|before) (?P<tensor>.+) for \S+\s*$")
MEMCPY_NAME = re.compile(r"Memcpy(_token_\d+)?")
ProvidersBySource = dict[Source, frozenset[str]]
"""Source -> providers that it names for one node; a source may name several."""


def main_graph_events(events: Iterable[NodeEvent]) -> tuple[tuple[NodeEvent, ...], frozenset[str]]:
    """Events of the main graph in order, and the names of nodes that ran inside control flow."""
    ordered = sorted(events, key=lambda event: (event.run, event.order))
    frames = _outermost(event for event in ordered if event.op_type in CONTROL_FLOW)
    if not frames:
        return tuple(ordered), frozenset()
    main, subgraph_nodes = [], set()
    for event in ordered:
        if any(_is_inside(event, frame) for frame in frames.get(event.run, ())):
            subgraph_nodes.add(event.name)
        else:
            main.append(event)
    return tuple(main), frozenset(subgraph_nodes)


def _outermost(events: Iterable[NodeEvent]) -> dict[int, list[NodeEvent]]:
    """Run -> the outermost control-flow nodes; nested nodes, possibly thousands, are inside them."""
    frames: dict[int, list[NodeEvent]] = {}
    for event in sorted(events, key=lambda event: (event.start_us, -event.host_us)):
        known = frames.setdefault(event.run, [])
        if not any(_is_inside(event, frame) for frame in known):
            known.append(event)
    return frames


def _is_inside(event: NodeEvent, frame: NodeEvent) -> bool:
    """Whether `event` began within the time of the control-flow node `frame`.

    Times are whole microseconds: an event before `frame` may have the same start if its duration is 0.
    """
    if event.run != frame.run or event is frame or event.name == frame.name:
        return False
    began_within = frame.start_us <= event.start_us < frame.start_us + frame.host_us
    return began_within and (event.host_us > 0 or event.order > frame.order)


def execution_order(facts: SessionFacts, events: tuple[NodeEvent, ...]) -> tuple[tuple[str, ...], Source]:
    """Every node once, in execution order, and the source of the nodes.

    Streams of a plan run in parallel, so with several streams the last observed run gives the order.
    """
    if facts.plan is not None:
        plan = tuple(dict.fromkeys(name for stream in facts.plan for name in stream))
        if len(facts.plan) < 2 or not events:
            return plan, "plan_file"
        last = max(event.run for event in events)
        seen = {event.name: event.order for event in reversed(events) if event.run == last}
        ran = sorted((name for name in plan if name in seen), key=seen.__getitem__)
        return (*ran, *(name for name in plan if name not in seen)), "plan_file"
    if events:
        return tuple(dict.fromkeys(event.name for event in events)), "profile"
    if facts.assigned:
        return tuple(dict.fromkeys(node.name for node in facts.assigned)), "assignment"
    return tuple(dict.fromkeys(node.name for node in facts.graph)), "model_file"


def split_list(
    facts: SessionFacts,
    order: Iterable[str],
    op_types: Mapping[str, str | None],
    events: Iterable[NodeEvent],
    compiled: Collection[AssignedNode],
    inside: Collection[str],
) -> tuple[tuple[AssignedNode, ...], tuple[AssignedNode, ...]]:
    """The entries of the assignment list in the main graph, and those in control-flow subgraphs.

    The list does not name the graph, and a node name is unique only within a graph. So the entries of a name are
    counted: as many as the main graph has belong to it. An entry without evidence counts as in a subgraph, so that a
    check never passes wrongly. ONNX Runtime partitions subgraphs first, so the last entry of a name is in the main
    graph.

    Args:
        op_types: Operators of nodes of the main graph.
        events: Of the main graph.
        compiled: Entries in compiled subgraphs of the main graph.
        inside: Names of nodes that are only in subgraphs.
    """
    listed = facts.assigned or ()
    optimised = [bool(node.subgraph_nodes) for node in facts.optimised or ()]
    if not any(optimised or (op_types.get(name) in {*CONTROL_FLOW, COMPILED, None} for name in order)):
        return listed, ()
    executed = Counter(name for stream in facts.plan or (order,) for name in stream)
    in_main, in_subgraphs = (
        Counter(node.name for node in nodes if node.name) for nodes in (facts.graph, facts.subgraph_nodes)
    )
    ran_on = providers_by_device(facts) | {event.name: event.provider for event in events}
    below = {*in_subgraphs, *(node.name for node in facts.graph if node.op_type in CONTROL_FLOW)}
    counts, names = in_main - Counter(node.name for node in compiled), {*in_main, *in_subgraphs}
    groups: dict[tuple[str, str], list[int]] = {}  # nodes without a name are distinguished by operator
    for place, node in enumerate(listed):
        if node not in compiled:
            groups.setdefault((node.name, "" if node.name else node.op_type), []).append(place)
    inner: set[int] = set()
    for (name, _), places in groups.items():
        # E.g. MatMul, Add and Relu before an If: the list has `NAME/MatMulAddFusion`, the plan a node that fuses it.
        begins = [] if name in in_subgraphs or name in inside else naming.replaced_by(name, names)
        if begins and begins[-1] not in below:
            continue
        op, home = op_types.get(name), ran_on.get(name)
        ranked = sorted((listed[at].op_type == op, listed[at].provider == home, at) for at in places)
        rest = sorted(at for *_, at in ranked[: max(len(places) - executed[name], 0)])
        most = in_subgraphs[name] if counts[name] and in_subgraphs[name] else len(places) - counts[name]
        inner.update(rest[: max(most, 0)])
    return tuple(node for at, node in enumerate(listed) if at not in inner), tuple(listed[at] for at in sorted(inner))


def collect_providers(
    facts: SessionFacts,
    events: tuple[NodeEvent, ...],
    order: tuple[str, ...],
    compiled: Mapping[str, tuple[AssignedNode, ...]],
    assigned: Iterable[AssignedNode],
) -> dict[str, ProvidersBySource]:
    """Providers by source for each node of `order`, strongest first. `assigned`: listed nodes of the main graph."""
    by_source: dict[Source, dict[str, set[str]]] = {"profile": {}, "assignment": {}}
    for event in events:
        by_source["profile"].setdefault(event.name, set()).add(event.provider)
    for node in assigned:
        by_source["assignment"].setdefault(node.name, set()).add(node.provider)
    for name, nodes in compiled.items():
        by_source["assignment"].setdefault(name, set()).update(node.provider for node in nodes)
    by_device = providers_by_device(facts)
    by_source["plan_file"] = {
        name: {by_device[name]}
        for name in order
        if name in by_device and not any(name in by_node for by_node in by_source.values())
    }
    return {
        name: {source: frozenset(by_node[name]) for source, by_node in by_source.items() if name in by_node}
        for name in order
    }


def providers_by_device(facts: SessionFacts) -> dict[str, str]:
    """Providers of nodes by the devices of the plan's streams, if the chain has one other provider than the CPU.

    Without another provider all nodes are on the CPU. Empty with several other providers, or with one that computes on
    the CPU and shares its stream.
    """
    others = [name for name in facts.registered if name != CPU]
    if facts.registered and not others:
        return {name: CPU for stream in facts.plan or () for name in stream}
    if len(others) != 1 or not facts.plan or not facts.plan_devices or set(facts.plan_devices) == {HOST_DEVICE}:
        return {}
    return {
        name: CPU if device == HOST_DEVICE else others[0]
        for stream, device in zip(facts.plan, facts.plan_devices, strict=False)
        for name in stream
    }


def choose_provider(by_source: ProvidersBySource) -> str | None:
    """The provider from the strongest source: profile, assignment, plan; None without a source."""
    for providers in by_source.values():
        return min(providers)
    return None


def lines_by_node(lines: Iterable[str], names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Log lines that contain a node's name as a separate word, by node."""
    wanted = frozenset(name for name in names if name)
    spaced = [name for name in wanted if len(name.split()) > 1]  # a word has no blanks in it
    found: dict[str, list[str]] = {}
    for line in lines:
        text = PREFIX.sub("", line)
        words = text.split()
        about = wanted.intersection(words).union(wanted.intersection(word.strip("'\",.;:()[]") for word in words))
        for name in about.union(name for name in spaced if name in text):
            found.setdefault(name, []).append(line)
    return {name: tuple(each) for name, each in found.items()}


def lines_about_the_graph(lines: Iterable[str], providers: Iterable[ProviderFacts]) -> tuple[str, ...]:
    """Log lines that match a pattern of a provider without a node name."""
    patterns = dict.fromkeys(pattern.pattern for known in providers for pattern in known.patterns)
    expressions = [re.compile(pattern) for pattern in patterns if "(?P<node>" not in pattern]
    return tuple(line for line in lines if any(each.search(line) for each in expressions))


class Memcpy(NamedTuple):
    """The tensor that a Memcpy node copies."""

    op_type: str
    tensor: str


def copied_in_log(lines: Iterable[str], order: Iterable[str], op_types: Mapping[str, str | None]) -> dict[str, Memcpy]:
    """Memcpy node of `order` -> its copy. `op_types`: known operators of nodes.

    A line does not name its node, but nodes are numbered in the order of insertion: Memcpy, Memcpy_token_0 and so on.
    Empty when the numbers of lines and nodes differ, e.g. with copies inside control flow.
    """
    added = [Memcpy(found["op"], found["tensor"]) for line in lines if (found := MEMCPY_ADDED.search(line))]
    named = inserted_copies(order, op_types)
    named.sort(key=lambda name: int(name.removeprefix("Memcpy").removeprefix("_token_") or -1))
    joined = dict(zip(named, added, strict=False))
    fits = all((op_types.get(name) or copy.op_type) == copy.op_type for name, copy in joined.items())
    return joined if fits and len(added) == len(named) else {}


def inserted_copies(order: Iterable[str], op_types: Mapping[str, str | None]) -> list[str]:
    """Nodes of the order with the name of a copy, unless their known operator is another one."""
    named = (name for name in order if MEMCPY_NAME.fullmatch(name))
    return [name for name in named if (op_types.get(name) or "Memcpy").startswith("Memcpy")]
