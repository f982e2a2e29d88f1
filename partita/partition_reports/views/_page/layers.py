"""The map: layers by phases, and in each cell the nodes of that layer in execution order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.partition_reports.fusion import COMPILED
from partita.partition_reports.groups import op_type_of, provider_of, total_us
from partita.partition_reports.naming import NO_MODULE, layer_of, module_group
from partita.partition_reports.records import NodePlacement, Phase, Report
from partita.partition_reports.views._page.marks import (
    COPY_OPERATORS,
    Mark,
    find_marks,
    is_copy,
    main_provider,
    node_anchors,
)
from partita.partition_reports.wording import decimals, plural, tally

BEFORE, BESIDE, AFTER, WHOLE = "before the layers", "beside the layers", "after the layers", "the whole graph"
NAMED_MODULES = 4
"""Modules that the heading of a row outside the layers names."""

RowKey = tuple[int, int]
"""Sorts rows: 0 before, 1 layers by number, 2 beside, 3 after."""


@dataclass(frozen=True, slots=True)
class Block:
    """One node in the map."""

    css: str
    sign: str
    """What is written in it; empty for the small blocks of the provider that has most nodes."""
    title: str
    target: str
    """Id of the node's row in the list of nodes."""


@dataclass(frozen=True, slots=True)
class MapCell:
    """One layer in one phase."""

    blocks: tuple[Block, ...]
    summary: str
    strays: str
    """How many nodes are not on the wanted provider; empty when there are none."""
    stray_operators: str
    """The same with providers and operators, for who cannot see the blocks."""


@dataclass(frozen=True, slots=True)
class MapRow:
    """One layer in every phase."""

    title: str
    modules: str
    cells: tuple[MapCell, ...]


@dataclass(frozen=True, slots=True)
class LayerMap:
    """The map of every phase that has nodes."""

    phases: tuple[str, ...]
    rows: tuple[MapRow, ...]
    strays: int
    copies: bool
    """There are Memcpy nodes."""
    compiled: bool
    """Some nodes stand for a compiled subgraph."""


def draw_map(report: Report) -> LayerMap:
    """The map of the report; without rows when no node is known."""
    phases = [phase for phase in report.phases if phase.nodes]
    split = [split_rows(phase) for phase in phases]
    draw = Drawer(report)
    keys = sorted({key for rows in split for key in rows})
    rows = []
    for key in keys:
        members = [rows.get(key, []) for rows in split]
        cells = tuple(draw.cell(phase, nodes) for phase, nodes in zip(phases, members, strict=True))
        rows.append(MapRow(row_title(key, keys), row_modules(key, members), cells))
    nodes = [node for phase in phases for node in phase.nodes]
    return LayerMap(
        phases=tuple(phase.name for phase in phases),
        rows=tuple(rows),
        strays=sum(provider_of(node) != draw.wanted for node in nodes),
        copies=any(map(is_copy, nodes)),
        compiled=any(node.op_type == COMPILED for node in nodes),
    )


def split_rows(phase: Phase) -> dict[RowKey, list[NodePlacement]]:
    """The nodes of a phase by row.

    A Memcpy node goes with the node that makes it necessary, a compiled one with the first node that it is made of.
    """
    layers = {node.name: node.layer for node in phase.nodes}
    causes = {copy.name: [layers.get(name) for name in copy.caused_by] for copy in phase.copies}
    inside = [node.position for node in phase.nodes if node.layer is not None]
    first, last = (inside[0], inside[-1]) if inside else (len(phase.nodes), len(phase.nodes))
    rows: dict[RowKey, list[NodePlacement]] = {}
    for node in phase.nodes:
        layer = node.layer
        if layer is None and is_copy(node):
            layer = next((found for found in causes.get(node.name, ()) if found is not None), None)
        elif layer is None and node.op_type == COMPILED and node.replaces:
            layer = layer_of(node.replaces[0].partition("/")[0])
        outside = 0 if node.position < first else 3 if node.position > last else 2
        rows.setdefault((outside, 0) if layer is None else (1, layer), []).append(node)
    return rows


def row_title(key: RowKey, keys: Sequence[RowKey]) -> str:
    """What a row is called."""
    if key[0] == 1:
        return f"layer {key[1]}"
    return WHOLE if len(keys) == 1 else {0: BEFORE, 2: BESIDE, 3: AFTER}[key[0]]


def row_modules(key: RowKey, members: Sequence[Sequence[NodePlacement]]) -> str:
    """The modules in a row outside the layers."""
    if key[0] == 1:
        return ""
    groups = dict.fromkeys(module_group(node.module) for nodes in members for node in nodes if not is_copy(node))
    names = [name for name in groups if name != NO_MODULE]
    return ", ".join(names[:NAMED_MODULES]) + (", …" if len(names) > NAMED_MODULES else "")


class Drawer:
    """Makes the cells of one report's map."""

    def __init__(self, report: Report) -> None:
        self.marks: Mapping[str, Mark] = find_marks(report)
        self.main = main_provider(report)
        self.wanted = report.chain[0].provider if report.chain else self.main
        self.anchors = node_anchors(report)

    def cell(self, phase: Phase, nodes: Sequence[NodePlacement]) -> MapCell:
        """The nodes of one row in one phase."""
        time = total_us(nodes)
        summary = plural(len(nodes), "node") if nodes else "none"
        off: dict[str, Counter[str]] = {}
        for node in nodes:
            if provider_of(node) != self.wanted:
                off.setdefault(provider_of(node), Counter())[op_type_of(node)] += 1
        told = "; ".join(f"on {self.marks[name].label}: {tally(dict(counts))}" for name, counts in off.items())
        strays = sum(counts.total() for counts in off.values())
        return MapCell(
            blocks=tuple(self.block(phase, node) for node in nodes),
            summary=summary if time is None else f"{summary}, {decimals(time, 1e-3)} ms",
            strays=f"{strays} off" if 0 < strays < len(nodes) else "all off" if strays else "",
            stray_operators=told,
        )

    def block(self, phase: Phase, node: NodePlacement) -> Block:
        """One node."""
        mark = self.marks[provider_of(node)]
        css, sign = mark.css, "" if mark.provider == self.main else mark.letter
        if is_copy(node):
            css, sign = f"{mark.css} m", COPY_OPERATORS[node.op_type or ""]
        elif node.op_type == COMPILED:
            css, sign = f"{mark.css} k", f"×{len(node.replaces)}"
        elif sign:
            css = f"{mark.css} s"
        title = f"{node.name} ({op_type_of(node)}) on {mark.label}"
        return Block(css, sign, title, self.anchors[phase.name, node.position])
