"""Every node of the plan, with placement, time and reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.diagnosis.compiled_subgraphs import COMPILED
from partita.diagnosis.records import Fallback
from partita.observations.records import PhaseName
from partita.observations.text_format import decimals, human_bytes, in_phases, listing, name_some, short_provider
from partita.partition_reports.groups import op_type_of, provider_of
from partita.partition_reports.outcome import fallbacks_of
from partita.partition_reports.records import NodePlacement, Phase, Report
from partita.partition_reports.sections.anchors import fallback_anchors, node_anchors
from partita.partition_reports.sections.model import Cell, Column, Fold, Head, Link, Row, Section, Table, numbers, table
from partita.partition_reports.sections.shared import placements

NAMED = 8
"""Maximum nodes named in a cell."""


def section(report: Report) -> Section | None:
    """Every node in execution order, folded; None if no nodes are known."""
    folds = tuple(
        Fold(
            f"All nodes{in_phases(phase.name for phase in phases)}: {len(phases[-1].nodes):,}",
            (_node_table(report, phases),),
        )
        for phases in placements(report)
    )
    return Section("nodes", "Nodes", folds) if folds else None


def _node_table(report: Report, phases: Sequence[Phase]) -> Table:
    """The nodes of phases with equal placement."""
    anchors, fallbacks = node_anchors(report), fallback_anchors(report)
    reasons = {(entry.phase, entry.node, entry.provider): _render_reasons(entry) for entry in fallbacks_of(report)}
    timed = [phase for phase in phases if any(node.host_us_per_run is not None for node in phase.nodes)]
    times = [{node.name: node.host_us_per_run for node in phase.nodes} for phase in timed]
    last = phases[-1]
    rows = []
    for node in last.nodes:
        key = (last.name, node.name, provider_of(node))
        why: Cell = Link(_in_each(phases, node, reasons), fallbacks[key]) if key in fallbacks else ""
        cells = (
            str(node.position),
            node.name,
            op_type_of(node),
            short_provider(provider_of(node)),
            "" if node.layer is None else str(node.layer),
            node.module or "",
            *(decimals(known.get(node.name), 1e-3) for known in times),
            human_bytes(node.output_bytes),
            why,
            _render_replaced(node),
        )
        rows.append(Row(cells, anchors[last.name, node.position]))
    heads: list[Head] = [Column("position"), "node", "operator", "provider", Column("layer"), "module"]
    heads += [*numbers(*(f"{phase.name} host ms" for phase in timed), "output"), "reason", "replaces"]
    runs = "the last run" if last.name == "run" else f"the last run of {last.name}"
    return table(f"Nodes in execution order; output: bytes in {runs}", heads, rows, name=1)


def _in_each(phases: Sequence[Phase], node: NodePlacement, reasons: Mapping[tuple[PhaseName, str, str], str]) -> str:
    """The reasons of a node, with phases if they differ."""
    where = provider_of(node)
    found: dict[str, list[str]] = {}
    for phase in phases:
        if (phase.name, node.name, where) in reasons:
            found.setdefault(reasons[phase.name, node.name, where], []).append(phase.name)
    return listing(f"{text}{in_phases(names) if len(found) > 1 else ''}" for text, names in found.items())


def _render_reasons(entry: Fallback) -> str:
    """The reason, or the reason of each skipped preferred provider if there are several."""
    if not entry.skipped:
        return entry.reason
    return "; ".join(f"{short_provider(each.provider)}: {each.reason}" for each in entry.preferred)


def _render_replaced(node: NodePlacement) -> str:
    """The file nodes that a node replaces."""
    made = "compiled from " if node.op_type == COMPILED and node.replaces else ""
    return made + name_some(node.replaces, NAMED)
