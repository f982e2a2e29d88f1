"""The report as one HTML page, from its sections, a map of layers by phases, and ribbons of partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.observations.names import CPU, UNKNOWN
from partita.observations.text_format import decimals, name_some, plural, short_provider, tally
from partita.partition_reports.groups import Node, op_type_of, provider_of, report_rows
from partita.partition_reports.outcome import fallback_nodes, phase_names, preferred_of, used_phases
from partita.partition_reports.records import FileNode, NodePlacement, Phase, Report
from partita.partition_reports.render.html import render
from partita.partition_reports.render.view import View
from partita.partition_reports.sections.overview import glance
from partita.partition_reports.sections.placement import layer_rows, row_modules
from partita.partition_reports.sections.report import sections
from partita.partition_reports.sections.shared import COPY_OPERATORS, is_copy, node_anchors, placements


def to_text(report: Report) -> str:
    """The page."""
    known, top, parts = find_marks(report), glance(report), sections(report)
    listed = [("glance", "At a glance")]
    listed += [(section.key, section.title) for section in parts]
    return render(
        __package__,
        "report",
        {
            "title": f"{top.state.headline}: {top.name}",
            "version": report.partita_version,
            "contents": listed,
            "keys": {key for key, _ in listed},
            "report": report,
            "top": top,
            "sections": parts,
            "preferred": short_provider(preferred_of(report)),
            "marks": tuple(known.values()),
            "ribbons": draw_ribbons(report, known),
            "map": draw_map(report),
        },
    )


VIEW = View("html", ".html", "the report as one HTML page", to_text, file_kind="page")


NAMED = 3
"""Maximum executed nodes named in the title of a block."""


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


def draw_map(report: Report) -> LayerMap:
    """The map of the report; without rows if no nodes are known."""
    phases = used_phases(report)
    draw = Drawer(report)
    rows = [
        MapRow(name, row_modules(name, members), tuple(map(draw.cell, phases, members, [name] * len(phases))))
        for name, members in layer_rows(phases).items()
    ]
    nodes = [node for phase in phases for node in phase.nodes]
    return LayerMap(
        phases=tuple(phase.name for phase in phases),
        rows=tuple(rows),
        fallbacks=sum(len(fallback_nodes(report, phase)) for phase in phases),
        timed=any(node.host_us_per_run is not None for node in nodes),
        copies=any(map(is_copy, nodes)),
    )


class Drawer:
    """Makes the cells of one report's map."""

    def __init__(self, report: Report) -> None:
        self.marks: Mapping[str, Mark] = find_marks(report)
        self.main = main_provider(report)
        self.preferred_provider = preferred_of(report)
        anchors = node_anchors(report)
        self.targets = {
            (phase.name, node.name): anchors[phase.name, node.position]
            for phase in report.phases
            for node in phase.nodes
        }

    def cell(self, phase: Phase, nodes: Sequence[Node], name: str) -> MapCell:
        """The nodes of the row `name` in one phase."""
        time = next((entry.host_us_per_run for entry in phase.by_layer if entry.name == name), None)
        added = sum(isinstance(node, NodePlacement) for node in nodes)
        counts = [plural(len(nodes) - added, "node")] if len(nodes) > added else []
        counts += [f"{added:,} added"] if added else []
        counts += [f"{decimals(time, 1e-3)} ms"] if time is not None else []
        found: dict[str, Counter[str]] = {}
        for node in nodes:
            if provider_of(node) != self.preferred_provider:
                found.setdefault(provider_of(node), Counter())[op_type_of(node)] += 1
        operators = "; ".join(f"on {self.marks[name].label}: {tally(dict(counts))}" for name, counts in found.items())
        fallbacks = sum(counts.total() for counts in found.values())
        return MapCell(
            blocks=tuple(self.block(phase, node) for node in nodes),
            summary=", ".join(counts) or "none",
            fallbacks=plural(fallbacks, "fallback") if fallbacks else "",
            fallback_operators=operators,
        )

    def block(self, phase: Phase, node: Node) -> Block:
        """A node as a block of its layer, in the colour of its provider."""
        mark = self.marks[provider_of(node)]
        css, sign = mark.css, "" if mark.provider == self.main else mark.letter
        if is_copy(node):
            css, sign = f"{mark.css} m", COPY_OPERATORS[node.op_type or ""]
        elif sign:
            css = f"{mark.css} s"
        ran_as = node.ran_as if isinstance(node, FileNode) else (node.name,)
        others = f", as {name_some(ran_as, NAMED)}" if ran_as != (node.name,) and ran_as else ""
        title = f"{node.name} ({op_type_of(node)}) on {mark.label}{others}"
        known = (self.targets[phase.name, name] for name in ran_as if (phase.name, name) in self.targets)
        return Block(css, sign, title, next(known, "layers"))


