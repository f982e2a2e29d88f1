"""Where links lead: names of the rows and groups of a report, the same in every section."""

from __future__ import annotations

from partita.partition_reports.records import Report
from partita.partition_reports.verdict import merge_phases


def node_anchors(report: Report) -> dict[tuple[str, int], str]:
    """Phase and position -> the node's row in the list of nodes. Phases with one placement share their rows."""
    anchors: dict[tuple[str, int], str] = {}
    for number, phases in enumerate(merge_phases(report.phases)):
        for phase in phases:
            anchors |= {(phase.name, node.position): f"n{number}-{node.position}" for node in phase.nodes}
    return anchors


def stray_anchors(report: Report) -> dict[tuple[str, str], str]:
    """Phase and node -> the row that says why it is not on the preferred provider, and so whether there is one."""
    names = dict.fromkeys(entry.node for entry in report.fallbacks)
    numbers = {name: number for number, name in enumerate(names)}
    return {(entry.phase, entry.node): f"w{numbers[entry.node]}" for entry in report.fallbacks}


def reason_anchor(number: int) -> str:
    """The group of a reason, counted in the order in which they are shown."""
    return f"r{number}"
