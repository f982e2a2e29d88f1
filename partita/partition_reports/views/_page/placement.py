"""Where the nodes are, as tables: partitions, copies, every node, and the sums by operator and module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.partition_reports.fusion import COMPILED
from partita.partition_reports.groups import op_type_of, provider_of
from partita.partition_reports.records import BoundaryTensor, Copy, GroupShare, Phase, Report
from partita.partition_reports.verdict import merge_phases, phase_names
from partita.partition_reports.views._page.marks import find_marks, label_of, node_anchors
from partita.partition_reports.views._page.reasons import stray_anchor
from partita.partition_reports.views._page.tables import Cell, Link, Row, Table, table
from partita.partition_reports.views._placement import best_observed, describe_border, say_bodies
from partita.partition_reports.wording import NOT_KNOWN, decimals, human_bytes, percent, plural

MOST_NAMES = 8
"""Nodes that a cell names."""


def partition_tables(report: Report) -> list[tuple[Table, Table]]:
    """Per placement: the partitions, and which tensors one hands to another."""
    marks = find_marks(report)
    tables = []
    for phases, phase in zip(placements(report), last_observed(report), strict=True):
        where = phase_names(phases)
        rows = [
            (
                str(part.index),
                label_of(marks, part.provider),
                f"{part.nodes:,}",
                span(part.first_position, part.nodes),
                *(describe_border([tensor for tensor in part.boundary if tensor.direction == way])
                  for way in ("in", "out")),
            )
            for part in phase.partitions
        ]  # fmt: skip
        heads = ("#partition", "on", "#nodes", "#positions", "tensors in", "tensors out")
        parts = table(f"Partitions of {where}, in execution order; bytes per run of {phase.name}", heads, rows)
        tables.append((parts, crossing_table(phase, where, report)))
    return tables


def span(first: int, count: int) -> str:
    """`3` or `3-7`."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def placements(report: Report) -> list[list[Phase]]:
    """Phases with nodes, those that share a placement together."""
    return merge_phases(tuple(phase for phase in report.phases if phase.nodes))


def last_observed(report: Report) -> list[Phase]:
    """One phase per placement, the one whose sizes are known best."""
    return [best_observed(phases) for phases in merge_phases(tuple(phase for phase in report.phases if phase.nodes))]


def crossing_table(phase: Phase, where: str, report: Report) -> Table:
    """Tensors that one partition hands to another, largest first."""
    marks = find_marks(report)
    names = {str(part.index): f"{part.index} ({label_of(marks, part.provider)})" for part in phase.partitions}
    found: list[tuple[BoundaryTensor, str]] = [
        (tensor, str(part.index))
        for part in phase.partitions
        for tensor in part.boundary
        if tensor.direction == "out" and tensor.other_side != "session"
    ]
    found.sort(key=lambda entry: -(entry[0].size_bytes or 0))
    rows = [
        (tensor.name, names[origin], names.get(tensor.other_side, tensor.other_side), human_bytes(tensor.size_bytes))
        for tensor, origin in found
    ]
    caption = f"Tensors between partitions of {where}; bytes per run of {phase.name}"
    return table(caption, ("tensor", "from partition", "to partition", "#bytes"), rows)


def copy_tables(report: Report) -> list[Table]:
    """Per placement: Memcpy nodes, and inputs and outputs on the wrong side."""
    anchors = node_anchors(report)
    tables = []
    for phases, phase in zip(placements(report), last_observed(report), strict=True):
        if phase.copies:
            targets = {node.name: anchors[phase.name, node.position] for node in phase.nodes}
            rows = [copy_row(copy, targets) for copy in phase.copies]
            heads = ("copy", "tensor", "direction", "#bytes", "#wait and copy, ms", "made necessary by")
            tables.append(table(f"Copies of {phase_names(phases)}; per run of {phase.name}", heads, rows))
    return tables