COLOURS = 6
"""Number of provider colours in the style; they repeat for further providers."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Mark of one provider."""

    provider: str
    label: str
    """Short name."""
    css: str
    """CSS class of the colour."""
    letter: str


def find_marks(report: Report) -> dict[str, Mark]:
    """The marks of every provider of the report: the chain, then other providers with nodes."""
    ran = [provider_of(node) for phase in report.phases for node in (*report_rows(phase), *phase.nodes)]
    providers = list(dict.fromkeys([*(entry.provider for entry in report.chain), *ran]))
    letters = pick_letters(providers)
    known = [provider for provider in providers if provider != UNKNOWN]
    # Only the preferred provider has the first colour.
    colours = {name: f"e{n if n < COLOURS else n % (COLOURS - 1) + 1}" for n, name in enumerate(known)}
    return {
        provider: Mark(provider, short_provider(provider), colours.get(provider, "eu"), letters[provider])
        for provider in providers
    }


def pick_letters(providers: list[str]) -> dict[str, str]:
    """A letter per provider: the first free letter of its short name; C is reserved for the CPU."""
    letters: dict[str, str] = {UNKNOWN: "?"}
    for provider in sorted(providers, key=lambda name: name != CPU):
        free = (mark.upper() for mark in short_provider(provider) if mark.isascii() and mark.isalnum())
        letters.setdefault(provider, next((mark for mark in free if mark not in letters.values()), "*"))
    return letters


def main_provider(report: Report) -> str:
    """The provider with the most nodes, whose blocks are small."""
    counts: dict[str, int] = {}
    for phase in report.phases:
        for entry in phase.providers:
            counts[entry.provider] = counts.get(entry.provider, 0) + entry.nodes
    return max(counts, key=lambda provider: counts[provider], default=UNKNOWN)


WIDTH = 1000
"""Width of a ribbon in its own units."""
MOST_BANDS = 600
"""Maximum drawn partitions."""


@dataclass(frozen=True, slots=True)
class Band:
    """One partition in a ribbon."""

    css: str
    left: float
    width: float
    lane: int
    """0 for the preferred provider, 1 for others."""


@dataclass(frozen=True, slots=True)
class Ribbon:
    """The partitions of phases with equal placement."""

    title: str
    description: str
    bands: tuple[Band, ...]


def draw_ribbons(report: Report, marks: dict[str, Mark]) -> tuple[Ribbon, ...]:
    """One ribbon per placement."""
    ribbons = []
    for phases in placements(report):
        phase = phases[0]
        total = len(phase.nodes)
        bands = tuple(
            Band(
                css=marks[part.provider].css if part.provider in marks else "eu",
                left=round(WIDTH * part.first_position / total, 2),
                width=round(WIDTH * part.nodes / total, 2),
                lane=int(part.provider != preferred_of(report)),
            )
            for part in phase.partitions[:MOST_BANDS]
        )
        description = f"{plural(len(phase.partitions), 'partition')} over {plural(total, 'executed node')}"
        ribbons.append(Ribbon(phase_names(phases), description, bands))
    return tuple(ribbons)
