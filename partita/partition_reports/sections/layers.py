"""The nodes of each phase by layer, for the table of layers and the map of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from partita.diagnosis.compiled_subgraphs import COMPILED
from partita.diagnosis.naming import module_group
from partita.partition_reports.groups import provider_of, share_of, total_us
from partita.partition_reports.outcome import is_timed, preferred_of, used_phases
from partita.partition_reports.records import GroupShare, NodePlacement, Phase, Report
from partita.partition_reports.sections.model import Block, Line, Section
from partita.partition_reports.sections.placement import TIMES, group_table
from partita.partition_reports.sections.shared import is_copy

BEFORE, BESIDE, AFTER, WHOLE = "before the layers", "between the layers", "after the layers", "the whole graph"
NAMED_MODULES = 4
"""Maximum modules named in a row outside the layers."""
RowKey = tuple[int, int]
"""Sort key of rows: 0 before, 1 layers by number, 2 between, 3 after."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer, or the nodes before, between or after the layers."""

    title: str
    modules: str
    """Modules of a row outside the layers."""
    nodes: tuple[tuple[NodePlacement, ...], ...]
    """Nodes per phase, in execution order."""


def layer_rows(phases: Sequence[Phase]) -> list[LayerRow]:
    """The nodes of the phases by row."""
    split = [_split_rows(phase) for phase in phases]
    keys = sorted({key for rows in split for key in rows})
    return [
        LayerRow(_row_title(key, keys), _row_modules(key, members), tuple(map(tuple, members)))
        for key in keys
        if (members := [rows.get(key, []) for rows in split])
    ]


def _split_rows(phase: Phase) -> dict[RowKey, list[NodePlacement]]:
    """The nodes of a phase by row."""
    inside = [node.position for node in phase.nodes if node.layer is not None]
    first, last = (inside[0], inside[-1]) if inside else (len(phase.nodes), len(phase.nodes))
    rows: dict[RowKey, list[NodePlacement]] = {}
    for node in phase.nodes:
        outside = 0 if node.position < first else 3 if node.position > last else 2
        rows.setdefault((outside, 0) if node.layer is None else (1, node.layer), []).append(node)
    return rows


def _row_title(key: RowKey, keys: Sequence[RowKey]) -> str:
    if key[0] == 1:
        return f"layer {key[1]}"
    return WHOLE if len(keys) == 1 else {0: BEFORE, 2: BESIDE, 3: AFTER}[key[0]]


def _row_modules(key: RowKey, members: Sequence[Sequence[NodePlacement]]) -> str:
    """The modules of a row outside the layers."""
    if key[0] == 1:
        return ""
    named = (node.module for nodes in members for node in nodes if node.module and not is_copy(node))
    names = list(dict.fromkeys(map(module_group, named)))
    return ", ".join(names[:NAMED_MODULES]) + (", …" if len(names) > NAMED_MODULES else "")


def section(report: Report) -> Section | None:
    """Nodes and time per layer; None if no nodes are known."""
    phases = used_phases(report)
    if not phases:
        return None
    rows = layer_rows(phases)
    mixed = len({entry.provider for phase in phases for entry in phase.providers}) > 1
    number = {phase.name: at for at, phase in enumerate(phases)}

    def shares(phase: Phase) -> list[GroupShare]:
        return [_layer_share(row, row.nodes[number[phase.name]], phase) for row in rows]

    wanted = preferred_of(report) if mixed else None
    blocks: list[Block] = [group_table("layer", phases, shares, wanted, timed=is_timed(report))]
    blocks += [Line(text, tone="quiet") for text in _notes(phases, timed=is_timed(report))]
    return Section("layers", "Layers", tuple(blocks))


def _layer_share(row: LayerRow, nodes: Sequence[NodePlacement], phase: Phase) -> GroupShare:
    """Nodes and time of one row in one phase."""
    return GroupShare(
        name=row.title,
        nodes=len(nodes),
        nodes_by_provider=dict(Counter(provider_of(node) for node in nodes).most_common()),
        host_us_per_run=total_us(nodes),
        time_share=share_of(total_us(nodes), total_us(phase.nodes)),
    )


def _notes(phases: Sequence[Phase], *, timed: bool) -> list[str]:
    """Notes about the layer of nodes without a module."""
    nodes = [node for phase in phases for node in phase.nodes]
    notes = [TIMES] if timed else []
    if any(is_copy(node) and node.layer is not None for node in nodes):
        notes.append("A Memcpy node counts in the layer of the node that causes it.")
    if any(node.op_type == COMPILED for node in nodes):
        notes.append("A compiled node counts in the layer of its first part.")
    return notes
