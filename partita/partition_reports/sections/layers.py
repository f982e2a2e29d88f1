"""The nodes of each phase by layer, for the table of layers and the map of the page."""

from __future__ import annotations

from collections.abc import Sequence

from partita.diagnosis.naming import module_group
from partita.partition_reports.file_nodes import report_rows
from partita.partition_reports.groups import LAYER, Node, layer_key, layer_order, positions_in
from partita.partition_reports.outcome import is_timed, preferred_of, used_phases
from partita.partition_reports.records import FileNode, Phase, Report
from partita.partition_reports.sections.model import Block, Line, Section
from partita.partition_reports.sections.placement import SEVERAL, TIMES, group_table, has_several_providers
from partita.partition_reports.sections.shared import is_copy

NAMED_MODULES = 4
"""Maximum modules named in a row outside the layers."""


def layer_rows(phases: Sequence[Phase]) -> dict[str, tuple[list[Node], ...]]:
    """Row of the table of layers -> its nodes in each phase, in execution order."""
    found: dict[str, tuple[list[Node], ...]] = {}
    for at, phase in enumerate(phases):
        key = layer_key(phase)
        for node in sorted(report_rows(phase), key=positions_in(phase)):
            found.setdefault(key(node), tuple([] for _ in phases))[at].append(node)
    return {name: found[name] for name in sorted(found, key=layer_order)}


def row_modules(name: str, members: Sequence[Sequence[Node]]) -> str:
    """The modules of a row outside the layers."""
    if name.startswith(LAYER):
        return ""
    named = (node.module for nodes in members for node in nodes if node.module and isinstance(node, FileNode))
    names = list(dict.fromkeys(map(module_group, named)))
    return ", ".join(names[:NAMED_MODULES]) + (", …" if len(names) > NAMED_MODULES else "")


def section(report: Report) -> Section | None:
    """Nodes and time per layer; None if no nodes are known."""
    phases = used_phases(report)
    if not phases:
        return None
    wanted = preferred_of(report) if has_several_providers(phases) else None
    blocks: list[Block] = [
        group_table("layer", phases, lambda phase: phase.by_layer, wanted, timed=is_timed(report), order=layer_order)
    ]
    blocks += [Line(text, tone="quiet") for text in _notes(phases, timed=is_timed(report))]
    return Section("layers", "Layers", tuple(blocks))


def _notes(phases: Sequence[Phase], *, timed: bool) -> list[str]:
    """Notes about times, and about the layer of nodes without a module."""
    nodes = [node for phase in phases for node in phase.nodes]
    notes = [TIMES] if timed else []
    if any(is_copy(node) and node.layer is not None for node in nodes):
        notes.append("A Memcpy node counts in the layer of the node that causes it.")
    if any(not entry.nodes + entry.added_nodes for phase in phases for entry in phase.by_layer):
        notes.append(SEVERAL)
    return notes
