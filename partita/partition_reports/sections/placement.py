"""Nodes and time by operator, module and layer; the list of all nodes; the map of the layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

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
from partita.partition_reports.outcome import (
    fallback_nodes,
    fallbacks_of,
    is_timed,
    merge_phases,
    preferred_of,
    used_phases,
)
from partita.partition_reports.records import FileNode, GroupShare, NodePlacement, Phase, Report
from partita.partition_reports.sections.model import (
    MOST,
    Block,
    Column,
    Group,
    LayerMap,
    Line,
    MapCell,
    MapNode,
    Mark,
    Row,
    Section,
    Table,
    fields_of,
    numbers,
    pairs,
    table,
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
    blocks: tuple[Block, ...] = (
        layer_map(report),
        _group_table(report, "layer", "by_layer"),
        *_notes(report, "by_layer"),
    )
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
            if inside.on_cpu:
                blocks.append(table_of("Nodes on CPU", inside.on_cpu, "name", "op_type", "module", obvious=False))
            yield Group(f"Control-flow subgraphs{where}, not in other figures", tuple(blocks))


def _group_table(report: Report, title: str, field: str) -> Table:
    """A row for each group of `field`: nodes, added nodes, fallbacks, then time and share of each phase."""
    phases = used_phases(report)
    by_phase: list[dict[str, GroupShare]] = [{entry.name: entry for entry in getattr(p, field)} for p in phases]
    several = len({entry.provider for phase in phases for entry in phase.providers}) > 1
    added = any(entry.added_nodes for groups in by_phase for entry in groups.values())
    rows = []
    for name in dict.fromkeys(name for groups in reversed(by_phase) for name in groups):
        entries = [groups.get(name) for groups in by_phase]
        cells = [name, _joined(f"{entry.nodes:,}" if entry else "0" for entry in entries)]
        cells += [_joined(f"{entry.added_nodes:,}" if entry else "0" for entry in entries)] if added else []
        if several:
            found = [_fallbacks_text(entry, preferred_of(report)) for entry in entries]
            cells.append(_joined(text or "0" for text in found) if any(found) else "")
        for entry in entries if is_timed(report) else ():
            cells.append(decimals(entry.host_us_per_run, 1e-3) if entry else NOT_KNOWN)
            cells.append(percent(entry.time_share) if entry else NOT_KNOWN)
        rows.append(cells)
    heads: list[Column | str] = [
        title,
        *numbers("nodes", *(["added"] if added else [])),
        *(["fallbacks"] if several else []),
    ]
    for phase in phases if is_timed(report) else ():
        heads += numbers(f"{phase.name} ms", f"{phase.name} share")
    return table(f"By {title}", heads, rows, most=MOST, obvious=True)


def _joined(texts: Iterator[str]) -> str:
    """The text of each phase; equal texts once."""
    return " / ".join(dict.fromkeys(texts))


def _fallbacks_text(entry: GroupShare | None, preferred: str) -> str:
    """Nodes on each other provider."""
    counts = {} if entry is None else entry.nodes_by_provider
    return ", ".join(f"{short_provider(name)} {count:,}" for name, count in counts.items() if name != preferred)


def _notes(report: Report, *fields: str) -> Iterator[Line]:
    """Meaning of the columns of a table of groups."""
    nodes = [node for phase in used_phases(report) for node in phase.nodes]
    groups = [entry for phase in used_phases(report) for field in fields for entry in getattr(phase, field)]
    if is_timed(report):
        yield Line(TIMES, tone="quiet")
    if "by_layer" in fields and any(is_copy(node) and node.layer is not None for node in nodes):
        yield Line("A Memcpy node counts in the layer of the node that causes it.", tone="quiet")
    if any(not entry.nodes + entry.added_nodes for entry in groups):
        yield Line(SEVERAL, tone="quiet")


# The list of nodes


def nodes_section(report: Report) -> Section | None:
    """Every node in execution order, folded; None if no nodes are known."""
    folds = tuple(
        Group(
            f"All nodes{in_phases(phase.name for phase in phases)}: {len(phases[-1].nodes):,}",
            (_node_table(report, phases),),
            folded=True,
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
            reasons.setdefault((entry.node, entry.provider), {})[_reasons_text(entry)] = None
    timed = [phase for phase in phases if any(node.host_us_per_run is not None for node in phase.nodes)]
    times = [{node.name: node.host_us_per_run for node in phase.nodes} for phase in timed]
    last = phases[-1]
    rows = []
    for node in last.nodes:
        cells = (
            node.name,
            str(node.position),
            op_type_of(node),
            short_provider(provider_of(node)),
            "" if node.layer is None else str(node.layer),
            node.module or "",
            *(decimals(known.get(node.name), 1e-3) for known in times),
            human_bytes(node.output_bytes),
            listing(reasons.get((node.name, provider_of(node)), ())),
            ("compiled from " if node.op_type == COMPILED and node.replaces else "") + name_some(node.replaces, NAMED),
        )
        rows.append(Row(cells, anchors[last.name, node.name]))
    heads: list[Column | str] = ["node", Column("position"), "operator", "provider", Column("layer"), "module"]
    heads += [*numbers(*(f"{phase.name} host ms" for phase in timed), "output"), "reason", "replaces"]
    runs = "the last run" if last.name == "run" else f"the last run of {last.name}"
    return table(f"Nodes in execution order; output: bytes in {runs}", heads, rows)


def _reasons_text(entry: Fallback) -> str:
    """The reason, or the reason of each skipped preferred provider if there are several."""
    if not entry.skipped:
        return entry.reason
    return "; ".join(f"{short_provider(each.provider)}: {each.reason}" for each in entry.preferred)


# The map of the layers


def layer_map(report: Report) -> LayerMap:
    """The map of every phase that has nodes."""
    phases, marks, anchors = used_phases(report), _find_marks(report), node_anchors(report)
    counts = Counter(provider_of(node) for phase in phases for node in report_rows(phase))
    main = max(counts, key=lambda provider: counts[provider], default=UNKNOWN)
    targets = {phase.name: {node.name: anchors[phase.name, node.name] for node in phase.nodes} for phase in phases}
    members: dict[str, list[list[Node]]] = {}
    for at, phase in enumerate(phases):
        key = layer_key(phase)
        for node in sorted(report_rows(phase), key=positions_in(phase)):
            members.setdefault(key(node), [[] for _ in phases])[at].append(node)

    def cell(phase: Phase, name: str, nodes: Sequence[Node]) -> MapCell:
        drawn = tuple(_map_node(node, marks, main, targets[phase.name]) for node in nodes)
        return _cell(report, phase, name, nodes, drawn)

    rows = tuple(
        (name, tuple(cell(phase, name, nodes) for phase, nodes in zip(phases, members[name], strict=True)))
        for name in sorted(members, key=layer_order)
    )
    text = [INTRODUCTION, *([COPIES] if any(is_copy(node) for phase in phases for node in phase.nodes) else [])]
    if any(fallback_nodes(report, phase) for phase in phases):
        text.append(f"A fallback is a node that is not on {short_provider(preferred_of(report))}.")
    timed = any(node.host_us_per_run is not None for phase in phases for node in phase.nodes)
    return LayerMap(
        caption=f"Nodes per layer and phase{'; time is host time per run' if timed else ''}",
        introduction=" ".join(text),
        legend=tuple(marks.values()),
        phases=tuple(phase.name for phase in phases),
        rows=rows,
    )


def is_copy(node: Node) -> bool:
    """Whether it is a Memcpy node."""
    return node.op_type in COPY_OPERATORS


def _cell(report: Report, phase: Phase, name: str, nodes: Sequence[Node], drawn: tuple[MapNode, ...]) -> MapCell:
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
        nodes=drawn,
        summary=", ".join(counts) or "none",
        fallbacks=plural(fallbacks, "fallback") if fallbacks else "",
        fallback_operators="; ".join(f"on {label}: {tally(counter)}" for label, counter in found.items()),
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


def _find_marks(report: Report) -> dict[str, Mark]:
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
