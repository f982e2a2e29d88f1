"""Texts and tables of one observed run: total time, time per provider, longest nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from partita.observations.text_format import decimals, percent, plural
from partita.partition_reports.groups import op_type_of, provider_of
from partita.partition_reports.records import NodePlacement, Phase, TimelineRun
from partita.partition_reports.sections.model import Column, Link, Table, table, words
from partita.partition_reports.sections.shared import is_copy

SLOWEST = 5

Event = tuple[int, int, int]
"""Position of a node, start relative to the run and host time, both in microseconds."""


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """One run of a phase, with the events of its nodes."""

    phase: Phase
    run: TimelineRun
    labels: Mapping[str, str]
    """Short names of providers."""

    @property
    def nodes(self) -> dict[int, NodePlacement]:
        """The nodes of the phase by position."""
        return {node.position: node for node in self.phase.nodes}

    @property
    def events(self) -> list[Event]:
        """Events of known nodes, in the order of the report."""
        nodes = self.nodes
        return [event for event in self.run.events if event[0] in nodes]

    @property
    def span_us(self) -> int:
        """Microseconds from the start of the run to its last end."""
        return max([self.run.host_us, *(start + host for _, start, host in self.events), 1])

    def by_provider(self) -> dict[str, list[Event]]:
        """Events of each provider, in the order of `labels`."""
        nodes = self.nodes
        found: dict[str, list[Event]] = {name: [] for name in self.labels}
        for event in self.events:
            found[provider_of(nodes[event[0]])].append(event)
        return {name: events for name, events in found.items() if events}


def tell(observed: ObservedRun) -> str:
    """Duration of the run, and the time in nodes and copies."""
    nodes, events = observed.nodes, observed.events
    copies = [host for position, _, host in events if is_copy(nodes[position])]
    text = (
        f"{decimals(observed.run.host_us, 1e-3)} ms on the host, {_total(host for _, _, host in events)} ms of it in "
    )
    text += plural(len(events), "node")
    if copies:
        text += f"; {_total(copies)} ms in {plural(len(copies), 'Memcpy node')}, wait and copy together"
    return f"{text}."


def _total(hosts: Iterable[int]) -> str:
    """The sum of times in milliseconds."""
    return decimals(sum(hosts), 1e-3)


def host_time(observed: ObservedRun) -> Table:
    """Time of each provider in the run, with Memcpy nodes separate."""
    nodes, span = observed.nodes, observed.span_us
    rows = []
    for name, events in observed.by_provider().items():
        for copies in (False, True):
            hosts = [host for position, _, host in events if is_copy(nodes[position]) is copies]
            if hosts:
                label = f"{observed.labels[name]}, Memcpy" if copies else observed.labels[name]
                rows.append((label, f"{len(hosts):,}", _total(hosts), percent(sum(hosts) / span)))
    heads = (words("provider"), Column("nodes"), Column("ms"), Column("of the run"))
    return table("Host time per provider", heads, rows)


def longest(observed: ObservedRun, anchors: Mapping[tuple[str, int], str]) -> Table:
    """The longest nodes."""
    nodes, span = observed.nodes, observed.span_us
    rows = []
    for position, start, host in sorted(observed.events, key=lambda event: -event[2])[:SLOWEST]:
        node = nodes[position]
        rows.append(
            (
                Link(node.name, anchors[observed.phase.name, position]),
                op_type_of(node),
                observed.labels[provider_of(node)],
                decimals(start, 1e-3),
                decimals(host, 1e-3),
                percent(host / span),
            )
        )
    heads = [words(title) for title in ("node", "operator", "on")]
    heads += [Column(title) for title in ("starts at ms", "takes ms", "of the run")]
    return table("Longest nodes", heads, rows)
