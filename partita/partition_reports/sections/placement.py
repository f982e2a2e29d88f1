"""Nodes and time by operator, module and layer; the list of all nodes; the map of the layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from partita.diagnosis.graphs import COMPILED
from partita.diagnosis.records import Fallback
from partita.observations.names import UNKNOWN
from partita.observations.text_format import decimals, in_phases, listing, name_some, plural, short_provider, tally
from partita.partition_reports.groups import (
    Node,
    grouped,
    layer_key,
    layer_order,
    op_type_of,
    positions_in,
    provider_of,
    report_rows,
)
from partita.partition_reports.outcome import (
    fallback_nodes,
    fallbacks_of,
    is_timed,
    merge_phases,
    preferred_of,
    used_phases,
)
from partita.partition_reports.records import FileNode, GroupShare, Phase, Report
from partita.partition_reports.sections.model import (
    MOST,
    Block,
    Group,
    LayerMap,
    Line,
    MapCell,
    MapNode,
    Section,
    Table,
    fields_of,
    pairs,
    table_of,
)

COPY_OPERATORS = {"MemcpyFromHost": "↓", "MemcpyToHost": "↑"}
"""Memcpy operator -> its arrow: down to the device, up to the host."""
NAMED = 8
"""Maximum nodes named in a cell."""
NAMED_EXECUTED = 3
"""Maximum executed nodes named in the title of a node."""
COLOURS = 6
"""Number of provider colours in the style; they repeat for further providers."""
INTRODUCTION = "Every block is a node of the file, or one that ONNX Runtime added, in execution order."
COPIES = "A Memcpy node (↓ to the device, ↑ to the host) is in the layer of the node that requires it."
TIMES = "Milliseconds are host time per session run; share: share of the phase's node time."
MORE_COPIES = "Tensors of the main graph may be copied as well (no source reports them)."
SEVERAL = "A row with 0 nodes has the time of executed nodes that ran nodes of several rows."


def placements(report: Report) -> list[list[Phase]]:
    """Phases with nodes, grouped by equal placement."""
    return merge_phases(used_phases(report))


def node_anchors(report: Report) -> dict[tuple[str, str], str]:
    """(phase, executed node) -> anchor in the list of nodes; phases with equal placement share rows."""
    return {
        (phase.name, node.name): f"n{number}-{node.position}"
        for number, phases in enumerate(placements(report))
        for phase in phases
        for node in phase.nodes
    }


def section(report: Report) -> Section | None:
    """Nodes and time by operator and module, and operators by provider; None if no nodes are known."""
    if not used_phases(report):
        return None
    tables = (_group_table(report, "operator", "by_op_type"), _group_table(report, "module", "by_module"))
    notes = _notes(report, "by_op_type", "by_module")
    return Section("placement", "Placement", (*_about_providers(report), *tables, *notes))


def layers_section(report: Report) -> Section | None:
    """Nodes and time per layer, and the map of the layers; None if no nodes are known."""
    if not used_phases(report):
        return None
    table = _group_table(report, "layer", "by_layer")
    blocks: tuple[Block, ...] = (layer_map(report), table, *_notes(report, "by_layer"))
    return Section("layers", "Layers", blocks)


def _about_providers(report: Report) -> Iterator[Block]:
    """Operators of each provider if there are several or if nodes were fused, and control flow."""
    for phases in placements(report):
        phase, where = phases[0], in_phases(phase.name for phase in phases)
        if len(phase.providers) > 1 or any(node.replaces for node in phase.nodes):
            for entry in filter(lambda entry: entry.op_types, phase.providers):
                executed = f"{plural(entry.executed_nodes, 'node')} for {entry.nodes:,} of the file: "
                text = executed if entry.nodes != entry.executed_nodes else ""
                yield Line(f"{text}{tally(entry.op_types)}", f"{short_provider(entry.provider)}{where}")
        if phase.subgraphs is not None:
            inside = phase.subgraphs
            facts = fields_of(inside, "is_known", "may_have_more_copies", "copies")
            facts += [("nodes on CPU", "0")] if inside.is_known and not inside.on_cpu else []
            facts.append(("Memcpy nodes", "unknown" if inside.copies is None else f"{inside.copies:,}"))
            blocks: list[Block] = [pairs("Control-flow subgraphs", facts)]
            blocks += [] if inside.is_known else [Line("This ONNX Runtime does not list their nodes.")]
            blocks += [Line(MORE_COPIES)] if inside.may_have_more_copies else []
            blocks.append(table_of("Nodes on CPU", inside.on_cpu, "name", "op_type", "module", obvious=False))
            yield Group(f"Control-flow subgraphs{where}, not in other figures", tuple(blocks))


def _group_table(report: Report, title: str, field: str) -> Table:
    """A row for each group of `field`: nodes, added nodes, fallbacks, then time and share of each phase."""
    phases = used_phases(report)
    none = GroupShare(name="", nodes=0, nodes_by_provider={}, host_us_per_run=None, time_share=None)
    by_phase = [{entry.name: entry for entry in getattr(phase, field)} for phase in phases]
    rows = []
    for name in dict.fromkeys(name for groups in reversed(by_phase) for name in groups):
        entries = [groups.get(name, none) for groups in by_phase]
        fallbacks = [*dict.fromkeys(_fallbacks_text(entry, preferred_of(report)) for entry in entries)]
        row: dict[str, object] = {
            title: name,
            "nodes": tuple(entry.nodes for entry in entries),
            "added": tuple(entry.added_nodes for entry in entries),
            "fallbacks": " / ".join(text or "0" for text in fallbacks) if any(fallbacks) else "",
        }
        for phase, entry in zip(phases, entries, strict=True):
            row |= {f"{phase.name}_us": entry.host_us_per_run, f"{phase.name}_share": entry.time_share}
        rows.append(row)
    return table_of(f"By {title}", rows, most=MOST)


def _fallbacks_text(entry: GroupShare, preferred: str) -> str:
    """Nodes on each other provider."""
    counts = entry.nodes_by_provider.items()
    return ", ".join(f"{short_provider(name)} {count:,}" for name, count in counts if name != preferred)


def _notes(report: Report, *fields: str) -> Iterator[Line]:
    """Meaning of the columns of a table of groups."""
    nodes = [node for phase in used_phases(report) for node in phase.nodes]
    groups = [entry for phase in used_phases(report) for field in fields for entry in getattr(phase, field)]
    if is_timed(report):
        yield Line(TIMES, tone="quiet")
    if "by_layer" in fields and any(node.op_type in COPY_OPERATORS and node.layer is not None for node in nodes):
        yield Line("A Memcpy node counts in the layer of the node that causes it.", tone="quiet")
    if any(not entry.nodes + entry.added_nodes for entry in groups):
        yield Line(SEVERAL, tone="quiet")


# The list of nodes


def nodes_section(report: Report) -> Section | None:
    """Every node in execution order, folded; None if no nodes are known."""
    folds = []
    for phases in placements(report):
        where = in_phases(phase.name for phase in phases)
        title = f"All nodes{where}: {len(phases[-1].nodes):,}"
        folds.append(Group(title, (_node_table(report, phases),), folded=True))
    return Section("nodes", "Nodes", tuple(folds)) if folds else None


def _node_table(report: Report, phases: Sequence[Phase]) -> Table:
    """The nodes of phases with equal placement."""
    last, anchors = phases[-1], node_anchors(report)
    times = {phase.name: {node.name: node.host_us_per_run for node in phase.nodes} for phase in phases}
    entries = (entry for entry in fallbacks_of(report) if entry.phase in times)
    fallbacks = grouped(entries, lambda entry: (entry.node, entry.provider))
    rows = [
        {
            "node": node.name,
            "position": node.position,
            "operator": op_type_of(node),
            "provider": provider_of(node),
            "layer": node.layer,
            "module": node.module,
            **{f"{name}_host_us": known.get(node.name) for name, known in times.items()},
            "output_bytes": node.output_bytes,
            "reason": listing(dict.fromkeys(map(_reasons_text, fallbacks.get((node.name, provider_of(node)), ())))),
            "replaces": ("compiled from " if node.op_type == COMPILED and node.replaces else "")
            + name_some(node.replaces, NAMED),
            "anchor": anchors[last.name, node.name],
        }
        for node in last.nodes
    ]
    runs = "the last run" if last.name == "run" else f"the last run of {last.name}"
    return table_of(f"Nodes in execution order; output: bytes in {runs}", rows, obvious=False)


def _reasons_text(entry: Fallback) -> str:
    """The reason, or the reason of each skipped preferred provider if there are several."""
    if not entry.skipped:
        return entry.reason
    return "; ".join(f"{short_provider(each.provider)}: {each.reason}" for each in entry.preferred)


# The map of the layers


def layer_map(report: Report) -> LayerMap:
    """The map of every phase that has nodes."""
    phases, marks = used_phases(report), _find_marks(report)
    nodes = [sorted(report_rows(phase), key=positions_in(phase)) for phase in phases]
    by_layer = [grouped(rows, layer_key(phase)) for phase, rows in zip(phases, nodes, strict=True)]
    counts = Counter(provider_of(node) for rows in nodes for node in rows)
    main = max(counts, key=counts.__getitem__, default=UNKNOWN)
    anchors = node_anchors(report)
    targets = [{node.name: anchors[phase.name, node.name] for node in phase.nodes} for phase in phases]
    rows = []
    for name in sorted(dict.fromkeys(name for groups in by_layer for name in groups), key=layer_order):
        cells = []
        for phase, groups, anchor_of in zip(phases, by_layer, targets, strict=True):
            members = groups.get(name, [])
            drawn = tuple(_map_node(node, marks[provider_of(node)], main, anchor_of) for node in members)
            cells.append(_cell(report, phase, name, members, drawn))
        rows.append((name, tuple(cells)))
    has_copies = any(node.op_type in COPY_OPERATORS for rows in nodes for node in rows)
    text = [INTRODUCTION, COPIES] if has_copies else [INTRODUCTION]
    if any(fallback_nodes(report, phase) for phase in phases):
        text.append(f"A fallback is a node that is not on {short_provider(preferred_of(report))}.")
    timed = any(node.host_us_per_run is not None for phase in phases for node in phase.nodes)
    return LayerMap(
        caption=f"Nodes per layer and phase{'; time is host time per run' if timed else ''}",
        introduction=" ".join(text),
        legend=tuple(marks.values()),
        phases=tuple(phase.name for phase in phases),
        rows=tuple(rows),
    )


def _cell(report: Report, phase: Phase, name: str, nodes: Sequence[Node], drawn: tuple[MapNode, ...]) -> MapCell:
    """The nodes of the layer `name` in one phase."""
    time = next((entry.host_us_per_run for entry in phase.by_layer if entry.name == name), None)
    own = sum(isinstance(node, FileNode) for node in nodes)
    counts = [plural(own, "node")] if own else []
    counts += [f"{len(nodes) - own:,} added"] if len(nodes) > own else []
    counts += [f"{decimals(time, 1e-3)} ms"] if time is not None else []
    fallbacks = [node for node in nodes if provider_of(node) != preferred_of(report)]
    found = [
        f"on {short_provider(provider)}: {tally(Counter(map(op_type_of, members)))}"
        for provider, members in grouped(fallbacks, provider_of).items()
    ]
    number = plural(len(fallbacks), "fallback") if fallbacks else ""
    return MapCell(drawn, ", ".join(counts) or "none", number, "; ".join(found))


def _map_node(node: Node, mark: MapNode, main: str, targets: Mapping[str, str]) -> MapNode:
    """A node in the colour of its provider. `main`: the provider with the most nodes; `targets`: node -> its row."""
    sign = COPY_OPERATORS.get(node.op_type or "", "" if provider_of(node) == main else mark.sign)
    form = " m" if node.op_type in COPY_OPERATORS else " s" if sign else ""
    ran_as = node.ran_as if isinstance(node, FileNode) else (node.name,)
    others = f", as {name_some(ran_as, NAMED_EXECUTED)}" if ran_as != (node.name,) and ran_as else ""
    title = f"{node.name} ({op_type_of(node)}) on {mark.title}{others}"
    target = next((targets[name] for name in ran_as if name in targets), "layers")
    return MapNode(mark.css + form, sign, title, target)


def _find_marks(report: Report) -> dict[str, MapNode]:
    """The mark of every provider of the report: the chain, then other providers with nodes."""
    ran = [provider_of(node) for phase in report.phases for node in (*report_rows(phase), *phase.nodes)]
    providers = list(dict.fromkeys([*(entry.provider for entry in report.chain), *ran]))
    known = [provider for provider in providers if provider != UNKNOWN]
    # Only the preferred provider has the first colour.
    colours = {name: f"e{n if n < COLOURS else n % (COLOURS - 1) + 1}" for n, name in enumerate(known)}
    return {
        provider: MapNode(
            colours.get(provider, "eu"), str(number) if provider in known else "?", short_provider(provider)
        )
        for number, provider in enumerate(providers, 1)
    }
