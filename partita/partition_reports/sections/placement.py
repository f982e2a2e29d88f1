"""Nodes and time by operator, module and layer; the list of all nodes; the map of the layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from partita.diagnosis.records import Fallback
from partita.observations.grouping import grouped
from partita.observations.names import UNKNOWN
from partita.observations.text_format import decimals, in_phases, listing, name_some, plural, short_provider, tally
from partita.partition_reports.groups import layer_key, layer_order, op_type_of, positions_in, provider_of
from partita.partition_reports.phase_records import FileNode, GroupShare, Node, Phase
from partita.partition_reports.records import Report
from partita.partition_reports.sections.model import (
    MOST,
    Block,
    Group,
    LayerMap,
    Line,
    MapCell,
    MapNode,
    Table,
    fields_of,
    pairs,
    table_of,
)

COPY_OPERATORS = {"MemcpyFromHost": "↓", "MemcpyToHost": "↑"}
"""Memcpy operator -> its arrow: down to the device, up to the host."""
NAMED = 8
"""Maximum nodes named in a cell."""
GROUPS = {"operator": "by_op_type", "module": "by_module", "layer": "by_layer"}
"""Title of the first column -> the field of a phase."""
NO_NODES = MapCell((), "none", "", "")
NAMED_EXECUTED = 3
"""Maximum executed nodes named in the title of a node."""
COLOURS = 6
"""Number of provider colours in the style; they repeat for further providers."""
INTRODUCTION = "Every block is a node of the file, or one that ONNX Runtime added, in execution order."
COPIES = "A Memcpy node (↓ to the device, ↑ to the host) is in the layer of the node that requires it."
TIMES = "Milliseconds are host time per session run; share: share of the phase's node time."
WORK = ("read_bytes", "flops", "ceiling_share")
WORK_NOTE = (
    "One step. read: weights, and cached keys and values. flops: products and attention. ceiling share: the time of "
    "this work at the measured rates of the machine, as a share of its host time."
)
IN_LAYER = "A Memcpy node counts in the layer of the node that causes it."
MORE_COPIES = "Tensors of the main graph may be copied as well (no source reports them)."
SEVERAL = "A row with 0 nodes has the time of executed nodes that ran nodes of several rows."


def placement_blocks(report: Report) -> Iterator[Block]:
    """Operators by provider, the map of the layers, and nodes and time by operator, module and layer.

    Nothing if no nodes are known.
    """
    if not report.used_phases:
        return
    yield from _about_providers(report)
    yield layer_map(report)
    yield from (_group_table(report, title, field) for title, field in GROUPS.items())
    nodes = [node for phase in report.used_phases for node in phase.nodes]
    groups = [entry for phase in report.used_phases for field in GROUPS.values() for entry in getattr(phase, field)]
    notes = {
        TIMES: report.is_timed,
        IN_LAYER: any(node.op_type in COPY_OPERATORS and node.layer is not None for node in nodes),
        SEVERAL: any(not entry.nodes + entry.added_nodes for entry in groups),
        WORK_NOTE: any(entry.read_bytes for entry in groups),
    }
    yield from (Line(text, tone="quiet") for text, applies in notes.items() if applies)


def _about_providers(report: Report) -> Iterator[Block]:
    """Operators of each provider if there are several or if nodes were fused, and control flow."""
    for phases in report.placements:
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
            blocks = (
                pairs("Control-flow subgraphs", facts),
                Line("" if inside.is_known else "This ONNX Runtime does not list their nodes."),
                Line(MORE_COPIES if inside.may_have_more_copies else ""),
                table_of("Nodes on CPU", inside.on_cpu, "name", "op_type", "module", obvious=False),
            )
            yield Group(f"Control-flow subgraphs{where}, not in other figures", blocks)


def _group_table(report: Report, title: str, field: str) -> Table:
    """A row for each group of `field`: nodes, added nodes, fallbacks, time and share of each phase, and work."""
    phases = report.used_phases
    none = GroupShare(name="", nodes=0, nodes_by_provider={}, host_us_per_run=None, time_share=None)
    by_phase = [{entry.name: entry for entry in getattr(phase, field)} for phase in phases]
    rows = []
    for name in dict.fromkeys(name for groups in reversed(by_phase) for name in groups):
        entries = [groups.get(name, none) for groups in by_phase]
        fallbacks = [*dict.fromkeys(_fallbacks_text(entry, report.preferred) for entry in entries)]
        row: dict[str, object] = {
            title: name,
            "nodes": tuple(entry.nodes for entry in entries),
            "added": tuple(entry.added_nodes for entry in entries),
            "fallbacks": " / ".join(text or "0" for text in fallbacks) if any(fallbacks) else "",
        }
        for phase, entry in zip(phases, entries, strict=True):
            row |= {f"{phase.name}_us": entry.host_us_per_run, f"{phase.name}_share": entry.time_share}
        work = {each: tuple(getattr(entry, each) for entry in entries) for each in WORK}
        rows.append(row | {each: values if any(values) else None for each, values in work.items()})
    return table_of(f"By {title}", rows, most=MOST)


def _fallbacks_text(entry: GroupShare, preferred: str) -> str:
    """Nodes on each other provider."""
    counts = entry.nodes_by_provider.items()
    return ", ".join(f"{short_provider(name)} {count:,}" for name, count in counts if name != preferred)


# The list of nodes


def nodes_blocks(report: Report) -> Iterator[Block]:
    """Every node in execution order, folded; nothing if no nodes are known."""
    for number, phases in enumerate(report.placements):
        title = f"All nodes{in_phases(phase.name for phase in phases)}: {len(phases[-1].nodes):,}"
        yield Group(title, (_node_table(report, phases, number),), folded=True)


def _node_table(report: Report, phases: Sequence[Phase], number: int) -> Table:
    """The nodes of phases with equal placement. `number`: of these phases, in the anchors of the rows."""
    last = phases[-1]
    times = {phase.name: {node.name: node.host_us_per_run for node in phase.nodes} for phase in phases}
    found = (entry for entry in report.active_fallbacks if entry.phase in times)
    fallbacks = grouped(found, lambda entry: (entry.node, entry.provider))
    rows = []
    for node in last.nodes:
        entries = fallbacks.get((node.name, provider_of(node)), [])
        row = {
            "node": node.name,
            "position": node.position,
            "operator": op_type_of(node),
            "provider": provider_of(node),
            "layer": node.layer,
            "module": node.module,
            **{f"{name}_host_us": known.get(node.name) for name, known in times.items()},
            "output_bytes": node.output_bytes,
            "reason": listing(dict.fromkeys(map(_reasons_text, entries))),
            "copied_bytes": next((entry.cost.copy_bytes_per_run for entry in entries[-1:] if entry.cost), None),
            "cost": next((entry.cost.harmless_reason for entry in entries[-1:] if entry.cost), None),
            "replaces": name_some(node.replaces, NAMED),
            "anchor": f"n{number}-{node.position}",
        }
        rows.append(row)
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
    phases, marks = report.used_phases, _find_marks(report)
    nodes = [node for phase in phases for node in phase.rows]
    counts = Counter(map(provider_of, nodes)) or Counter([UNKNOWN])
    main = counts.most_common(1)[0][0]
    numbers = {phase.name: number for number, alike in enumerate(report.placements) for phase in alike}
    columns = [_column(report, phase, marks, main, numbers[phase.name]) for phase in phases]
    names = sorted(dict.fromkeys(name for column in columns for name in column), key=layer_order)
    text = [INTRODUCTION, COPIES] if any(node.op_type in COPY_OPERATORS for node in nodes) else [INTRODUCTION]
    if any(report.fallback_nodes(phase) for phase in phases):
        text.append(f"A fallback is a node that is not on {short_provider(report.preferred)}.")
    timed = any(node.host_us_per_run is not None for phase in phases for node in phase.nodes)
    return LayerMap(
        caption=f"Nodes per layer and phase{'; time is host time per run' if timed else ''}",
        introduction=" ".join(text),
        legend=tuple(marks.values()),
        phases=tuple(phase.name for phase in phases),
        rows=tuple((name, tuple(column.get(name, NO_NODES) for column in columns)) for name in names),
    )


def _column(report: Report, phase: Phase, marks: Mapping[str, MapNode], main: str, number: int) -> dict[str, MapCell]:
    """The cells of one phase by layer. `main`: the provider with the most nodes; `number`: of the phase's placement."""
    times = {entry.name: entry.host_us_per_run for entry in phase.by_layer}
    targets = {node.name: f"n{number}-{node.position}" for node in phase.nodes}
    cells = {}
    for name, nodes in grouped(sorted(phase.rows, key=positions_in(phase)), layer_key(phase)).items():
        own = sum(isinstance(node, FileNode) for node in nodes)
        summary = [plural(own, "node")] if own else []
        summary += [f"{len(nodes) - own:,} added"] if len(nodes) > own else []
        summary += [f"{decimals(times[name], 1e-3)} ms"] if times.get(name) is not None else []
        fallbacks = [node for node in nodes if provider_of(node) != report.preferred]
        operators = [
            f"on {short_provider(provider)}: {tally(Counter(map(op_type_of, members)))}"
            for provider, members in grouped(fallbacks, provider_of).items()
        ]
        cells[name] = MapCell(
            nodes=tuple(_map_node(node, marks[provider_of(node)], main, targets) for node in nodes),
            summary=", ".join(summary),
            fallbacks=plural(len(fallbacks), "fallback") if fallbacks else "",
            operators="; ".join(operators),
        )
    return cells


def _map_node(node: Node, mark: MapNode, main: str, targets: Mapping[str, str]) -> MapNode:
    """A node in the colour of its provider. `main`: the provider with the most nodes; `targets`: node -> its row."""
    sign = COPY_OPERATORS.get(node.op_type or "", "" if provider_of(node) == main else mark.sign)
    form = " m" if node.op_type in COPY_OPERATORS else " s" if sign else ""
    ran_as = node.ran_as if isinstance(node, FileNode) else (node.name,)
    others = f", as {name_some(ran_as, NAMED_EXECUTED)}" if ran_as != (node.name,) and ran_as else ""
    title = f"{node.name} ({op_type_of(node)}) on {mark.title}{others}"
    target = next((targets[name] for name in ran_as if name in targets), "placement")
    return MapNode(mark.css + form, sign, title, target)


def _find_marks(report: Report) -> dict[str, MapNode]:
    """The mark of every provider of the report: the chain, then other providers with nodes."""
    ran = [provider_of(node) for phase in report.phases for node in (*phase.rows, *phase.nodes)]
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
