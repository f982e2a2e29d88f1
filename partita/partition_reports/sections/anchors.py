"""Anchors of rows and groups of a report, shared by all sections."""

from __future__ import annotations

from partita.partition_reports.records import Report
from partita.partition_reports.sections.similar_nodes import finding_key
from partita.partition_reports.verdict import merge_phases


def node_anchors(report: Report) -> dict[tuple[str, int], str]:
    """(phase, position) -> anchor in the list of nodes; phases with equal placement share rows."""
    groups = node_groups(report)
    return {
        (phase.name, node.position): f"{groups[phase.name]}{node.position}"
        for phase in report.phases
        for node in phase.nodes
    }


def node_groups(report: Report) -> dict[str, str]:
    """Phase -> prefix of its row anchors, to be followed by the node's position."""
    merged = enumerate(merge_phases(report.phases))
    return {phase.name: f"n{number}-" for number, phases in merged for phase in phases}


def fallback_anchors(report: Report) -> dict[tuple[str, str, str], str]:
    """(phase, node, provider) -> anchor of its fallback, for nodes with a fallback.

    The provider distinguishes nodes in control-flow subgraphs from plan nodes of the same name. Phases with equal
    findings share an anchor.
    """
    known = finding_key(report)
    keys = {
        (entry.phase, entry.node, entry.provider): (entry.provider, entry.node, known(entry))
        for entry in report.fallbacks
    }
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    return {place: f"w{numbers[key]}" for place, key in keys.items()}


def reason_anchor(number: int) -> str:
    """Anchor of a reason's group, by its number in display order."""
    return f"r{number}"
