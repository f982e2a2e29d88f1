"""Sources of a session: events of the main graph, execution order, providers that each source names, log lines. Pure.

The patterns of providers interpret a log line for a fallback.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from partita.diagnosis.graphs import CONTROL_FLOW, Memcpy
from partita.observations.facts import NodeEvent, ProviderFacts, SessionFacts
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
    frames: dict[int, list[NodeEvent]] = {}
    """Run -> the outermost control-flow nodes; nested nodes, possibly thousands, are inside them."""

    def is_inner(event: NodeEvent) -> bool:
        return any(_is_inside(event, frame) for frame in frames.get(event.run, ()))

    for event in sorted(ordered, key=lambda event: (event.start_us, -event.host_us)):
        if event.op_type in CONTROL_FLOW and not is_inner(event):
            frames.setdefault(event.run, []).append(event)
    inner = [is_inner(event) for event in ordered]
    main = tuple(event for event, inside in zip(ordered, inner, strict=True) if not inside)
    return main, frozenset(event.name for event, inside in zip(ordered, inner, strict=True) if inside)


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
    patterns = (pattern for known in providers for pattern in known.patterns if not pattern.names_node)
    expressions = [re.compile(text) for text in dict.fromkeys(pattern.pattern for pattern in patterns)]
    return tuple(line for line in lines if any(each.search(line) for each in expressions))


def copied_in_log(lines: Iterable[str], order: Iterable[str], op_types: Mapping[str, str | None]) -> dict[str, Memcpy]:
    """Memcpy node of `order` -> its copy. `op_types`: known operators of nodes.

    A line does not name its node, but nodes are numbered in the order of insertion: Memcpy, Memcpy_token_0 and so on.
    Empty when the numbers of lines and nodes differ, e.g. with copies inside control flow.
    """
    added = [Memcpy(found["op"], found["tensor"]) for line in lines if (found := MEMCPY_ADDED.search(line))]
    named = [name for name in order if MEMCPY_NAME.fullmatch(name)]
    named = [name for name in named if (op_types.get(name) or "Memcpy").startswith("Memcpy")]
    named.sort(key=lambda name: int(name.removeprefix("Memcpy").removeprefix("_token_") or -1))
    joined = dict(zip(named, added, strict=False))
    fits = all((op_types.get(name) or copy.op_type) == copy.op_type for name, copy in joined.items())
    return joined if fits and len(added) == len(named) else {}