def copy_row(copy: Copy, targets: Mapping[str, str]) -> tuple[Cell, ...]:
    """One copy. `targets`: ids of the rows of nodes."""
    causes: Cell = copy.cause_unknown and f"not known: {copy.cause_unknown}"
    if copy.caused_by:
        more = f" and {plural(len(copy.caused_by) - 1, 'more node')}" if len(copy.caused_by) > 1 else ""
        said = f"{copy.caused_by[0]}{more}"
        causes = Link(said, targets[copy.caused_by[0]]) if copy.caused_by[0] in targets else said
    kind = "" if copy.kind == "memcpy_node" else f"{copy.kind.replace('_', ' ')}, "
    return (
        copy.name,
        copy.tensor or (NOT_KNOWN if not kind else copy.name),
        f"{kind}{copy.direction.replace('_', ' ')}",
        human_bytes(copy.bytes_per_run),
        decimals(copy.host_us_per_run, 1e-3),
        causes or "the session's border",
    )


def node_tables(report: Report) -> list[Table]:
    """Every node, one table per placement. The map and the timeline lead here."""
    marks = find_marks(report)
    anchors = node_anchors(report)
    strays = stray_anchor(report)
    reasons = {(entry.phase, entry.node): entry.reason for entry in report.fallbacks}
    tables = []
    for phases in placements(report):
        timed = [phase for phase in phases if any(node.host_us_per_run is not None for node in phase.nodes)]
        times = {phase.name: {node.name: node.host_us_per_run for node in phase.nodes} for phase in timed}
        last = phases[-1]
        rows = []
        for node in last.nodes:
            key = (last.name, node.name)
            why: Cell = Link(reasons[key], strays[key]) if key in strays else ""
            rows.append(
                Row(
                    (
                        str(node.position),
                        node.name,
                        op_type_of(node),
                        label_of(marks, provider_of(node)),
                        "" if node.layer is None else str(node.layer),
                        node.module or "",
                        *(decimals(times[phase.name].get(node.name), 1e-3) for phase in timed),
                        human_bytes(node.output_bytes),
                        why,
                        say_replaced(node.op_type, node.replaces),
                    ),
                    anchors[last.name, node.position],
                )
            )
        heads = ["#position", "node", "operator", "on", "#layer", "module"]
        heads += [f"#{phase.name} host ms" for phase in timed]
        caption = f"Nodes of {phase_names(phases)}, in execution order; output bytes of the last run of {last.name}"
        tables.append(table(caption, [*heads, "#output", "reason", "in place of"], rows, name=1))
    return tables


def say_replaced(op_type: str | None, names: Sequence[str]) -> str:
    """The exported nodes that one took the place of."""
    if not names:
        return ""
    more = f", … ({plural(len(names), 'node')})" if len(names) > MOST_NAMES else ""
    made = "compiled from " if op_type == COMPILED else ""
    return made + ", ".join(names[:MOST_NAMES]) + more


def by_operator(phase: Phase) -> tuple[GroupShare, ...]:
    """Shares of the operators."""
    return phase.by_op_type


def by_module(phase: Phase) -> tuple[GroupShare, ...]:
    """Shares of the modules."""
    return phase.by_module


def group_tables(report: Report) -> list[Table]:
    """Nodes and time by operator and by module, phases side by side."""
    phases = [phase for phase in report.phases if phase.nodes]
    marks = find_marks(report)
    tables = []
    for title, pick in (("operator", by_operator), ("module", by_module)):
        by_phase = [{entry.name: entry for entry in pick(phase)} for phase in phases]
        names = dict.fromkeys(name for groups in reversed(by_phase) for name in groups)
        rows = []
        for name in names:
            entries = [groups.get(name) for groups in by_phase]
            counts = " / ".join(dict.fromkeys(str(entry.nodes) if entry else "0" for entry in entries))
            first = next(entry for entry in entries if entry)
            where = ", ".join(f"{label_of(marks, key)} {count}" for key, count in first.nodes_by_provider.items())
            cells = [name, counts, where]
            for entry in entries if report.dry_run is None else ():
                cells.append(decimals(entry.host_us_per_run, 1e-3) if entry else NOT_KNOWN)
                cells.append(percent(entry.time_share) if entry else NOT_KNOWN)
            rows.append(tuple(cells))
        heads = [title, "#nodes", "on"]
        for phase in phases if report.dry_run is None else ():
            heads += [f"#{phase.name} ms", "#share"]
        tables.append(table(f"By {title}; host time per run", heads, rows))
    return tables


def body_lines(report: Report) -> list[str]:
    """What is in the bodies of If, Loop and Scan."""
    return [
        f"Bodies of control flow in {phase_names(phases)}, in no other figure: {say_bodies(phases[0].bodies)}"
        for phases in placements(report)
        if phases[0].bodies is not None
    ]
