"""The map of a page: every node of every layer, with the colour of its provider."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from partita.diagnosis.naming import module_group
from partita.observations.names import CPU, UNKNOWN
from partita.observations.text_format import decimals, name_some, plural, short_provider, tally
from partita.partition_reports.groups import (
    LAYER,
    Node,
    layer_key,
    layer_order,
    op_type_of,
    positions_in,
    provider_of,
    report_rows,
)
from partita.partition_reports.outcome import fallback_nodes, preferred_of, used_phases
from partita.partition_reports.records import FileNode, NodePlacement, Phase, Report
from partita.partition_reports.sections.model import LayerMap, MapCell, MapNode, Mark
from partita.partition_reports.sections.shared import COPY_OPERATORS, is_copy, node_anchors

NAMED = 3
"""Maximum executed nodes named in the title of a node."""
NAMED_MODULES = 4
"""Maximum modules named in a row outside the layers."""
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
    columns = []
    for phase in phases:
        targets = {node.name: anchors[phase.name, node.position] for node in phase.nodes}
        columns.append((phase, targets))
    rows = [
        (
            name,
            _modules(name, members),
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


def _modules(name: str, members: Sequence[Sequence[Node]]) -> str:
    """The modules of a row outside the layers."""
    if name.startswith(LAYER):
        return ""
    named = (node.module for nodes in members for node in nodes if node.module and isinstance(node, FileNode))
    names = list(dict.fromkeys(map(module_group, named)))
    return ", ".join(names[:NAMED_MODULES]) + (", …" if len(names) > NAMED_MODULES else "")


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
    css, sign = mark.css, "" if mark.provider == main else mark.letter
    if is_copy(node):
        css, sign = f"{mark.css} m", COPY_OPERATORS[node.op_type or ""]
    elif sign:
        css = f"{mark.css} s"
    ran_as = node.ran_as if isinstance(node, FileNode) else (node.name,)
    others = f", as {name_some(ran_as, NAMED)}" if ran_as != (node.name,) and ran_as else ""
    title = f"{node.name} ({op_type_of(node)}) on {mark.label}{others}"
    return MapNode(css, sign, title, next((targets[name] for name in ran_as if name in targets), "layers"))


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


def pick_letters(providers: Sequence[str]) -> dict[str, str]:
    """A letter per provider: the first free letter of its short name; C is reserved for the CPU."""
    letters: dict[str, str] = {UNKNOWN: "?"}
    for provider in sorted(providers, key=lambda name: name != CPU):
        free = (mark.upper() for mark in short_provider(provider) if mark.isascii() and mark.isalnum())
        letters.setdefault(provider, next((mark for mark in free if mark not in letters.values()), "*"))
    return letters
