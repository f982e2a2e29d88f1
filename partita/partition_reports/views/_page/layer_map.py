"""The map: layers by phases, with the nodes of each layer in execution order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.diagnosis.compiled_subgraphs import COMPILED
from partita.observations.text_format import decimals, plural, tally
from partita.partition_reports.groups import op_type_of, provider_of, total_us
from partita.partition_reports.outcome import preferred_of, used_phases
from partita.partition_reports.records import NodePlacement, Phase, Report
from partita.partition_reports.sections.anchors import node_anchors
from partita.partition_reports.sections.layers import layer_rows
from partita.partition_reports.sections.shared import COPY_OPERATORS, is_copy
from partita.partition_reports.views._page.marks import Mark, find_marks, main_provider


@dataclass(frozen=True, slots=True)
class Block:
    """One node in the map."""

    css: str
    sign: str
    """Its text; empty for the small blocks of the provider with the most nodes."""
    title: str
    target: str
    """Id of the node's row in the list of nodes."""


@dataclass(frozen=True, slots=True)
class MapCell:
    """One layer in one phase."""

    blocks: tuple[Block, ...]
    summary: str
    fallbacks: str
    """Number of fallback nodes as text; empty for none."""
    fallback_operators: str
    """Fallback nodes by provider and operator, for screen readers."""


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
    fallbacks: int
    timed: bool
    copies: bool
    """It has Memcpy nodes."""
    compiled: bool
    """It has compiled nodes."""


def draw_map(report: Report) -> LayerMap:
    """The map of the report; without rows if no nodes are known."""
    phases = used_phases(report)
    draw = Drawer(report)
    rows = [
        MapRow(
            row.title,
            row.modules,
            tuple(draw.cell(phase, nodes) for phase, nodes in zip(phases, row.nodes, strict=True)),
        )
        for row in layer_rows(phases)
    ]
    nodes = [node for phase in phases for node in phase.nodes]
    return LayerMap(
        phases=tuple(phase.name for phase in phases),
        rows=tuple(rows),
        fallbacks=sum(provider_of(node) != draw.preferred_provider for node in nodes),
        timed=any(node.host_us_per_run is not None for node in nodes),
        copies=any(map(is_copy, nodes)),
        compiled=any(node.op_type == COMPILED for node in nodes),
    )


class Drawer:
    """Makes the cells of one report's map."""

    def __init__(self, report: Report) -> None:
        self.marks: Mapping[str, Mark] = find_marks(report)
        self.main = main_provider(report)
        self.preferred_provider = preferred_of(report)
        self.anchors = node_anchors(report)

    def cell(self, phase: Phase, nodes: Sequence[NodePlacement]) -> MapCell:
        """The nodes of one row in one phase."""
        time = total_us(nodes)
        summary = plural(len(nodes), "node") if nodes else "none"
        found: dict[str, Counter[str]] = {}
        for node in nodes:
            if provider_of(node) != self.preferred_provider:
                found.setdefault(provider_of(node), Counter())[op_type_of(node)] += 1
        operators = "; ".join(f"on {self.marks[name].label}: {tally(dict(counts))}" for name, counts in found.items())
        fallbacks = sum(counts.total() for counts in found.values())
        return MapCell(
            blocks=tuple(self.block(phase, node) for node in nodes),
            summary=summary if time is None else f"{summary}, {decimals(time, 1e-3)} ms",
            fallbacks=plural(fallbacks, "fallback") if fallbacks else "",
            fallback_operators=operators,
        )

    def block(self, phase: Phase, node: NodePlacement) -> Block:
        """A node as a block of its layer, in the colour of its provider."""
        mark = self.marks[provider_of(node)]
        css, sign = mark.css, "" if mark.provider == self.main else mark.letter
        if is_copy(node):
            css, sign = f"{mark.css} m", COPY_OPERATORS[node.op_type or ""]
        elif node.op_type == COMPILED:
            css, sign = f"{mark.css} k", f"×{len(node.replaces)}"
        elif sign:
            css = f"{mark.css} s"
        of = f", {sign}" if node.op_type == COMPILED else ""
        title = f"{node.name} ({op_type_of(node)}){of} on {mark.label}"
        return Block(css, sign, title, self.anchors[phase.name, node.position])
