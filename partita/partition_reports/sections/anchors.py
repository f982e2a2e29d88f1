"""Where links lead: names of the rows and groups of a report, the same in every section."""

from __future__ import annotations

from partita.partition_reports.records import Report
from partita.partition_reports.sections.alike import finding_key
from partita.partition_reports.verdict import merge_phases


def node_anchors(report: Report) -> dict[tuple[str, int], str]:
    """Phase and position -> the node's row in the list of nodes. Phases with one placement share their rows."""
    groups = node_groups(report)
    return {
        (phase.name, node.position): f"{groups[phase.name]}{node.position}"
        for phase in report.phases
        for node in phase.nodes
    }


def node_groups(report: Report) -> dict[str, str]:
    """Phase -> what the names of its rows begin with; the position of the node follows."""
    merged = enumerate(merge_phases(report.phases))
    return {phase.name: f"n{number}-" for number, phases in merged for phase in phases}


def stray_anchors(report: Report) -> dict[tuple[str, str, str], str]:
    """Phase, node and its provider -> the row that says why it is not on the preferred one, and so whether there is
    one: a node in a body may have the name of one of the plan.

    Phases in which the same is known of a node share its row; where something else is, each has a row of its own.
    """
    known = finding_key(report)
    keys = {
        (entry.phase, entry.node, entry.provider): (entry.provider, entry.node, known(entry))
        for entry in report.fallbacks
    }
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    return {place: f"w{numbers[key]}" for place, key in keys.items()}


def reason_anchor(number: int) -> str:
    """The group of a reason, counted in the order in which they are shown."""
    return f"r{number}"
