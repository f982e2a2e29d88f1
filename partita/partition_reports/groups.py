"""Sums over the nodes of one phase: by provider, op type, layer and module.

Every grouping counts the file nodes that were not folded, and separately the nodes that ONNX Runtime added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from partita.diagnosis import naming
from partita.diagnosis.records import Fallback
from partita.observations.names import UNKNOWN
from partita.partition_reports.file_nodes import file_counts, placed, ran_by, report_rows
from partita.partition_reports.records import FileNode, GroupShare, NodePlacement, Phase, ProviderShare

BEFORE, BETWEEN, AFTER, WHOLE = "before the layers", "between the layers", "after the layers", "the whole graph"
SEVERAL_LAYERS, SEVERAL_MODULES = "several layers", "several modules"
ORDER = {BEFORE: 0, WHOLE: 0, BETWEEN: 2, AFTER: 3}
LAYER = "layer "
Node = FileNode | NodePlacement
Key = Callable[[Node], str]


def provider_of(node: Node) -> str:
    """The node's provider, or `unknown`."""
    return node.provider or UNKNOWN


def is_about(entry: Fallback, node: NodePlacement) -> bool:
    """Whether a fallback is about a plan node; a node in a control-flow subgraph may have the same name, on another
    provider.
    """
    return (entry.node, entry.provider) == (node.name, provider_of(node))


def op_type_of(node: Node) -> str:
    """The node's operator, or `unknown`."""
    return node.op_type or UNKNOWN


def module_name(node: Node) -> str:
    """Name of the group of a node's module, equal in every layer."""
    return naming.module_group(node.module)


def positions_in(phase: Phase) -> Callable[[Node], int]:
    """Position of a node in the execution order; a file node has that of the first node that ran it."""
    positions = {node.name: node.position for node in phase.nodes}
    at: dict[str, int] = {}
    last = 0
    for row in phase.file_nodes:
        last = at[row.name] = next((positions[name] for name in row.ran_as if name in positions), last)
    return lambda node: at[node.name] if isinstance(node, FileNode) else node.position


def layer_key(phase: Phase) -> Key:
    """The function that names the group of a node's layer. Other nodes are before, between or after the layers."""
    position = positions_in(phase)
    inside = sorted(position(node) for node in report_rows(phase) if node.layer is not None)

    def key(node: Node) -> str:
        if node.layer is not None:
            return f"{LAYER}{node.layer}"
        if not inside:
            return WHOLE
        return BEFORE if position(node) < inside[0] else AFTER if position(node) > inside[-1] else BETWEEN

    return key


def layer_order(name: str) -> tuple[int, int]:
    """Sort key of the groups of `layer_key`."""
    return (1, int(name.removeprefix(LAYER))) if name.startswith(LAYER) else (ORDER.get(name, 4), 0)


def total_us(nodes: Iterable[NodePlacement]) -> float | None:
    """Sum of the known node times; None if none is known."""
    known = [node.host_us_per_run for node in nodes if node.host_us_per_run is not None]
    return sum(known) if known else None


def share_of(part: float | None, whole: float | None) -> float | None:
    """`part` of `whole`, 0 .. 1; None if either is unknown or `whole` is 0."""
    return part / whole if part is not None and whole else None


def with_groups(phase: Phase) -> Phase:
    """The phase with its groups."""
    return phase.model_copy(
        update={
            "providers": _by_provider(phase),
            "by_op_type": _slowest_first(_group(phase, op_type_of)),
            "by_layer": tuple(
                sorted(_group(phase, layer_key(phase), SEVERAL_LAYERS), key=lambda entry: layer_order(entry.name))
            ),
            "by_module": _slowest_first(_group(phase, module_name, SEVERAL_MODULES)),
        }
    )


def _by_provider(phase: Phase) -> tuple[ProviderShare, ...]:
    """Share of each provider, sorted by number of file nodes."""
    counts, whole = file_counts(phase), total_us(phase.nodes)
    shares = []
    for provider in dict.fromkeys((*counts, *map(provider_of, phase.nodes))):
        ran = [node for node in phase.nodes if provider_of(node) == provider]
        rows = [row for row in placed(phase) if provider_of(row) == provider]
        time = total_us(ran)
        shares.append(
            ProviderShare(
                provider=provider,
                nodes=counts[provider],
                added_nodes=sum(node.added for node in ran),
                executed_nodes=len(ran),
                op_types=dict(Counter(map(op_type_of, rows)).most_common()),
                host_us_per_run=time,
                time_share=share_of(time, whole),
            )
        )
    return tuple(sorted(shares, key=lambda entry: (-entry.nodes, -entry.executed_nodes)))


def _group(phase: Phase, key: Key, several: str = "") -> list[GroupShare]:
    """One share per group of `key`.

    The time of an executed node belongs to the group of the file nodes that it ran. If these are in several groups, it
    belongs to the group `several`, by default to that of the executed node.
    """
    rows: dict[str, list[Node]] = {}
    for row in report_rows(phase):
        rows.setdefault(key(row), []).append(row)
    ran: dict[str, list[NodePlacement]] = {}
    runs, whole = ran_by(phase), total_us(phase.nodes)
    for node in phase.nodes:
        if node.host_us_per_run is not None:
            names = {key(row) for row in runs.get(node.name, ())}
            name = names.pop() if len(names) == 1 else several if names and several else key(node)
            ran.setdefault(name, []).append(node)
    shares = []
    for name in dict.fromkeys((*rows, *ran)):
        members, time = rows.get(name, []), total_us(ran.get(name, ()))
        counts = Counter(provider_of(row) for row in members if isinstance(row, FileNode))
        shares.append(
            GroupShare(
                name=name,
                nodes=counts.total(),
                added_nodes=len(members) - counts.total(),
                nodes_by_provider=dict(counts.most_common()),
                host_us_per_run=time,
                time_share=share_of(time, whole),
            )
        )
    return shares


def _slowest_first(shares: Iterable[GroupShare]) -> tuple[GroupShare, ...]:
    """The slowest group first."""
    return tuple(sorted(shares, key=lambda entry: (-(entry.host_us_per_run or 0.0), -entry.nodes, entry.name)))
