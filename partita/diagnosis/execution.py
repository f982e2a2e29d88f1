"""The execution order of a session, the events of its main graph, and the providers that each source names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from partita.diagnosis.graphs import CONTROL_FLOW
from partita.observations.facts import AssignedNode, NodeEvent, SessionFacts
from partita.observations.names import CPU
from partita.observations.records import Source

HOST_DEVICE = "0"
"""ONNX Runtime's device type of the CPU."""
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
