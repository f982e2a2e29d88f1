"""Nodes and time by operator, module and layer; the list of all nodes; the map of the layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from partita.diagnosis.graphs import COMPILED
from partita.diagnosis.records import Fallback
from partita.observations.names import UNKNOWN
from partita.observations.text_format import (
    NOT_KNOWN,
    decimals,
    human_bytes,
    in_phases,
    listing,
    name_some,
    percent,
    plural,
    short_provider,
    tally,
)
from partita.partition_reports.groups import (
    Node,
    layer_key,
    layer_order,
    op_type_of,
    positions_in,
    provider_of,
    report_rows,
)
from partita.partition_reports.outcome import fallback_nodes, fallbacks_of, is_timed, preferred_of, used_phases
from partita.partition_reports.records import (
    FileNode,
    GroupShare,
    NodePlacement,
    Phase,
    Report,
    Subgraphs,
)
from partita.partition_reports.sections.model import (
    Block,
    Column,
    Fold,
    Head,
    LayerMap,
    Line,
    MapCell,
    MapNode,
    Mark,
    Row,
    Section,
    Table,
    numbers,
    table,
)
from partita.partition_reports.sections.shared import (
    COPY_OPERATORS,
    is_copy,
    node_anchors,
    on_providers,
    placements,
)

NAMED_EXECUTED = 3
"""Maximum executed nodes named in the title of a node."""
COLOURS = 6
"""Number of provider colours in the style; they repeat for further providers."""
INTRODUCTION = "Every block is a node of the file, or one that ONNX Runtime added, in execution order."
COPIES = "A Memcpy node (↓ to the device, ↑ to the host) is in the layer of the node that requires it."


def layer_map(report: Report) -> LayerMap:
    """The map of every phase that has nodes."""
    phases, marks, anchors = used_phases(report), find_marks(report), node_anchors(report)
    counts = Counter[str]()
    for phase in report.phases:
        counts.update({entry.provider: entry.nodes for entry in phase.providers})
    main = max(counts, key=lambda provider: counts[provider], default=UNKNOWN)
    columns = [(phase, {node.name: anchors[phase.name, node.position] for node in phase.nodes}) for phase in phases]
    rows = [
        (
            name,
            tuple(
                _cell(report, phase, name, nodes, [_map_node(node, marks, main, targets) for node in nodes])
                for (phase, targets), nodes in zip(columns, members, strict=True)
            ),
        )
        for name, members in layer_rows(phases).items()
    ]
    nodes = [node for phase in phases for node in phase.nodes]
    fallbacks = sum(len(fallback_nodes(report, phase)) for phase in phases)
    text = [INTRODUCTION, *([COPIES] if any(map(is_copy, nodes)) else [])]
    text += [f"A fallback is a node that is not on {short_provider(preferred_of(report))}."] if fallbacks else []
    timed = any(node.host_us_per_run is not None for node in nodes)
    return LayerMap(
        caption=f"Nodes per layer and phase{'; time is host time per run' if timed else ''}",
        introduction=" ".join(text),
        legend=tuple(marks.values()),
        phases=tuple(phase.name for phase in phases),
        rows=tuple(rows),
        fallbacks=fallbacks,
    )


def layer_rows(phases: Sequence[Phase]) -> dict[str, tuple[list[Node], ...]]:
    """Layer -> its nodes in each phase, in execution order."""
    found: dict[str, tuple[list[Node], ...]] = {}
    for at, phase in enumerate(phases):
        key = layer_key(phase)
        for node in sorted(report_rows(phase), key=positions_in(phase)):
            found.setdefault(key(node), tuple([] for _ in phases))[at].append(node)
    return {name: found[name] for name in sorted(found, key=layer_order)}


def _cell(report: Report, phase: Phase, name: str, nodes: Sequence[Node], drawn: Sequence[MapNode]) -> MapCell:
    """The nodes of the layer `name` in one phase."""
    time = next((entry.host_us_per_run for entry in phase.by_layer if entry.name == name), None)
    added = sum(isinstance(node, NodePlacement) for node in nodes)
    counts = [plural(len(nodes) - added, "node")] if len(nodes) > added else []
    counts += [f"{added:,} added"] if added else []
    counts += [f"{decimals(time, 1e-3)} ms"] if time is not None else []
    found: dict[str, Counter[str]] = {}
    for node in nodes:
        if provider_of(node) != preferred_of(report):
            found.setdefault(short_provider(provider_of(node)), Counter())[op_type_of(node)] += 1
    fallbacks = sum(counter.total() for counter in found.values())
    return MapCell(
        nodes=tuple(drawn),
        summary=", ".join(counts) or "none",
        fallbacks=plural(fallbacks, "fallback") if fallbacks else "",
        fallback_operators="; ".join(f"on {label}: {tally(dict(counter))}" for label, counter in found.items()),
    )


def _map_node(node: Node, marks: Mapping[str, Mark], main: str, targets: Mapping[str, str]) -> MapNode:
    """A node in the colour of its provider. `main`: the provider with the most nodes; `targets`: node -> its row."""
    mark = marks[provider_of(node)]
    css, sign = mark.css, "" if provider_of(node) == main else mark.letter
    if is_copy(node):
        css, sign = f"{mark.css} m", COPY_OPERATORS[node.op_type or ""]
    elif sign:
        css = f"{mark.css} s"
    ran_as = node.ran_as if isinstance(node, FileNode) else (node.name,)
    others = f", as {name_some(ran_as, NAMED_EXECUTED)}" if ran_as != (node.name,) and ran_as else ""
    title = f"{node.name} ({op_type_of(node)}) on {mark.label}{others}"
    return MapNode(css, sign, title, next((targets[name] for name in ran_as if name in targets), "layers"))


def find_marks(report: Report) -> dict[str, Mark]:
    """The marks of every provider of the report: the chain, then other providers with nodes."""
    ran = [provider_of(node) for phase in report.phases for node in (*report_rows(phase), *phase.nodes)]
    providers = list(dict.fromkeys([*(entry.provider for entry in report.chain), *ran]))
    known = [provider for provider in providers if provider != UNKNOWN]
    # Only the preferred provider has the first colour.
    colours = {name: f"e{n if n < COLOURS else n % (COLOURS - 1) + 1}" for n, name in enumerate(known)}
    return {
        provider: Mark(short_provider(provider), colours.get(provider, "eu"), str(number) if provider in known else "?")
        for number, provider in enumerate(providers, 1)
    }


Groups = Callable[[Phase], Sequence[GroupShare]]
NAMED = 8
"""Maximum nodes named in a cell."""


def section(report: Report) -> Section | None:
    """Nodes and time by operator and module, and operators by provider; None if no nodes are known."""
    phases = used_phases(report)
    if not phases:
        return None
    timed = is_timed(report)
    preferred = preferred_of(report) if has_several_providers(phases) else None
    blocks: list[Block] = [*_about_providers(report)]
    blocks += [
        group_table("operator", phases, lambda phase: phase.by_op_type, preferred, timed=timed),
        group_table("module", phases, lambda phase: phase.by_module, preferred, timed=timed),
    ]
    blocks += [Line(TIMES, tone="quiet")] if timed else []
    if any(not entry.nodes + entry.added_nodes for phase in phases for entry in (*phase.by_op_type, *phase.by_module)):
        blocks.append(Line(SEVERAL, tone="quiet"))
    return Section("placement", "Placement", tuple(blocks))


TIMES = "Milliseconds are host time per session run; share: share of the phase's node time."
SEVERAL = "A row with 0 nodes has the time of executed nodes that ran nodes of several rows."


def has_several_providers(phases: Sequence[Phase]) -> bool:
    """Whether nodes are on several providers."""
    return len({entry.provider for phase in phases for entry in phase.providers}) > 1


def group_table(
    title: str,
    phases: Sequence[Phase],
    pick: Groups,
    preferred: str | None,
    *,
    timed: bool,
) -> Table:
    """One row per group. `timed`: with time and share per phase. With a preferred provider: a column of fallbacks."""
    by_phase = [{entry.name: entry for entry in pick(phase)} for phase in phases]
    names = list(dict.fromkeys(entry.name for phase in reversed(phases) for entry in pick(phase)))
    added = any(entry.added_nodes for groups in by_phase for entry in groups.values())
    rows = [
        _group_row(name, [groups.get(name) for groups in by_phase], preferred, added=added, timed=timed)
        for name in names
    ]
    heads: list[Head] = [title, *numbers("nodes", *(["added"] if added else []))]
    heads += ["fallbacks"] if preferred else []
    for phase in phases if timed else ():
        heads += [Column(f"{phase.name} ms", group=phase.name), Column("share", group=phase.name)]

    def rest(shown: int) -> str:
        nodes = sum(groups[name].nodes for groups in by_phase[-1:] for name in names[shown:] if name in groups)
        return f"and {plural(len(names) - shown, f'more {title}')}: {plural(nodes, 'node')}"

    return table(f"By {title}", heads, rows, rest=rest, obvious=True)


def _group_row(
    name: str, entries: Sequence[GroupShare | None], preferred: str | None, *, added: bool, timed: bool
) -> tuple[str, ...]:
    cells = [name, " / ".join(dict.fromkeys(f"{entry.nodes:,}" if entry else "0" for entry in entries))]
    if added:
        cells.append(" / ".join(dict.fromkeys(f"{entry.added_nodes:,}" if entry else "0" for entry in entries)))
    if preferred:
        found = [
            on_providers({name: count for name, count in entry.nodes_by_provider.items() if name != preferred})
            if entry
            else ""
            for entry in entries
        ]
        cells.append(" / ".join(dict.fromkeys(text or "0" for text in found)) if any(found) else "")
    for entry in entries if timed else ():
        cells.append(decimals(entry.host_us_per_run, 1e-3) if entry else NOT_KNOWN)
        cells.append(percent(entry.time_share) if entry else NOT_KNOWN)
    return tuple(cells)


def _about_providers(report: Report) -> Iterator[Line]:
    """Operators of each provider if there are several or if nodes were fused, and control flow."""
    for phases in placements(report):
        phase, where = phases[0], in_phases(phase.name for phase in phases)
        if len(phase.providers) > 1 or any(node.replaces for node in phase.nodes):
            for entry in filter(lambda entry: entry.op_types, phase.providers):
                executed = f"{plural(entry.executed_nodes, 'node')} for {entry.nodes:,} of the file: "
                text = executed if entry.nodes != entry.executed_nodes else ""
                yield Line(f"{text}{tally(entry.op_types)}", f"{short_provider(entry.provider)}{where}")
        if phase.subgraphs is not None:
            yield Line(_render_bodies(phase.subgraphs), f"Control-flow subgraphs{where}, not in other figures")


def _render_bodies(bodies: Subgraphs) -> str:
    """Nodes and copies in control-flow subgraphs."""
    copies = "an unknown number of Memcpy nodes" if bodies.copies is None else plural(bodies.copies, "Memcpy node")
    unseen = (
        "; tensors of the main graph may be copied as well (no source reports them)"
        if bodies.may_have_more_copies
        else ""
    )
    if not bodies.is_known:
        return f"This ONNX Runtime does not list their nodes; {copies}{unseen}."
    on_cpu = plural(len(bodies.on_cpu), "node") + " on CPU"
    listed = ", ".join(f"{node.name} ({node.op_type})" if node.op_type else node.name for node in bodies.on_cpu)
    names = f" ({listed})" if listed else ""
    return f"{plural(bodies.nodes, 'node')} listed, {on_cpu}{names}, {copies}{unseen}."


def layers_section(report: Report) -> Section | None:
    """Nodes and time per layer; None if no nodes are known."""
    phases = used_phases(report)
    if not phases:
        return None
    preferred = preferred_of(report) if has_several_providers(phases) else None
    blocks: list[Block] = [
        layer_map(report),
        group_table("layer", phases, lambda phase: phase.by_layer, preferred, timed=is_timed(report)),
    ]
    nodes = [node for phase in phases for node in phase.nodes]
    notes = [TIMES] if is_timed(report) else []
    if any(is_copy(node) and node.layer is not None for node in nodes):
        notes.append("A Memcpy node counts in the layer of the node that causes it.")
    if any(not entry.nodes + entry.added_nodes for phase in phases for entry in phase.by_layer):
        notes.append(SEVERAL)
    blocks += [Line(text, tone="quiet") for text in notes]
    return Section("layers", "Layers", tuple(blocks))


def nodes_section(report: Report) -> Section | None:
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
    anchors = node_anchors(report)
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for entry in fallbacks_of(report):
        if any(entry.phase == phase.name for phase in phases):
            reasons.setdefault((entry.node, entry.provider), {})[_render_reasons(entry)] = None
    timed = [phase for phase in phases if any(node.host_us_per_run is not None for node in phase.nodes)]
    times = [{node.name: node.host_us_per_run for node in phase.nodes} for phase in timed]
    last = phases[-1]
    rows = []
    for node in last.nodes:
        cells = (
            str(node.position),
            node.name,
            op_type_of(node),
            short_provider(provider_of(node)),
            "" if node.layer is None else str(node.layer),
            node.module or "",
            *(decimals(known.get(node.name), 1e-3) for known in times),
            human_bytes(node.output_bytes),
            listing(reasons.get((node.name, provider_of(node)), ())),
            ("compiled from " if node.op_type == COMPILED and node.replaces else "") + name_some(node.replaces, NAMED),
        )
        rows.append(Row(cells, anchors[last.name, node.position]))
    heads: list[Head] = [Column("position"), "node", "operator", "provider", Column("layer"), "module"]
    heads += [*numbers(*(f"{phase.name} host ms" for phase in timed), "output"), "reason", "replaces"]
    runs = "the last run" if last.name == "run" else f"the last run of {last.name}"
    return table(f"Nodes in execution order; output: bytes in {runs}", heads, rows, name=1)


def _render_reasons(entry: Fallback) -> str:
    """The reason, or the reason of each skipped preferred provider if there are several."""
    if not entry.skipped:
        return entry.reason
    return "; ".join(f"{short_provider(each.provider)}: {each.reason}" for each in entry.preferred)
